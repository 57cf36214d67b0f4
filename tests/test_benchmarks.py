"""What the comparison in the lab makes of its measurements, which need a quiet machine and root; and the check for a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lab_throughput import Cell, pareto, summary

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
NAME = "wide-shallow, accumulation 1"
MB = 10**6


def result(program: str, memory: int, *seconds: float, budget: int | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "program": program,
        "peak_bytes": memory * MB,
        "state_bytes": MB,
        "bytes_sent": [MB],
        "step_seconds": [list(seconds)],
        "losses": [1.0] if program != "local" else [7.0],
    }
    if budget is not None:
        found["plan"] = {"budget_bytes": budget * MB, "peak_bytes": memory * MB, "step_seconds": 1.0, "hash": "h"}
    return found


def run(**systems: dict[str, Any]) -> dict[str, Any]:
    measured = {
        "local": result("local", 20, 0.1),
        "DDP": result("ddp", 80, 2.0, 2.2, 2.1),
        "DDP, small buckets": result("ddp", 80, 2.0),
        "ZeRO-3": result("deepspeed", 50, 4.0),
        "ZeRO-3, threshold all": result("deepspeed", 60, 3.0),
        "osdp whole": result("ds_osdp", 90, 2.0, budget=1000),
        "osdp 0%": {"program": "ds_osdp", "failure": "InfeasiblePlanError: no"},
        "osdp 50%": result("ds_osdp", 69, 2.5, budget=70),
        "osdp 100%": result("ds_osdp", 89, 2.2, budget=90),
        **systems,
    }
    return {"setting": "2x1gbit", "cells": {NAME: measured}}


def test_a_budget_is_compared_with_the_fastest_stock_that_fits_it() -> None:
    half, full = Cell(run(), NAME).points
    assert (half["best_stock"], half["ratio_to_best_stock"]) == ("ZeRO-3, threshold all", pytest.approx(2.5 / 3))
    assert (full["best_stock"], full["ratio_to_best_stock"]) == ("DDP, small buckets", pytest.approx(1.1))


def test_the_summary_has_the_worst_of_all_and_what_had_no_plan() -> None:
    slow = run(**{"osdp 100%": result("ds_osdp", 89, 3.0, budget=90)})
    found = summary([run(), slow])
    assert (found["points"], found["points_without_plan"], found["losses_equal"]) == (4, 2, True)
    assert found["worst_ratio_to_best_stock"] == found["full_budget_ratio_to_ddp"] == pytest.approx(1.5)
    # Over ZeRO-3 as it is: what a threshold keeps is not compared here.
    assert found["half_budget_speedup_over_zero3_a1"] == pytest.approx(4.0 / 2.5)
    assert found["half_budget_speedup_over_zero3_a4"] is None
    other = result("ddp", 80, 2.0)
    other["losses"] = [1.1]
    assert not summary([run(DDP=other)])["losses_equal"]


def test_nothing_is_faster_than_its_computation_and_its_gradients_on_the_wire() -> None:
    cell = Cell(run(), NAME)
    # 3.8 M gradients in fp32: between two hosts each sends them once, at 1 Gbit/s.
    assert cell.bound_seconds == pytest.approx(3_795_456 * 4 * 8 / 1e9)
    assert Cell(run(local=result("local", 20, 0.5)), NAME).bound_seconds == 0.5


def test_the_front_leaves_out_what_is_neither_leaner_nor_faster() -> None:
    assert pareto([(2.0, 1.0), (1.0, 2.0), (3.0, 3.0), (3.0, 2.5)]) == [(1.0, 2.0), (3.0, 3.0)]


@pytest.mark.slow
@pytest.mark.ranks
def test_the_check_for_a_gpu_is_rehearsed() -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--device", "cpu", "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["rows"], found["losses_equal"]) == (2, True)
    assert found["worst_memory_error_percent"] < 5
    assert found["time"].keys() == {"stock", "stage 3"}
