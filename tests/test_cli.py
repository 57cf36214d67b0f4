"""The command line."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ds_osdp.cli import main
from ds_osdp.plan import Plan

GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 512, "architectures": ["GPT2LMHeadModel"]}
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 100_000, "stage3_prefetch_bucket_size": "auto"},
}


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def ds_osdp(*arguments: str, folder: Path) -> Done:
    """Run in this process: torch and pyomo take seconds to import."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            status = main(arguments)
        except SystemExit as error:
            status = int(error.code or 0)
    return Done(status, stdout.getvalue(), stderr.getvalue())


def test_as_a_program(folder: Path) -> None:
    command = [sys.executable, "-m", "ds_osdp", *BASE, *SIZES, "--format", "json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout)["units"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    return tmp_path


BASE = ("plan", "--config", "ds.json", "--model", "hf:config.json", "--world-size", "8", "--ranks-per-node", "4")
SIZES = ("--micro-batch", "2", "--sequence-length", "128")


def test_plan_as_json(folder: Path) -> None:
    done = ds_osdp(*BASE, *SIZES, "--memory-budget", "40MiB", "--format", "json", "--output", "out/plan.json", folder=folder)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    wanted = {"step_seconds", "bound_seconds", "gap", "samples_per_second", "peak_bytes", "budget_bytes", "plan_hash", "units"}
    assert wanted <= printed.keys()
    assert {"name", "stage", "degree", "slices", "recompute", "parameters"} <= printed["units"][0].keys()
    assert printed["peak_bytes"] <= printed["budget_bytes"] == 40 << 20
    plan = Plan.load(folder / "out" / "plan.json")
    assert plan.plan_hash == printed["plan_hash"]
    assert "transformer.wte.weight" in plan.stage_of
    assert "lm_head.weight" not in plan.stage_of, "tied: once, under its first name"


def test_plan_as_text(folder: Path) -> None:
    done = ds_osdp(*BASE, *SIZES, folder=folder)
    assert done.returncode == 0, done.stderr
    assert "transformer.h.{0-1}.attn.c_attn" in done.stdout
    assert "proven optimal" in done.stdout


def test_reasons(folder: Path) -> None:
    done = ds_osdp(*BASE, *SIZES, "--memory-budget", "40MiB", "--explain", folder=folder)
    assert done.returncode == 0, done.stderr
    for words in ("binds", "1 GiB more", "what memory buys", "ZeRO-2", "DDP"):
        assert words in done.stdout
    done = ds_osdp(*BASE, *SIZES, "--memory-budget", "40MiB", "--explain", "--format", "json", folder=folder)
    reasons = json.loads(done.stdout)["explanation"]
    assert max(reasons["moments"].values()) == json.loads(done.stdout)["peak_bytes"]
    assert len(reasons["curve"]) == 7


def test_a_model_from_python(folder: Path) -> None:
    (folder / "ds.json").write_text(json.dumps({**CONFIG, "osdp": {"input": {"ids": {"shape": [16]}}}}))
    done = ds_osdp(
        "plan", "--config", "ds.json", "--model", "py:models:GPT", "--world-size", "2", "--micro-batch", "2", folder=folder
    )
    assert done.returncode == 0, done.stderr
    assert "h.{0-2}.fc1" in done.stdout


def test_infeasible(folder: Path) -> None:
    done = ds_osdp(*BASE, *SIZES, "--memory-budget", "1MiB", "--format", "json", folder=folder)
    assert done.returncode == 3
    least = json.loads(done.stdout)["least_bytes"]
    assert str(least) in done.stderr
    assert ds_osdp(*BASE, *SIZES, "--memory-budget", str(least), folder=folder).returncode == 0
    assert ds_osdp(*BASE, *SIZES, "--memory-budget", str(least - 1), folder=folder).returncode == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory-budget", "3GB "], "not a size"),
        (["--memory-budget", "-1"], "positive|expected one argument"),
        (["--world-size", "0"], "positive"),
        (["--world-size", "6"], "do not fill nodes"),
        (["--config", "nowhere.json"], "nowhere.json"),
        (["--model", "hf:nowhere.json"], "nowhere.json"),
        (["--model", "hf:ds.json"], "no Hugging Face"),
        (["--model", "py:models:Nothing"], "Nothing"),
        (["--model", "gpt2"], "hf:PATH"),
        (["--cluster", "ds.json"], "cluster"),
    ],
)
def test_bad_arguments(folder: Path, arguments: list[str], message: str) -> None:
    done = ds_osdp(*BASE, *SIZES, *arguments, folder=folder)
    assert done.returncode == 2
    assert any(part in done.stderr for part in message.split("|")), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"opsd": {}}, "did you mean 'osdp'"),
        ({"osdp": {"memry_budget": "1GiB"}}, "memory_budget"),
        ({"osdp": {"rules": [{"match": "decoder.*", "stage": 0}]}}, "decoder"),
        ({"zero_optimization": {"stage": 2}}, "set it to 3"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, "offload_param"),
    ],
)
def test_bad_configurations(folder: Path, change: dict[str, Any], message: str) -> None:
    (folder / "ds.json").write_text(json.dumps({**CONFIG, **change}))
    done = ds_osdp(*BASE, *SIZES, folder=folder)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_the_micro_batch_must_be_known(folder: Path) -> None:
    done = ds_osdp(*BASE, folder=folder)
    assert done.returncode == 2
    assert "--micro-batch" in done.stderr


def test_a_model_that_cannot_tell_its_input(folder: Path) -> None:
    done = ds_osdp(
        "plan", "--config", "ds.json", "--model", "py:models:GPT", "--world-size", "2", "--micro-batch", "2", folder=folder
    )
    assert done.returncode == 2
    assert "osdp.input" in done.stderr


def test_comments_in_the_json_are_read_as_deepspeed_reads_them(folder: Path) -> None:
    (folder / "ds.json").write_text('{\n  # hjson\n  "bf16": {"enabled": true},\n  "zero_optimization": {"stage": 3},\n}')
    assert ds_osdp(*BASE, *SIZES, folder=folder).returncode == 0


def test_check(folder: Path) -> None:
    command = [sys.executable, "-m", "ds_osdp", "check", "--format", "json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout[done.stdout.index("{") :])
    assert report["fits"]
    assert all(row["reason"] for row in report["seams"])


def test_help_has_an_example(folder: Path) -> None:
    assert "example:" in ds_osdp("plan", "--help", folder=folder).stdout
