"""Dry runs: the real engine of one rank of many, and what it holds beside what was predicted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": 2_000,
        "stage3_prefetch_bucket_size": 2_000,
        "stage3_max_reuse_distance": 0,
    },
    "osdp": {
        "input": {"ids": {"shape": [16]}},
        "rules": [{"match": "h.0.*", "stage": 0}, {"match": "h.1.*", "stage": 1}, {"match": "*", "stage": 3}],
    },
}


def dry_run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "ds.json").write_text(json.dumps(CONFIG))
    command = [sys.executable, "-m", "ds_osdp", "dry-run", "--config", "ds.json", "--model", "py:models:GPT"]
    command += ["--world-size", "8", "--ranks-per-node", "4", *arguments]
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": path}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250, check=False)


def printed(done: subprocess.CompletedProcess[str], status: int = 0) -> dict[str, Any]:
    assert done.returncode == status, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.ranks
def test_shapes_and_data_need_the_same_and_were_predicted(tmp_path: Path) -> None:
    on_shapes = printed(dry_run(tmp_path, "--format", "json"))
    on_data = printed(dry_run(tmp_path, "--format", "json", "--real"))
    # Single numbers aside: what is a scalar tensor here is a Python number there.
    assert on_shapes["peak_bytes"] == pytest.approx(on_data["peak_bytes"], rel=1e-3)
    assert on_shapes["peak_moment"] == on_data["peak_moment"]
    for size in (on_shapes, on_data):
        assert -0.02 <= size["predicted_peak_bytes"] / size["peak_bytes"] - 1 <= 0.05
        assert sum(size["moments"][size["peak_moment"]].values()) == size["peak_bytes"]
    # Rank 0 of 8 holds an eighth of what is spread: states and parts are counted, not guessed.
    states = on_shapes["moments"]["optimizer step"]["optimizer_states"]
    (update, *_) = (kinds for name, kinds in on_shapes["predicted_moments"].items() if name.startswith("optimizer step"))
    assert states == pytest.approx(update["optimizer_states"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.ranks
def test_what_does_not_fit_has_its_own_status(tmp_path: Path) -> None:
    done = dry_run(tmp_path, "--memory-budget", "10MiB")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "fits: peak" in done.stdout
    assert dry_run(tmp_path, "--memory-budget", "10KiB").returncode == 3
