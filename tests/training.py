"""Train small models on real DeepSpeed engines, on the ranks that ``launch`` starts."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from cases import Case
from deepspeed.comm import comm
from models import GPT, TOKENS, batch

import ds_osdp

CLUSTER = {
    "format": "ds_osdp.cluster",
    "version": 1,
    "name": "test",
    "ranks_per_node": 4,
    "device": {"flops_per_second": 1e10, "bytes_per_second": 1e10},
    "world": {op: {"latency_seconds": 1e-5, "bytes_per_second": 1e8} for op in ("all_gather", "reduce_scatter", "all_reduce")},
}

PLANS: dict[str, list[dict[str, Any]] | None] = {
    "stock": None,
    "none": [{"match": "*", "stage": 3}],
    # Alternating inside every block, so that buckets and sub-groups of both kinds interleave.
    "some": [
        {"match": "*fc1*", "stage": 0},
        {"match": "*ln*", "stage": 0},
        {"match": "h.1.*", "stage": 0},
        {"match": "*", "stage": 3},
    ],
    "all": [{"match": "*", "stage": 0}],
}


def ds_config(case: Case, rules: list[dict[str, Any]] | None) -> dict[str, Any]:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": 0.5,
        "steps_per_print": 10**9,
        "bf16": {"enabled": case.bf16},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "reduce_bucket_size": 20_000,
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_reuse_distance": 0,
            "overlap_comm": True,
            **case.zero,
        },
        # With its usual eps of 1e-8, Adam makes steps of full size of what the order of summation leaves in tiny gradients.
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1, "torch_adam": True}},
        **case.config,
    }
    if rules is not None:
        spec = {"ids": {"shape": [TOKENS], "dtype": "int64"}}
        config["osdp"] = {"memory_budget": "1GiB", "rules": rules, "cluster": CLUSTER, "input": spec}
    return config


def make_engine(case: Case, rules: list[dict[str, Any]] | None) -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(7 * int(os.environ["RANK"]) if case.seed_by_rank else 0)
    config = ds_config(case, rules)
    if case.zero_init:
        deepspeed.init_distributed("gloo", verbose=False)
        with deepspeed.zero.Init(config_dict_or_path={k: v for k, v in config.items() if k != "osdp"}):
            model = GPT(**case.model)
    else:
        model = GPT(**case.model)
    for name, parameter in model.named_parameters():
        if case.frozen and case.frozen in name:
            parameter.requires_grad_(False)
    parameters: Any = [p for p in model.parameters() if p.requires_grad]
    if case.groups:
        decay = [p for n, p in model.named_parameters() if p.requires_grad and not n.endswith("bias")]
        bare = [p for n, p in model.named_parameters() if p.requires_grad and n.endswith("bias")]
        parameters = [{"params": decay}, {"params": bare, "weight_decay": 0.0, "lr": 3e-3}]
    entry = deepspeed.initialize if rules is None else ds_osdp.initialize
    engine, *_ = entry(model=model, model_parameters=parameters, config=config)
    return engine


def micro_steps(engine: Any, step: int, accumulation: int) -> Iterator[float]:
    for i in range(accumulation):
        loss = engine(batch(step * accumulation + i, int(os.environ["RANK"])))
        engine.backward(loss)
        engine.step()
        yield loss.item()


def unmanaged(engine: Any, step: int, accumulation: int) -> Iterator[float]:
    for i in range(accumulation):
        loss = engine(batch(step * accumulation + i, int(os.environ["RANK"])))
        engine.backward(loss)
        yield loss.item()
    engine.step()


def boundary(engine: Any, step: int, accumulation: int) -> Iterator[float]:
    """``set_gradient_accumulation_boundary``: one step() call behind all micro-steps."""
    for i in range(accumulation):
        engine.set_gradient_accumulation_boundary(i == accumulation - 1)
        loss = engine(batch(step * accumulation + i, int(os.environ["RANK"])))
        engine.backward(loss)
        yield loss.item()
    engine.step()


def coalesced(engine: Any, step: int, accumulation: int) -> Iterator[float]:
    with engine.coalesce_grad_reduction():
        for i in range(accumulation):
            loss = engine(batch(step * accumulation + i, int(os.environ["RANK"])))
            engine.backward(loss)
            yield loss.item()
    engine.step()


def evaluating(engine: Any, step: int, accumulation: int) -> Iterator[float]:
    if step % 3 == 2:
        engine.eval()
        with torch.no_grad():
            yield engine(batch(900 + step, int(os.environ["RANK"]))).item()
        engine.train()
    yield from micro_steps(engine, step, accumulation)


DRIVES: dict[str, Callable[..., Iterator[float]]] = {
    f.__name__: f for f in (micro_steps, unmanaged, boundary, coalesced, evaluating)
}


@contextmanager
def counting_collectives() -> Iterator[Counter[str]]:
    """Count the collectives DeepSpeed asks its backend for; those of a few numbers (norms, flags) apart."""
    counts: Counter[str] = Counter()
    backend, originals = comm.cdb, {}

    def counted(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [a for a in [*args, *kwargs.values()] if torch.is_tensor(a)]
            size = max((t.numel() for t in tensors), default=0)
            counts[name if size > 8 else "scalar"] += 1
            counts[f"{name} elements"] += size if size > 8 else 0
            return original(*args, **kwargs)

        return call

    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_gather", "reduce_scatter", "broadcast"):
        originals[name] = getattr(backend, name)
        setattr(backend, name, counted(name, originals[name]))
    try:
        yield counts
    finally:
        for name in originals:
            delattr(backend, name)


def full_parameters(engine: Any) -> dict[str, torch.Tensor]:
    values = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            values[name] = parameter.detach().float().clone()
    return values


def train(case: Case, plan: str) -> dict[str, Any]:
    """Losses, norms, final parameters, what is partitioned, and the collectives of the last step."""
    rules = PLANS[plan]
    engine = make_engine(case, rules)
    losses, norms = [], []
    for step in range(case.steps):
        with counting_collectives() as collectives:
            losses += list(DRIVES[case.drive](engine, step, case.accumulation))
        norms.append(float(engine.get_global_grad_norm()))
    result = {
        "losses": losses,
        "norms": norms,
        "collectives": dict(collectives),
        "held": {
            n: (p.ds_tensor.numel(), p.ds_numel, p.ds_zero_partition_world_size) for n, p in engine.module.named_parameters()
        },
        "parameters": full_parameters(engine),
    }
    if rules is not None:
        engine.osdp.check_replicas()
        result["resident_bytes"] = engine.osdp.plan.resident_bytes
        result["stages"] = {name: int(stage) for name, stage in engine.osdp.plan.stage_of.items()}
        result["state_bytes"] = ds_osdp.state_bytes(engine)
    engine.destroy()
    return result


def train_all(cases: list[Case], plans: list[str]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(case.name, plan): train(case, plan) for case in cases for plan in plans}
