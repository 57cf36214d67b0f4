"""The three ways in, and what goes wrong on them; run on the ranks that ``launch`` starts."""

from __future__ import annotations

import inspect
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
from cases import Case
from models import GPT
from training import CLUSTER, PLANS, ds_config, make_engine, micro_steps

import ds_osdp
from ds_osdp.deepspeed_seams import installed

CASE = Case(name="entry", steps=3)


def message_of(call: Callable[[], Any]) -> str:
    """What ``call`` raised on this rank, and that every rank came back."""
    try:
        call()
        text = "nothing"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, text)
    return " | ".join(everyone)


def start(config: Any, entry: Any = None, model: Any = None, **more: Any) -> Any:
    torch.manual_seed(0)
    model = model() if isinstance(model, type) else model or GPT()
    return (entry or ds_osdp.initialize)(model=model, model_parameters=model.parameters(), config=config, **more)[0]


def losses(engine: Any) -> list[float]:
    found = [loss for step in range(CASE.steps) for loss in micro_steps(engine, step, 1)]
    engine.destroy()
    return found


def ways_in(folder: str) -> dict[str, Any]:
    stock_config, config = ds_config(CASE, None), ds_config(CASE, PLANS["some"])
    result: dict[str, Any] = {"patches before": installed(), "stock": losses(start(stock_config, deepspeed.initialize))}
    stock_initialize = deepspeed.initialize

    engine = start(config)
    result["initialize"] = losses(engine)
    result["patches during"] = sorted(installed())
    ds_osdp.disable()
    result["patches after"] = installed()

    with ds_osdp.enable():
        result["enabled is planned"] = deepspeed.initialize is not stock_initialize
        result["signature kept"] = inspect.signature(deepspeed.initialize) == inspect.signature(stock_initialize)
        engine = start(config, deepspeed.initialize)
        result["enable plans"] = sorted({int(s) for s in engine.osdp.plan.stage_of.values()})
        result["enable"] = losses(engine)
        plain = start(stock_config, deepspeed.initialize)
        result["without a section"] = hasattr(plain, "osdp")
        result["without a section, losses"] = losses(plain)
        off = start({**config, "osdp": {**config["osdp"], "enabled": False}}, deepspeed.initialize)
        result["switched off"] = hasattr(off, "osdp")
        off.destroy()
    result["restored"] = deepspeed.initialize is stock_initialize and not installed()
    result["stock again"] = losses(start(stock_config, deepspeed.initialize))

    for name, entry, given in (("stock", deepspeed.initialize, stock_config), ("planned", ds_osdp.initialize, config)):
        first = start(given, entry)
        first_losses = losses(first)
        result[f"the same module twice, {name}"] = first_losses + losses(start(given, entry, model=first.module))

    path = Path(folder, f"ds{os.environ['RANK']}.json")
    path.write_text("# DeepSpeed reads hjson\n" + json.dumps(config))
    result["path"] = losses(start(str(path)))
    arguments = type("Arguments", (), {"deepspeed_config": str(path), "local_rank": int(os.environ["LOCAL_RANK"])})()
    result["arguments"] = losses(start(None, args=arguments))

    saved = Path(folder, "plan.json")
    first = start({**config, "osdp": {**config["osdp"], "save_plan": str(saved)}})
    first.destroy()
    second = start({**stock_config, "osdp": {"plan": str(saved)}})
    result["saved plan"] = second.osdp.plan.plan_hash == first.osdp.plan.plan_hash
    result["saved plan, losses"] = losses(second)
    return result


def a_rank_dies() -> dict[str, Any]:
    """Rank 1 leaves in the middle of a backward; what rank 0 sees, and after how many seconds."""
    engine = make_engine(CASE, "mixed")
    list(micro_steps(engine, 0, 1))
    if os.environ["RANK"] == "1":
        engine.module.h[1].fc1.register_full_backward_hook(lambda *_: os._exit(0))
    began = time.monotonic()
    result: dict[str, Any] = {}
    try:
        list(micro_steps(engine, 1, 1))
    except RuntimeError as error:
        result = {"error": str(error), "seconds": time.monotonic() - began}
    torch.distributed.destroy_process_group()
    return result


