"""The command line."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ds_osdp.cli import main, make_parser
from ds_osdp.plan import Plan

HERE = Path(__file__).resolve().parent
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
            status = error.code if isinstance(error.code, int) else int(bool(error.code))
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


def test_plan_as_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    done = ds_osdp(*BASE, *SIZES, folder=folder)
    assert done.returncode == 0, done.stderr
    assert "transformer.h.{0-1}.attn.c_attn" in done.stdout
    assert "proven optimal" in done.stdout


def planned(folder: Path, name: str = "plan.json", budget: str = "8400000") -> Plan:
    done = ds_osdp(*BASE, *SIZES, "--memory-budget", budget, "--output", name, folder=folder)
    assert done.returncode == 0, done.stderr
    return Plan.load(folder / name)


def test_a_plan_file_alone_can_be_explained(folder: Path) -> None:
    plan = planned(folder)
    for file in ("ds.json", "config.json"):
        (folder / file).unlink()
    done = ds_osdp("explain", "plan.json", "--more", "10MiB", folder=folder)
    assert done.returncode == 0, done.stderr
    for words in ("binds", "10.0 MiB more", "what memory buys", "ZeRO-2", "DDP"):
        assert words in done.stdout
    done = ds_osdp("explain", "plan.json", "--format", "json", "--html", "report.html", folder=folder)
    reasons = json.loads(done.stdout)
    assert max(sum(moment["bytes"].values()) for moment in reasons["timeline"]) == plan.peak_bytes
    assert sum(part["times"] * part["duration_ns"] for part in reasons["schedule"]) == round(plan.step_seconds * 1e9)
    assert len(reasons["curve"]) == 7
    assert plan.plan_hash in (folder / "report.html").read_text()


def test_why_a_unit_is_what_it_is(folder: Path) -> None:
    plan = planned(folder)
    done = ds_osdp("explain", "plan.json", "--unit", "*.mlp.c_fc", folder=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("c_fc") == done.stdout.count("chosen") == 2
    done = ds_osdp("explain", "plan.json", "--unit", "transformer.wte", "--format", "json", folder=folder)
    options = json.loads(done.stdout)["alternatives"]
    assert {o["option"]["stage"] for o in options} == {0, 1, 2, 3}
    assert [o["fits"] for o in options] == [o["peak_bytes"] <= plan.budget_bytes for o in options]
    assert not all(o["fits"] for o in options)
    done = ds_osdp("explain", "plan.json", "--unit", "decoder", folder=folder)
    assert (done.returncode, "names no unit" in done.stderr) == (2, True)


def test_a_plan_that_does_not_say_what_made_it(folder: Path) -> None:
    plan = planned(folder)
    plan.model_copy(update={"provenance": plan.provenance.model_copy(update={"question": None})}).save(folder / "plan.json")
    done = ds_osdp("explain", "plan.json", folder=folder)
    assert (done.returncode, "osdp.save_plan" in done.stderr) == (2, True)


def test_the_difference_of_two_plans(folder: Path) -> None:
    one = planned(folder, "one.json")
    rules = [{"match": "*.wte.*", "stage": 3}, {"match": "*.wpe.*", "stage": 0}]
    (folder / "ds.json").write_text(json.dumps({**CONFIG, "osdp": {"rules": rules}}))
    other = planned(folder, "other.json", "40MiB")
    done = ds_osdp("diff", "one.json", "other.json", folder=folder)
    assert done.returncode == 0, done.stderr
    assert "units placed otherwise" in done.stdout
    found = json.loads(ds_osdp("diff", "one.json", "other.json", "--format", "json", folder=folder).stdout)
    assert found["totals"]["budget_bytes"] == {"one": 8_400_000, "other": 40 << 20}
    assert {unit["other"]["name"] for unit in found["units"]} == {
        b.name for a, b in zip(one.units, other.units, strict=True) if a != b
    }
    assert "every unit is placed alike" in ds_osdp("diff", "one.json", "one.json", folder=folder).stdout


def test_on_how_many_ranks_it_fits(folder: Path) -> None:
    sizes = ("--world-size", "1,4,8", "--memory-budget", "9000000")
    done = ds_osdp(*BASE, *SIZES, *sizes, "--format", "json", folder=folder)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["world_sizes"]
    assert list(rows) == ["1", "4", "8"]
    assert rows["1"]["least_bytes"] > 9_000_000 >= rows["8"]["peak_bytes"]
    assert "on how many ranks" in ds_osdp(*BASE, *SIZES, *sizes, folder=folder).stdout
    assert ds_osdp(*BASE, *SIZES, "--world-size", "1,2", "--memory-budget", "1MiB", folder=folder).returncode == 3
    assert ds_osdp(*BASE, *SIZES, "--world-size", "4,8", "--output", "p.json", folder=folder).returncode == 2


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


def test_run_runs_the_script_with_its_arguments(folder: Path) -> None:
    (folder / "train.py").write_text("import sys, deepspeed\nprint(deepspeed.initialize.__module__, sys.argv[1:])")
    done = ds_osdp("run", "train.py", "--deepspeed_config", "ds.json", folder=folder)
    assert done.stdout.endswith("ds_osdp.entry ['--deepspeed_config', 'ds.json']\n"), done.stderr
    assert ds_osdp("run", "nowhere.py", folder=folder).returncode != 0


def verbs() -> dict[str, argparse.ArgumentParser]:
    (choices,) = (action for action in make_parser()._actions if isinstance(action, argparse._SubParsersAction))
    return dict(choices.choices)


def test_the_command_line_is_as_it_was() -> None:
    """Scripts lean on it: a change here is a change for users, and a line in the CHANGELOG."""
    found = {
        name: [" ".join(action.option_strings) or action.dest for action in parser._actions if action.dest != "help"]
        for name, parser in verbs().items()
    }
    assert found == json.loads((HERE / "command_line.json").read_text())


@pytest.mark.parametrize("verb", verbs())
def test_every_verb_has_an_example_and_both_formats(verb: str) -> None:
    parser = verbs()[verb]
    assert parser.epilog is not None
    assert "example" in parser.epilog
    assert f"ds-osdp {verb}" in parser.epilog or f"ds_osdp {verb}" in parser.epilog
    assert verb == "run" or "--format" in parser.format_help()


def test_the_statuses_are_in_the_help(folder: Path) -> None:
    assert "exit status:" in ds_osdp("--help", folder=folder).stdout


def test_a_shell_can_complete(folder: Path) -> None:
    done = ds_osdp("--print-completion", "bash", folder=folder)
    assert "--world-size" in done.stdout
