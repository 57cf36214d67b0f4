"""Plan from what the steps of a running job show, and move its engine there; again when what they show has changed.

The job goes through windows of a few optimizer steps.  A window is *observed*: hooks measure the model, and at its end rank 0
plans and all ranks move.  The windows behind it are only timed, until one says that the plan no longer fits what it was made
for; then the next one is observed.  Ranks reach the end of a window together and decide on what they all saw.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from ds_osdp import deepspeed_seams as seams
from ds_osdp import measure
from ds_osdp.config import SECTION, ReplanConfig
from ds_osdp.errors import OsdpError
from ds_osdp.plan import Plan
from ds_osdp.profile import ModelProfile
from ds_osdp.quantities import format_bytes, format_seconds
from ds_osdp.report import plan_text

__all__ = ["Replanner"]

MakePlan = Callable[[ModelProfile, int], Plan]
"""From a profile, and bytes to leave free below the budget."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one window showed, the most of any rank."""

    step_seconds: float
    """The median."""
    peak_bytes: int | None
    """None where the device does not count."""
    input_elements: int
    """Of the tensors of one micro-step, at most."""

    def __str__(self) -> str:
        peak = "" if self.peak_bytes is None else f" at {format_bytes(self.peak_bytes)}"
        return f"{format_seconds(self.step_seconds)} a step{peak}"


class Replanner:
    """Watches the steps of one engine; the engine holds it as long as it lives."""

    def __init__(self, engine: Any, config: ReplanConfig, make_plan: MakePlan, micro_batch: int) -> None:
        """Begin to observe ``engine``, which holds a plan already; every rank must.  One that cannot be observed keeps it.

        Args:
            engine: a planned engine.
            config: when to plan.
            make_plan: what rank 0 plans with.
            micro_batch: samples of a micro-step.
        """
        self._engine = engine
        self._config = config
        self._make_plan = make_plan
        self._micro_batch = micro_batch
        self._steps = 0
        self._planned_at = 0
        self._ends = [time.perf_counter()]
        self._input_elements = 0
        self._spare_bytes = 0
        self._before: _Seen | None = None
        self._settled: _Seen | None = None
        self._observer: measure.Observer | None = None
        try:
            self._observer = measure.observe(engine.module, micro_batch=micro_batch)
        except OsdpError as error:
            seams.log_on_rank_zero(f"{SECTION}: goes on with plan {engine.osdp.plan.plan_hash}: {error}")
            return
        seams.most_memory_held()  # The peak of the first window is not that of loading a model.
        engine.module.register_forward_pre_hook(self._forward, with_kwargs=True)
        engine.osdp.after_step.append(self._stepped)

    def _forward(self, module: Any, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            self._input_elements = max(self._input_elements, sum(t.numel() for t in measure.tensors_in((args, kwargs))))

    def _stepped(self) -> None:
        """After every optimizer step, on all ranks."""
        self._steps += 1
        self._ends.append(time.perf_counter())
        if len(self._ends) <= self._config.after_steps:
            return
        seen = self._seen()
        if self._observer is not None:
            self._plan(seen)
        else:
            self._watch(seen)
        # What was done here is no part of the next window.
        self._ends = [time.perf_counter()]
        self._input_elements = 0

    def _seen(self) -> _Seen:
        seconds = median(end - begin for begin, end in zip(self._ends, self._ends[1:], strict=False))
        everyone = seams.gather_from_all_ranks((seconds, seams.most_memory_held(), self._input_elements))
        peaks = [peak for _, peak, _ in everyone if peak is not None]
        return _Seen(max(s for s, _, _ in everyone), max(peaks, default=None), max(n for _, _, n in everyone))

    def _plan(self, seen: _Seen) -> None:
        assert self._observer is not None
        observer, self._observer = self._observer, None
        observer.close()
        self._planned_at, self._before, self._settled = self._steps, None, None
        holds = self._engine.osdp.plan
        # What the last plan held beyond its prediction is more than its budget allowed.
        if seen.peak_bytes is not None and seen.peak_bytes > holds.budget_bytes:
            self._spare_bytes = max(self._spare_bytes, seen.peak_bytes - holds.peak_bytes)
        try:
            plan = seams.broadcast_from_rank_zero(lambda: self._make_plan(observer.profile(), self._spare_bytes))
            if plan.plan_hash != holds.plan_hash:
                self._engine.osdp.apply(plan)
                self._engine.osdp.guard(lambda: self._give_way(plan, holds))
                self._before = seen
                seams.log_on_rank_zero(f"{SECTION}: plan {plan.plan_hash} from step {self._steps} on\n{plan_text(plan)}")
        except OsdpError as error:
            # The job trains as it did: a plan that cannot be made must not end it.
            seams.log_on_rank_zero(f"{SECTION}: goes on with plan {holds.plan_hash} after step {self._steps}: {error}")

    def _give_way(self, plan: Plan, before: Plan) -> Plan:
        self._spare_bytes += plan.budget_bytes // 10
        self._before = None
        seams.log_on_rank_zero(
            f"{SECTION}: an allocation failed in step {self._steps + 1}: all ranks go back to plan {before.plan_hash}, and the "
            f"step is repeated, or skipped if gradients were lost. The next plan leaves {format_bytes(self._spare_bytes)} free"
        )
        return before

    def _watch(self, seen: _Seen) -> None:
        plan = self._engine.osdp.plan
        if self._engine.osdp.guarded:
            self._engine.osdp.guard(None)
            return  # What these steps took is not what they will take.
        if self._settled is None:
            self._settled = seen
        if self._before is not None:
            before, self._before = self._before, None
            predicted = f"{format_seconds(plan.step_seconds)} at {format_bytes(plan.peak_bytes)}"
            seams.log_on_rank_zero(
                f"{SECTION}: planned after step {self._planned_at}: {before} before (slowed by measuring), {seen} now "
                f"(predicted {predicted}, budget {format_bytes(plan.budget_bytes)})"
            )
        reason = self._reason(plan, self._settled, seen)
        if reason is not None and self._steps - self._planned_at >= self._config.min_interval_steps:
            seams.log_on_rank_zero(f"{SECTION}: plans again after step {self._steps + self._config.after_steps}: {reason}")
            self._observer = measure.observe(self._engine.module, micro_batch=self._micro_batch)

    def _reason(self, plan: Plan, settled: _Seen, seen: _Seen) -> str | None:
        """Why to plan again, if there is cause."""
        if seen.peak_bytes is not None and seen.peak_bytes > plan.budget_bytes:
            return f"a step held {format_bytes(seen.peak_bytes)}, and the budget is {format_bytes(plan.budget_bytes)}"
        change = seen.step_seconds / settled.step_seconds - 1
        if seen.input_elements != settled.input_elements and abs(change) > self._config.drift:
            return (
                f"steps take {format_seconds(seen.step_seconds)} in place of {format_seconds(settled.step_seconds)} since a "
                f"micro-step's input has {seen.input_elements} elements in place of {settled.input_elements}"
            )
        return None
