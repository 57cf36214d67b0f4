"""What a run measures beside what was predicted, written to DeepSpeed's own monitor: TensorBoard, W&B, Comet, CSV."""

from __future__ import annotations

import time
from typing import Any

from deepspeed.accelerator import get_accelerator

__all__ = ["watch_steps"]


def watch_steps(engine: Any) -> None:
    """Let rank 0 write ``osdp/...`` after every step of the planned ``engine``, if its configuration enables a monitor."""
    if engine.monitor.enabled and engine.global_rank == 0:
        watch = _StepWatch(engine)
        engine.module.register_forward_pre_hook(watch.forward_begins)
        engine.osdp.after_step.append(watch.step_ended)


class _StepWatch:
    """Seconds from the first forward of an optimizer step to its end: without loading data, evaluating or saving."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._began: float | None = None

    def forward_begins(self, module: Any, _inputs: Any) -> None:
        if self._began is None and module.training:
            self._began = time.perf_counter()

    def step_ended(self) -> None:
        if self._began is None:  # A step without a forward is none that was predicted.
            return
        plan = self._engine.osdp.plan
        values = {
            "step_seconds": time.perf_counter() - self._began,
            "predicted_step_seconds": plan.step_seconds,
            "predicted_peak_bytes": plan.peak_bytes,
        }
        self._began = None
        if get_accelerator().device_name() != "cpu":  # There nobody counts what is allocated.
            values["peak_bytes"] = get_accelerator().max_memory_allocated()
        step = self._engine.global_steps
        self._engine.monitor.write_events([(f"osdp/{name}", value, step) for name, value in values.items()])
