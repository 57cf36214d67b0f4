"""What README, the documentation and the configurations show works as shown: every command is run as it stands there."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import hjson
import pytest

from ds_osdp.cli import main
from ds_osdp.config import OsdpConfig, find_section
from ds_osdp.schema import config_schema

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
CONFIGS = sorted((ROOT / "ds_configs").glob("*.json"))
MODELS = {"moe": "hf:examples/mixtral/config.json", "lora": "py:examples.lora_model:build"}
LAUNCHERS = ("deepspeed ", "torchrun ", "accelerate ")
ELSEWHERE = ("make demo", "make test", "make docs", "pip install .")
"""Run by CI, or by hand for a release."""


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


def commands(page: Path) -> list[str]:
    lines = [line for block in blocks(page, "console") for line in block.splitlines()]
    return [line[2:].split("  #")[0].strip() for line in lines if line.startswith("$ ")]


COMMANDS = list(dict.fromkeys(command for page in PAGES for command in commands(page)))
# These run DeepSpeed, which does not belong in the process of the tests.
APART = [c for c in COMMANDS if c.startswith(("ds-osdp check", "ds-osdp dry-run", "python -m "))]
PLANNING = {page: [c for c in commands(page) if c.startswith("ds-osdp ") and c not in APART] for page in PAGES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a reader stands: in the repository, but what commands write stays out of it."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("ds_configs", "examples", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    # Pages go on with the plan that the tutorial makes.
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        (first,) = (c for c in PLANNING[DOCS / "tutorial.md"] if "--output" in c)
        assert main(shlex.split(first)[1:]) == 0
    return folder


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_blocks_are_what_they_say(page: Path) -> None:
    for block in blocks(page, "python"):
        ast.parse(block)
    for block in blocks(page, "json"):
        config = json.loads(f"{{{block}}}")
        find_section(config)


def test_no_command_is_left_out() -> None:
    known = ("ds-osdp ", "python -m ds_osdp.schema", *LAUNCHERS, *ELSEWHERE)
    assert len(COMMANDS) > 12
    assert [command for command in COMMANDS if not command.startswith(known)] == []


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page, own in PLANNING.items() if own], ids=lambda page: page.name)
def test_the_planning_commands(
    page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    # What an earlier page ran need not run again.
    earlier = {c for other in PAGES[: PAGES.index(page)] for c in PLANNING[other]}
    for command in PLANNING[page]:
        if command not in earlier:
            assert main(shlex.split(command)[1:]) == 0, capsys.readouterr().err
            assert len(capsys.readouterr().out) > 100


@pytest.mark.slow
@pytest.mark.parametrize("command", APART)
def test_the_other_commands(command: str, folder: Path) -> None:
    program, *arguments = shlex.split(command)
    line = [sys.executable, *(["-m", "ds_osdp"] if program == "ds-osdp" else []), *arguments]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(line, cwd=folder, capture_output=True, env=environment, timeout=200, check=True)
    assert len(done.stdout) > 500


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith(LAUNCHERS)])
def test_the_launchers(command: str, folder: Path) -> None:
    paths = os.pathsep.join(filter(None, (str(Path(sys.executable).parent), os.environ["PATH"])))
    settings = {"PATH": paths, "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **settings, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    done = subprocess.run(
        shlex.split(command), cwd=folder, capture_output=True, text=True, env=environment, timeout=250, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "per step predicted" in done.stdout + done.stderr, "the plan is in the log"
    assert "loss" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_ready_configurations_plan(
    config: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    model = MODELS.get(config.stem, "hf:examples/gpt2/config.json")
    assert main(["plan", "--config", str(config), "--model", model, "--world-size", "16", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["units"]


def test_every_configuration_has_its_line() -> None:
    listed = (ROOT / "ds_configs" / "README.md").read_text()
    assert CONFIGS
    assert all(f"`{config.name}`" in listed for config in CONFIGS)


def test_the_published_schema_is_current() -> None:
    """``python -m ds_osdp.schema > ds_osdp/osdp.schema.json`` after a change of the section."""
    assert json.loads((ROOT / "ds_osdp" / "osdp.schema.json").read_text()) == config_schema()


def test_the_schema_knows_every_key_and_says_what_it_means() -> None:
    section = config_schema()["properties"]["osdp"]["properties"]
    assert section.keys() == OsdpConfig.model_fields.keys()
    assert all(value.get("description") or "$ref" in value for value in section.values())


@pytest.mark.parametrize("config", [*CONFIGS, *sorted((ROOT / "examples").rglob("ds*.json"))], ids=lambda path: path.stem)
def test_ready_configurations_follow_the_schema(config: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(hjson.loads(config.read_text()), config_schema())


def test_the_site_builds(tmp_path: Path) -> None:
    """Warnings are errors: a page nobody links to, a link to nowhere, a name that is not in the code."""
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "--world-size" in (tmp_path / "site" / "reference" / "cli" / "index.html").read_text()
    assert "memory_budget" in (tmp_path / "site" / "reference" / "config" / "index.html").read_text()
