"""Jobs that plan from what they see, on the ranks that ``launch`` starts."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch
from _alive import Alive
from cases import Case
from deepspeed.utils import logger
from models import GPT, TOKENS, batch
from training import CLUSTER, ds_config

import ds_osdp
from ds_osdp.deepspeed_seams import gather_from_all_ranks

CASE = Case(name="replan", accumulation=2)
SMALL: dict[str, Any] = {"memory_budget": "1GiB", "cluster": CLUSTER}


@contextmanager
def logged() -> Iterator[list[str]]:
    """What DeepSpeed's log says of plans."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            if "osdp: " in text:
                lines.append(text[text.index("osdp: ") :].splitlines()[0])

    handler, level = Keep(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def start(section: dict[str, Any] | None, **settings: Any) -> Any:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    module = GPT()
    config = {**ds_config(CASE, None), **settings}
    if section is None:
        return deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)[0]
    return ds_osdp.initialize(model=module, model_parameters=module.parameters(), config={**config, "osdp": section})[0]


def take(engine: Any, step: int, samples: int = 2, tokens: int = TOKENS) -> list[float]:
    losses = []
    for i in range(CASE.accumulation):
        loss = engine(batch(2 * step + i, int(os.environ["RANK"]), samples)[:, :tokens])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def bare_section(steps: int, folder: str) -> dict[str, Any]:
    """A model that cannot tell its input, and a section that says nothing."""
    stock = start(None)
    found: dict[str, Any] = {"stock": [take(stock, step) for step in range(steps)]}
    stock.destroy()
    with logged() as lines:
        engine = start({}, csv_monitor={"enabled": True, "output_path": folder, "job_name": "bare"})
        found.update(losses=[], hashes=[], stages=[])
        for step in range(steps):
            found["stages"].append(sorted({int(stage) for stage in engine.osdp.plan.stage_of.values()}))
            found["hashes"].append(gather_from_all_ranks(engine.osdp.plan.plan_hash))
            found["losses"].append(take(engine, step))
        engine.osdp.check_replicas()
        engine.destroy()
    found["lines"] = lines
    if os.environ["RANK"] == "0":
        found["predicted"] = Path(folder, "bare", "osdp_predicted_step_seconds.csv").read_text().split()[1:]
    return found


def changing_inputs(steps: int, interval: int) -> dict[str, Any]:
    """Another length of the input every four steps, and any change of the step time counts."""
    replan = {"after_steps": 2, "drift": 1e-9, "min_interval_steps": interval}
    with logged() as lines:
        engine = start({"replan": replan, **SMALL})
        losses = [take(engine, step, tokens=(TOKENS, TOKENS // 2)[step // 4 % 2]) for step in range(steps)]
        engine.destroy()
    return {"lines": lines, "losses": losses}


class Budget(Alive):
    """Allows so many bytes more than are alive when it begins."""

    def __init__(self, more_bytes: int) -> None:
        super().__init__()
        self._limit = self.now_bytes + more_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.now_bytes
        out = super().__torch_dispatch__(func, types, args, kwargs)
        # A view takes nothing; and what is as small as a flag is on the host, where there is a device.
        if self.now_bytes > max(self._limit, before + 100):
            raise torch.OutOfMemoryError(f"no memory for {func}")
        return out


def failing_allocations(part: str, micro_step: int) -> dict[str, Any]:
    """One rank has too little memory in one part of the fourth step, the second under the plan."""
    failing, rank = 3, int(os.environ["RANK"])

    def run(section: dict[str, Any], *, fails: bool, skips: bool) -> tuple[Any, list[float]]:
        engine, losses = start(section), []
        for step in range(8):
            for i in range(CASE.accumulation):
                short = fails and (step, i) == (failing, micro_step) and rank == 1
                limits = {p: Budget(4_000) if short and p == part else nullcontext() for p in ("forward", "backward", "step")}
                with limits["forward"]:
                    loss = engine(batch(2 * step + i, rank))
                with limits["backward"]:
                    engine.backward(loss)
                if skips and step == failing:
                    engine.optimizer.osdp_skips_step = True
                with limits["step"]:
                    engine.step()
                losses.append(loss.item())
        return engine, losses

    with logged() as lines:
        engine, losses = run({"replan": {"after_steps": 2}, **SMALL}, fails=True, skips=False)
    lost = part != "forward" or micro_step > 0
    result = {"losses": losses, "skipped": engine.skipped_steps, "lost": lost, "lines": lines}
    result["stages"] = gather_from_all_ranks(sorted({int(stage) for stage in engine.osdp.plan.stage_of.values()}))
    engine.osdp.check_replicas()
    engine.destroy()
    # What should come of it: an engine that stays at stage 3, and skips the same step if gradients were lost.
    engine, result["expected"] = run({"replan": {"after_steps": 100}, **SMALL}, fails=False, skips=lost)
    engine.destroy()
    return result
