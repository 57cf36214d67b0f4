"""Move live engines from plan to plan, on the ranks that ``launch`` starts."""

from __future__ import annotations

import math
from typing import Any

import torch
from _alive import Alive
from cases import Case
from checkpoints import full_states
from entries import message_of
from models import GPT
from training import PLANS, ds_config, full_parameters, make_engine, make_plan, micro_steps

from ds_osdp.plan import Plan

STEPS = 2


def plan_of(engine: Any, name: str, case: Case) -> Plan:
    chosen = PLANS[name]
    if not isinstance(chosen, dict):
        chosen = {rule["match"]: (rule["stage"], None) for rule in chosen or []}
    return make_plan(engine.module, chosen, ds_config(case, None))


def train(engine: Any, case: Case, begin: int) -> list[float]:
    return [loss for step in range(begin, begin + STEPS) for loss in micro_steps(engine, step, case.accumulation)]


def journey(case: Case, plans: list[str], folder: str) -> dict[str, Any]:
    """One engine through ``plans``; at every stop also one that starts there, under the same plan, from the same state."""
    stock = make_engine(case, "stock")
    found: dict[str, Any] = {"stock": [train(stock, case, STEPS * stop) for stop in range(len(plans))]}
    found["stock parameters"] = full_parameters(stock)
    stock.destroy()
    engine = make_engine(case, plans[0])
    objects = {name: id(p) for name, p in engine.module.named_parameters()}
    found.update(losses=[train(engine, case, 0)], started=[], different=[])
    for stop, name in enumerate(plans[1:], start=1):
        started = make_engine(case, name)
        before = full_states(engine)
        engine.osdp.apply(started.osdp.plan)
        after = full_states(engine)
        engine.save_checkpoint(folder, tag=f"stop {stop}")
        found["losses"].append(train(engine, case, STEPS * stop))
        reached = full_states(engine)
        engine.osdp.check_replicas()
        started.load_checkpoint(folder, tag=f"stop {stop}")
        found["started"].append(train(started, case, STEPS * stop))
        other = full_states(started)
        started.destroy()
        found["different"] += [(name, key, "moved") for key in before if not torch.equal(before[key], after[key])]
        found["different"] += [(name, key, "trained") for key in reached if not torch.equal(reached[key], other[key])]
    found["parameters"] = full_parameters(engine)
    found["same objects"] = objects == {name: id(p) for name, p in engine.module.named_parameters()}
    engine.destroy()
    return found


def journeys(cases: list[tuple[Case, list[str]]], folder: str) -> dict[str, dict[str, Any]]:
    return {case.name: journey(case, plans, f"{folder}/{case.name}") for case, plans in cases}


def refused_moves() -> dict[str, str]:
    """What every rank is told that asks for what cannot be; and that the engine trains on."""
    case = Case(name="refused", accumulation=2)
    engine = make_engine(case, "mixed")
    rank = torch.distributed.get_rank()
    told = {
        "another plan on each rank": message_of(lambda: engine.osdp.apply(plan_of(engine, ("one", "two")[rank % 2], case))),
        "another model": message_of(lambda: engine.osdp.apply(make_plan(GPT(hidden=24), PLANS["one"], ds_config(case, None)))),
    }
    micro_steps_of_step = micro_steps(engine, 0, case.accumulation)
    next(micro_steps_of_step)
    told["between micro-steps"] = message_of(lambda: engine.osdp.apply(plan_of(engine, "one", case)))
    list(micro_steps_of_step)
    frozen = engine.module.head.weight.requires_grad_(False)
    told["frozen since"] = message_of(lambda: engine.osdp.apply(plan_of(engine, "one", case)))
    frozen.requires_grad_(True)
    engine.osdp.apply(plan_of(engine, "one", case))
    told["afterwards"] = str(all(math.isfinite(loss) for loss in micro_steps(engine, 1, case.accumulation)))
    engine.destroy()
    return told


def bytes_while_moving(case: Case, plans: list[str]) -> list[dict[str, int]]:
    """The peak of the move to each plan, what is held under it between steps, and all states of the largest unit."""
    engine = make_engine(case, plans[0])
    rows = []
    largest = max(p.ds_numel for p in engine.module.parameters())
    for stop, name in enumerate(plans):
        row = {"unit": (20 if not case.bf16 else 16) * largest}
        if stop:
            plan = plan_of(engine, name, case)
            with Alive() as alive:
                engine.osdp.apply(plan)
            row["move"] = alive.peak_bytes
        for step in range(2):
            list(micro_steps(engine, step, case.accumulation))
        rows.append({**row, "held": Alive().now_bytes})
    engine.destroy()
    return rows