def measured_start() -> dict[str, Any]:
    """No cluster, no budget, a model that tells its input: everything is measured."""

    class Telling(GPT):
        @property
        def dummy_inputs(self) -> dict[str, torch.Tensor]:
            return {"ids": torch.zeros(1, 16, dtype=torch.int64)}

    config = {**ds_config(CASE, None), "zero_optimization": {"stage": 3}, "osdp": {"check_replicas_every": 1}}
    engine = start(config, model=Telling)
    plan = engine.osdp.plan
    return {
        "losses": losses(engine),
        "budget": plan.budget_bytes,
        "stages": sorted({int(s) for s in plan.stage_of.values()}),
        "bucket planned": plan.sizes.reduce_bucket_size,
        "bucket held": engine.optimizer.reduce_bucket_size,
    }


def micro_batches() -> dict[str, Any]:
    """Where DeepSpeed builds the loader the choice is applied, otherwise it is advice; the global batch stays."""
    config = ds_config(CASE, PLANS["all"])
    config |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4}
    config["osdp"]["micro_batch"] = [1, 2, 3, 4]
    samples = [torch.zeros(16, dtype=torch.int64)] * 32
    chosen = start(config, training_data=samples)
    left = start(config)
    return {
        "global": [engine.train_batch_size() for engine in (chosen, left)],
        "micro": [engine.train_micro_batch_size_per_gpu() for engine in (chosen, left)],
        "planned": [engine.osdp.plan.micro_batch for engine in (chosen, left)],
        "loader": next(iter(chosen.training_dataloader)).shape[0],
    }


def on_nodes() -> dict[str, Any]:
    """Two nodes of two ranks, between which the links are slow; and the same with a cluster of other nodes."""
    config = ds_config(CASE, None)
    fast = {operation: {**link, "bytes_per_second": 1e10} for operation, link in CLUSTER["world"].items()}
    cluster = {**CLUSTER, "ranks_per_node": 2, "node": fast}
    section = {**ds_config(CASE, PLANS["none"])["osdp"], "rules": [], "stages": [3], "cluster": cluster}
    result = {"stock": losses(start(config, deepspeed.initialize))}
    engine = start({**config, "osdp": section})
    result["degrees"] = sorted({unit.degree for unit in engine.osdp.plan.units})
    result["losses"] = losses(engine)
    foreign = {**config, "osdp": {**section, "cluster": {**cluster, "ranks_per_node": 3}}}
    result["foreign"] = message_of(lambda: start(foreign))
    return result


def refusals(folder: str) -> dict[str, str]:
    """Every one is raised on all ranks, and none leaves a rank waiting or the model touched."""
    rank = int(os.environ["RANK"])
    deepspeed.init_distributed("gloo", verbose=False)
    good = ds_config(CASE, PLANS["all"])

    def osdp(**changes: Any) -> dict[str, Any]:
        return {**good, "osdp": {**good["osdp"], **changes}}

    engine = start(osdp(save_plan=f"{folder}/plan.json"))
    engine.destroy()
    other = GPT(hidden=24)
    untouched = GPT()
    cases: dict[str, Callable[[], Any]] = {
        "no section": lambda: start(ds_config(CASE, None)),
        "near miss": lambda: start({**ds_config(CASE, None), "opsd": {}}),
        "unknown key": lambda: start(osdp(memory_budgt="3GiB")),
        "size": lambda: start(osdp(memory_budget="3GB ")),
        "stage 2": lambda: start({**good, "zero_optimization": {"stage": 2}}),
        "offload": lambda: start({**good, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}),
        "mpu": lambda: start(good, mpu=object()),
        "rule matches nothing": lambda: start(osdp(rules=[{"match": "decoder.*", "stage": 0}])),
        "too small": lambda: start(osdp(memory_budget=1000), model=untouched),
        "no input": lambda: start(osdp(input=None, replan=False)),
        "plan of another model": lambda: start({**good, "osdp": {"plan": f"{folder}/plan.json"}}, model=other),
        "one rank's JSON differs": lambda: start(osdp(memory_budget=(1 << 30) + rank)),
        "one rank has no section": lambda: start(good if rank else ds_config(CASE, None)),
        "one rank's JSON is bad": lambda: start(osdp(stages=[0, 3] if rank else [5])),
        "rank 0 fails unexpectedly": lambda: start(osdp(save_plan="/proc/nowhere/plan.json")),
    }
    found = {name: message_of(case) for name, case in cases.items()}
    before = {n: p.shape for n, p in GPT().named_parameters()}
    found["untouched"] = str({n: p.shape for n, p in untouched.named_parameters()} == before)
    # Nothing was left behind: a good configuration still trains.
    found["afterwards"] = str(losses(start(good))[-1] < 6)
    return found
