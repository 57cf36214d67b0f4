"""What benchmarks of engines share: the JSON they train with, and one run of `_worker.py` in a lab."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from netlab import NetLab, RanksFailedError, run_ranks

WORKER = Path(__file__).with_name("_worker.py")
SEED = 0
CLIPPING = 1.0  # said aloud: DeepSpeed clips at 1.0 when its JSON says nothing
LOSS_TOLERANCE = 1e-5  # relative; the systems sum gradients in different orders

# DeepSpeed's default sizes are made for models of billions of parameters, whose single layers are larger than its prefetch
# bucket, and which are far larger than what it keeps: here it is the same with sizes in proportion.
IN_PROPORTION = {
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 100_000,
    "stage3_max_live_parameters": 2_000_000,
    "stage3_max_reuse_distance": 0,
    "reduce_bucket_size": 500_000,
}


class MeasurementError(RuntimeError):
    """Something could not be measured: what, and the end of its ranks' logs."""


@dataclass(frozen=True)
class Setting:
    """Machines: hosts, and the limit of each host's link, each way, in tc's words."""

    hosts: int
    rate: str | None = None
    ranks_per_host: int = 1
    loopback: bool = False
    """All ranks on this machine's loopback, without a lab."""

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.hosts * self.ranks_per_host


def training_config(micro_batch: int, accumulation: int, zero: Mapping[str, Any] | None, **more: Any) -> dict[str, Any]:
    """The JSON of one system; one that is not DeepSpeed reads batch sizes, optimizer and clipping from it."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIPPING,
        "optimizer": {
            "type": "AdamW",
            # torch's own: DeepSpeed would otherwise compile one, and the others would need the same.
            "params": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01, "torch_adam": True, "fused": True},
        },
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        **more,
    }
    if zero is not None:
        config["zero_optimization"] = {"stage": 3, **zero}
    return config


def plan_section(tokens: int, **more: Any) -> dict[str, Any]:
    """The `osdp` section for a model of `_models.py`."""
    return {"input": {"ids": {"shape": [tokens], "dtype": "int64"}}, **more}


def run_worker(
    setting: Setting,
    cells: Mapping[str, Any],
    *,
    warmup: int,
    steps: int,
    passes: int,
    calibration_seconds: float | None = None,
    observe: bool = False,
    timeout_seconds: float = 3600.0,
    worker: Path = WORKER,
) -> dict[str, Any]:
    """Run `_worker.py`, or a program that sets something up before it, on every rank of ``setting``; what rank 0 measured.

    Raises:
        MeasurementError: a rank failed, or the time was up.
        NetLabError: there can be no lab here.
    """
    request = {
        "cells": cells,
        "warmup": warmup,
        "steps": steps,
        "passes": passes,
        "seed": SEED,
        "calibration_seconds": calibration_seconds,
        "observe": observe,
    }
    lab = None if setting.loopback else NetLab(setting.hosts, setting.rate)
    with lab or nullcontext(), tempfile.TemporaryFile() as output:
        command = [sys.executable, str(worker), json.dumps(request)]
        try:
            run_ranks(command, world=setting.world_size, lab=lab, stdout=output, timeout_seconds=timeout_seconds)
        except RanksFailedError as error:
            raise MeasurementError(f"could not measure {', '.join(cells)}:\n{error}") from error
        output.seek(0)
        found: dict[str, Any] = json.loads(output.read())
    return found


def loss_difference(losses: Iterable[list[float]]) -> float:
    """The largest relative difference of any losses from the first ones."""
    first, *others = losses
    return max((abs(a - b) / abs(b) for other in others for a, b in zip(other, first, strict=True)), default=0.0)


def environment() -> dict[str, Any]:
    """The machine and the versions a figure belongs to."""
    return {
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "load_average_before": os.getloadavg()[0],
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "deepspeed")},
    }
