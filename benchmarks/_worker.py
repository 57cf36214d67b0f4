"""One rank: several systems train the same models in turns, all alive in one process; rank 0 writes a JSON line.

Started by _lab.py with one argument, a JSON object with the fields of `Request`.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import psutil
import torch
import torch.distributed as dist
from _alive import Alive
from _models import MODELS, GPTConfig, token_batches
from _rank import measure_on_this_rank
from _systems import TRAINERS, Trainer
from netlab import DEVICE
from torch import Tensor

from ds_osdp import measure
from ds_osdp.cluster import Cluster
from ds_osdp.errors import InfeasiblePlanError
from ds_osdp.plan import Plan

OBSERVED_STEPS = 8


@dataclass(frozen=True)
class Request:
    """What to run."""

    cells: dict[str, dict[str, Any]]
    """By name, the fields of `Cell`."""
    warmup: int
    """Steps of each system before any is timed; of the last one, memory is measured."""
    steps: int
    """Timed in each pass, behind one that is not: it starts what a step leaves to the next."""
    passes: int
    seed: int
    calibration_seconds: float | None
    """Calibrate for so long, and give every plan the cluster; None leaves it to the engines."""
    observe: bool
    """Profile every model in steps without any system."""


@dataclass(frozen=True)
class Cell:
    """Systems that train the same model."""

    kind: str
    """A key of `_models.MODELS`."""
    model: dict[str, int]
    systems: dict[str, dict[str, Any]]
    """By name: `program` (a key of `TRAINERS`), `config` (the DeepSpeed JSON) and `options` of the program; with
    `may_fail` a failure is a result.  The budget of a ds_osdp with a `budget_share` is that share of the way from the
    least to the most of `budgets`, and of one with a `budget_of` what that system takes."""
    budgets: tuple[list[str], list[str]] = ([], [])
    """Systems of which the least peak, and of which the most, are the ends of the budgets."""


class CellRun:
    """Systems of one cell, alive at the same time."""

    def __init__(self, cell: Cell, request: Request, cluster: Cluster | None) -> None:
        self.cell, self.request, self.cluster = cell, request, cluster
        self.size = GPTConfig(**cell.model)
        self.results: dict[str, dict[str, Any]] = {}
        self._trainers: dict[str, Trainer] = {}
        self._losses: dict[str, list[Tensor]] = {}
        self._data: list[Tensor] = []

    def measure(self) -> dict[str, dict[str, Any]]:
        """Start all systems, then time them in alternating order."""
        for name, system in self.cell.systems.items():
            # What was there before is neither counted nor looked through for garbage.
            gc.collect()
            gc.freeze()
            self.results[name] = {"program": system["program"]}
            failure = _failure(partial(self._start, name, system), system.get("may_fail", False))
            if failure:
                self.results[name]["failure"] = failure
                self._trainers.pop(name, None)
            _log(f"{name}: {failure or 'started'}")
        gc.freeze()
        for repeat in range(self.request.passes):
            for name in list(self._trainers)[:: -1 if repeat % 2 else 1]:
                self._time(name)
        for name, trainer in self._trainers.items():
            trainer.end()
            losses = torch.stack(self._losses[name]).double()
            dist.all_reduce(losses)
            self.results[name]["losses"] = (losses / dist.get_world_size()).tolist()
        self._trainers.clear()
        gc.unfreeze()
        gc.collect()
        return self.results

    def _start(self, name: str, system: dict[str, Any]) -> None:
        """Build one system, warm it up, and measure the bytes it holds between steps and the most within one."""
        torch.manual_seed(self.request.seed)
        config = self._config(system)
        before_bytes = Alive().now_bytes
        self._losses[name] = []
        trainer = TRAINERS[system["program"]](MODELS[self.cell.kind](self.size), config, **system.get("options", {}))
        self._trainers[name] = trainer
        for _ in range(self.request.warmup - 1):
            self._step(name)
        with Alive() as alive:
            self._step(name)
        gc.collect()
        self.results[name] |= {
            "state_bytes": _most(alive.now_bytes - before_bytes),
            "peak_bytes": _most(alive.peak_bytes - before_bytes),
            "step_seconds": [],
            "bytes_sent": [],
        }
        if trainer.plan is not None:
            self.results[name]["plan"] = _told(trainer.plan)

    def _config(self, system: dict[str, Any]) -> dict[str, Any]:
        config = dict(system["config"])
        if "osdp" in config:
            config["osdp"] = dict(config["osdp"])
            if self.cluster is not None:
                config["osdp"]["cluster"] = self.cluster.to_dict()
            if "budget_share" in system:
                least, most = min(self._peaks(self.cell.budgets[0])), max(self._peaks(self.cell.budgets[1]))
                config["osdp"]["memory_budget"] = int(least + system["budget_share"] * (most - least))
            if "budget_of" in system:
                config["osdp"]["memory_budget"] = self._peaks([system["budget_of"]])[0]
        return config

    def _peaks(self, names: Iterable[str]) -> list[int]:
        """Of those that run: what they took, or were predicted to take if that is more, for a plan fits by its prediction."""
        found = [self.results[name] for name in names if "failure" not in self.results[name]]
        return [max(result["peak_bytes"], result.get("plan", {}).get("peak_bytes", 0)) for result in found]

    def _time(self, name: str) -> None:
        dist.barrier()
        sent, ends = _bytes_sent(), []
        for _ in range(1 + self.request.steps):
            self._step(name)
            # No barrier between steps: what a step leaves running is charged to the next one, not hidden by waiting.
            ends.append(time.perf_counter())
        dist.barrier()
        seconds = torch.tensor(ends, dtype=torch.float64).diff()
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        self.results[name]["step_seconds"].append(seconds.tolist())
        if sent is not None:
            self.results[name]["bytes_sent"].append(_most((_bytes_sent() or 0) - sent) // (1 + self.request.steps))

    def _step(self, name: str) -> None:
        accumulation, done = self.cell.systems[name]["config"]["gradient_accumulation_steps"], len(self._losses[name])
        if not self._data:
            self._data = token_batches(
                self.size,
                count=accumulation * (self.request.warmup + self.request.passes * (1 + self.request.steps)),
                micro_batch=self.cell.systems[name]["config"]["train_micro_batch_size_per_gpu"],
                seed=self.request.seed + 1 + dist.get_rank(),
            )
        self._losses[name].append(self._trainers[name].step(self._data[done * accumulation : (done + 1) * accumulation]))


def _failure(start: Callable[[], None], may_fail: bool) -> str | None:
    """Why it failed, if it did, and did so on all ranks: a failure of some leaves the others waiting, and ends them all.

    That no plan fits is a result.
    """
    try:
        start()
    except Exception as error:
        if not (may_fail or isinstance(error, InfeasiblePlanError)):
            raise
        return f"{type(error).__name__}: {error}"
    return None


def _told(plan: Plan) -> dict[str, Any]:
    """What a plan predicts, and how much of the model it keeps at each stage."""
    elements = {str(int(stage)): sum(u.elements for u in plan.units if u.stage is stage) for stage in plan.stage_of.values()}
    names = ("step_seconds", "bound_seconds", "gap", "peak_bytes", "peak_moment", "resident_bytes", "budget_bytes")
    return {
        "hash": plan.plan_hash,
        **{name: getattr(plan, name) for name in (*names, "deferred_bucket_bytes")},
        "sizes": plan.sizes.model_dump(),
        "elements_by_stage": elements,
        "split_units": [unit.name for unit in plan.units if unit.slices > 1],
    }


def _most(count: int) -> int:
    most = torch.tensor(count)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


def _bytes_sent() -> int | None:
    """Bytes this rank's host has put on its link; None outside a lab, where the counter is other programs' too."""
    if os.environ.get("GLOO_SOCKET_IFNAME") != DEVICE:
        return None
    return int(psutil.net_io_counters(pernic=True)[DEVICE].bytes_sent)


def _log(line: str) -> None:
    if dist.get_rank() == 0:
        print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def observed_profile(cell: Cell, request: Request) -> dict[str, Any]:
    """The model's units with the seconds they take on this rank, while all ranks compute."""
    torch.manual_seed(request.seed)
    size = GPTConfig(**cell.model)
    model = MODELS[cell.kind](size)
    micro_batch = next(iter(cell.systems.values()))["config"]["train_micro_batch_size_per_gpu"]
    batches = token_batches(size, count=OBSERVED_STEPS, micro_batch=micro_batch, seed=request.seed + 1 + dist.get_rank())
    with measure.observe(model, micro_batch=micro_batch) as observer:
        for ids in batches:
            dist.barrier()
            model(ids=ids).backward()
            model.zero_grad()
    return observer.profile().to_dict()


def run(asked: dict[str, Any]) -> dict[str, Any]:
    """Everything that was asked for."""
    request = Request(**asked)
    cluster = None
    if request.calibration_seconds is not None:
        effort = replace(measure.THOROUGH, seconds=request.calibration_seconds)
        cluster = measure.measure_cluster(measure.machines_of_this_job(measure.ranks_per_node()), effort=effort)
        _log("calibrated")
    found: dict[str, Any] = {"cluster": cluster and cluster.to_dict(), "cells": {}, "profiles": {}}
    for name, fields in request.cells.items():
        cell = Cell(**fields)
        _log(name)
        if request.observe:
            found["profiles"][name] = observed_profile(cell, request)
        found["cells"][name] = CellRun(cell, request, cluster).measure()
    return found


if __name__ == "__main__":
    measure_on_this_rank(run)
