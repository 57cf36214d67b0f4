"""The pytest plugin, on a suite of its own: in a process of its own, as users run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = """
import multiprocessing

import deepspeed
import pytest
import torch


def train(stage, **changes):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        **changes,
    }
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    return engine


def test_is_planned():
    assert [int(unit.stage) for unit in train(3).osdp.plan.units] == [0, 3]


def test_is_left_alone():
    assert not hasattr(train(2), "osdp")


def test_is_refused():
    train(3, prescale_gradients=True)


def child():
    assert hasattr(train(3), "osdp")


def test_in_a_child():
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    Path(folder, "test_suite.py").write_text(SUITE)
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    environment = {**os.environ, **rank, "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "ds_osdp.pytest_plugin", "-p", "no:cacheprovider", "-rs", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=200, check=False)


@pytest.mark.slow
@pytest.mark.ranks
def test_engines_of_a_suite_are_planned(tmp_path: Path) -> None:
    done = run(tmp_path, "--osdp-plan", "half")
    assert "3 passed, 1 skipped" in done.stdout, done.stdout
    assert "ds_osdp refuses: prescale_gradients cannot be combined with osdp" in done.stdout
    assert "osdp: 2 ZeRO-3 engines planned (half), each rank counted, in 2 tests" in done.stdout


@pytest.mark.slow
@pytest.mark.ranks
def test_an_unknown_plan_is_named(tmp_path: Path) -> None:
    done = run(tmp_path, "--osdp-plan", "third")
    assert "--osdp-plan is 'third': use half, all, none or seed:N" in done.stdout + done.stderr
