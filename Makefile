# `make demo` and `make test` set up everything they need; nothing has to be installed before.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo test check compat docs lint types layers format clean

help:
	@echo "make demo    train a small GPT with stock ZeRO-3, then with a plan, and compare (3 minutes)"
	@echo "make test    run all tests (20 minutes on 2 cores)"
	@echo "make check   lint, types, import layers and the tests that are not slow (12 minutes)"
	@echo "make compat  run the tests on engines with the oldest DeepSpeed in range (10 minutes)"
	@echo "make docs    build the documentation into build/site"
	@echo "make format  reformat the code"

# torch comes first and pinned: a range would pull several GB of CUDA on a machine that may have no GPU.
$(READY): pyproject.toml constraints-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints-dev.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints-dev.txt --editable ".[hf,report,docs,dev]"
	touch $@

demo: $(READY)
	$(BIN)/python examples/demo/run.py

test: $(READY)
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

layers: $(READY)
	$(BIN)/lint-imports

check: lint types layers
	$(BIN)/python -m pytest -m "not slow"

# The oldest DeepSpeed lies in front of the installed one; everything else stays.  Not part of CI, which has no time for it.
OLDEST := 0.19.3
build/deepspeed-$(OLDEST): $(READY)
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --target $@ --no-deps --no-build-isolation deepspeed==$(OLDEST)

compat: build/deepspeed-$(OLDEST)
	PYTHONPATH=$(abspath $<) $(BIN)/python -m pytest tests/test_seams.py tests/test_entry.py tests/test_checkpoints.py tests/test_parity.py

docs: $(READY)
	$(BIN)/python -m mkdocs build --strict --site-dir build/site

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build $(VENV)
