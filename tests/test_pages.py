"""What README and the configurations show works as shown."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ds_osdp.cli import main

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
CONFIGS = sorted((ROOT / "ds_configs").glob("*.json"))


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_python_of_the_readme_compiles() -> None:
    assert len(blocks("python")) == 2
    for block in blocks("python"):
        ast.parse(block)


def test_the_json_of_the_readme_is_valid() -> None:
    for block in blocks("json"):
        json.loads(f"{{{block}}}")


COMMANDS = [line[2:].split("  #")[0] for block in blocks("console") for line in block.splitlines() if line.startswith("$ ")]


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("ds-osdp plan")])
def test_the_planning_commands_of_the_readme(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(shlex.split(command)[1:]) == 0
    assert "per step predicted" in capsys.readouterr().out


def test_every_command_of_the_readme_is_known() -> None:
    """make demo, make test and the launchers run elsewhere (CI, test_entry); a new command needs a test."""
    known = ("make demo", "make test", "ds-osdp plan ", "ds-osdp check", "deepspeed --module ds_osdp.run", "torchrun ")
    assert COMMANDS
    assert [c for c in COMMANDS if not c.startswith(known)] == []


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_ready_configurations_plan(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", f"hf:{ROOT}/examples/gpt2/config.json", "--world-size", "16", "--format", "json"]
    assert main(["plan", "--config", str(config), *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["units"]


def test_every_configuration_has_its_line() -> None:
    listed = (ROOT / "ds_configs" / "README.md").read_text()
    assert CONFIGS
    assert all(f"`{config.name}`" in listed for config in CONFIGS)


@pytest.mark.ranks
def test_the_quick_start_runs() -> None:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2"]
    command = [*launcher, str(ROOT / "examples" / "quickstart.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200, check=False)
    assert "step 4: loss" in done.stdout, done.stdout + done.stderr
