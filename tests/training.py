"""Train small models on real DeepSpeed engines, on the ranks that ``launch`` starts."""

from __future__ import annotations

import gc
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from typing import Any

import deepspeed
import torch
from cases import BUCKET_BYTES, Case
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import comm
from models import BUILDS, TOKENS, Lion, batch

import ds_osdp
from ds_osdp.job import job_from_config
from ds_osdp.plan import Plan, Provenance, Stage, UnitPlan, model_fingerprint

CLUSTER = {
    "format": "ds_osdp.cluster",
    "version": 1,
    "name": "test",
    "ranks_per_node": 4,
    "device": {"flops_per_second": 1e10, "bytes_per_second": 1e10},
    "world": {op: {"latency_seconds": 1e-5, "bytes_per_second": 1e8} for op in ("all_gather", "reduce_scatter", "all_reduce")},
}

Chosen = dict[str, tuple[int, int | None] | tuple[int, int | None, int, int]]
"""What a plan made by hand says: pattern of parameter names to stage and degree (None: all ranks), and maybe slices and how
many of them are replicated; the first that fits."""

PLANS: dict[str, list[dict[str, Any]] | Chosen | None] = {
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
    "two": {"*": (2, None)},
    "one": {"*": (1, None)},
    "mixed": {
        "*ln*": (0, 1),
        "*qkv*": (1, None),
        "*proj*": (2, None),
        "*fc1*": (3, None),
        "h.1.fc2*": (0, 1),
        "*fc2*": (1, None),
        "wte*": (2, None),
        "*": (3, None),
    },
    "adapters": {"*lora*": (0, 1), "*h.1.*": (0, 1), "*h.2.*": (2, None), "*": (3, None)},
    "experts": {"*experts*": (3, None), "*gate*": (0, 1), "*norm*": (0, 1), "*attn*": (1, None), "*": (2, None)},
    "node": {"*": (3, 2)},
    "everything": {
        "*ln1*": (0, 1),
        "*ln2*": (1, 2),
        "*qkv*": (3, 2),
        "*proj*": (2, None),
        "h.1.fc1*": (1, None),
        "*fc1*": (3, None),
        "h.0.fc2*": (2, 2),
        "*fc2*": (1, None),
        "wte*": (2, 2),
        "*": (3, None),
    },
    "slices": {
        "*ln*": (0, 1),
        "*qkv*": (3, None, 3, 1),
        "*proj*": (2, None),
        "h.1.fc1.weight": (3, 2, 5, 2),
        "*fc1.weight": (3, None, 4, 1),
        "*fc2.weight": (2, 2, 2, 0),
        "wte*": (3, None, 7, 0),
        "head*": (1, None),
        "*": (3, None),
    },
    "other slices": {
        "*qkv*": (3, None, 2, 0),
        "*proj.weight": (2, None, 5, 0),
        "*fc1.weight": (3, None, 7, 4),
        "*fc1*": (1, None),
        "head*": (3, None, 3, 2),
        "*": (3, None),
    },
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


def make_plan(model: torch.nn.Module, chosen: Chosen, config: dict[str, Any]) -> Plan:
    """A plan that says what ``chosen`` and ``config`` say, every parameter a unit by itself; what it predicts is made up."""
    shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in model.named_parameters()}
    world_size = torch.distributed.get_world_size()
    units = []
    for name, shape in shapes.items():
        stage, degree, *in_slices = next(value for pattern, value in chosen.items() if fnmatch(name, pattern))
        slices, whole_slices = in_slices or (1, 0)
        elements = int(torch.Size(shape).numel())
        units.append(
            UnitPlan(
                name=name,
                stage=Stage(stage),
                degree=degree or world_size,
                slices=slices,
                whole_slices=whole_slices,
                parameters=(name,),
                elements=elements,
            )
        )
    return Plan(
        world_size=world_size,
        micro_batch=2,
        accumulation=1,
        step_seconds=1.0,
        bound_seconds=1.0,
        gap=0.0,
        samples_per_second=1.0,
        budget_bytes=2**30,
        resident_bytes=0,
        peak_bytes=0,
        peak_moment="made by hand",
        sizes=job_from_config(config, world_size).sizes,
        deferred_bucket_bytes=BUCKET_BYTES,
        units=tuple(units),
        provenance=Provenance(
            model="GPT",
            model_fingerprint=model_fingerprint(shapes),
            cluster="test",
            sample="",
            solver="by hand",
            ds_osdp_version="tests",
        ),
    )


def make_engine(case: Case, plan: str, model: torch.nn.Module | None = None) -> Any:
    """An engine for ``model``, or for the model of ``case``, with one of ``PLANS``."""
    chosen = PLANS[plan]
    torch.set_num_threads(1)
    torch.manual_seed(7 * int(os.environ["RANK"]) if case.seed_by_rank else 0)
    config = ds_config(case, chosen if isinstance(chosen, list) else None)
    deepspeed.init_distributed(get_accelerator().communication_backend_name(), verbose=False)
    if model is not None:
        pass
    elif case.zero_init:
        with deepspeed.zero.Init(config_dict_or_path={k: v for k, v in config.items() if k != "osdp"}):
            model = BUILDS[case.build](**case.model)
    else:
        model = BUILDS[case.build](**case.model)
    for name, parameter in model.named_parameters():
        if case.frozen and case.frozen in name:
            parameter.requires_grad_(False)
    parameters: Any = [p for p in model.parameters() if p.requires_grad]
    if case.groups:
        decay = [p for n, p in model.named_parameters() if p.requires_grad and not n.endswith("bias")]
        bare = [p for n, p in model.named_parameters() if p.requires_grad and n.endswith("bias")]
        parameters = [{"params": decay}, {"params": bare, "weight_decay": 0.0, "lr": 3e-3}]
    given: dict[str, Any] = {"model": model, "model_parameters": parameters}
    if case.lion:
        given = {"model": model, "optimizer": Lion(parameters)}
        del config["optimizer"]
    if chosen is None:
        return deepspeed.initialize(**given, config=config)[0]
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(chosen, dict):
            path = [f"{folder}/plan.json"]
            if os.environ["RANK"] == "0":
                make_plan(model, chosen, config).save(path[0])
            torch.distributed.broadcast_object_list(path)  # one configuration on all ranks
            config["osdp"] = {"plan": path[0]}
        return ds_osdp.initialize(**given, config=config)[0]


def ids(engine: Any, number: int) -> torch.Tensor:
    """The batch of that number on this rank."""
    return batch(number, int(os.environ["RANK"])).to(engine.device)


def micro_steps(engine: Any, step: int, accumulation: int) -> Iterator[float]:
    for i in range(accumulation):
        loss = engine(ids(engine, step * accumulation + i))
        engine.backward(loss)
        engine.step()
        yield loss.item()


def unmanaged(engine: Any, step: int, accumulation: int) -> Iterator[float]:
    for i in range(accumulation):
        loss = engine(ids(engine, step * accumulation + i))
        engine.backward(loss)
        yield loss.item()
    engine.step()


def boundary(engine: Any, step: int, accumulation: int) -> Iterator[float]:
    """``set_gradient_accumulation_boundary``: one step() call behind all micro-steps."""
    for i in range(accumulation):
        engine.set_gradient_accumulation_boundary(i == accumulation - 1)
        loss = engine(ids(engine, step * accumulation + i))
        engine.backward(loss)
        yield loss.item()
    engine.step()


def coalesced(engine: Any, step: int, accumulation: int) -> Iterator[float]:
    with engine.coalesce_grad_reduction():
        for i in range(accumulation):
            loss = engine(ids(engine, step * accumulation + i))
            engine.backward(loss)
            yield loss.item()
    engine.step()


def evaluating(engine: Any, step: int, accumulation: int) -> Iterator[float]:
    if step % 3 == 2:
        engine.eval()
        with torch.no_grad():
            yield engine(ids(engine, 900 + step)).item()
        engine.train()
    yield from micro_steps(engine, step, accumulation)


def interrupting(engine: Any, step: int, accumulation: int) -> Iterator[float]:
    """What finds parameters right after a step, when some are still on their way."""
    if step % 3 == 1:
        yield from (values.norm().item() for values in full_parameters(engine).values())
    elif step % 3 == 2:
        yield engine.module.head(engine.module.wte(ids(engine, step))).float().norm().item()
    elif step:
        engine.empty_partition_cache()
    yield from micro_steps(engine, step, accumulation)


def overflowing(engine: Any, step: int, accumulation: int) -> Iterator[float]:
    """Rank 1's gradients are infinite in one step, which all ranks must skip."""
    if step != 2:
        yield from micro_steps(engine, step, accumulation)
        return
    loss = engine(ids(engine, step))
    engine.backward(loss * float("inf") if os.environ["RANK"] == "1" else loss)
    engine.step()
    yield loss.item()


def several_forwards(engine: Any, step: int, accumulation: int) -> Iterator[float]:
    first, second = engine(ids(engine, 2 * step)), engine(ids(engine, 2 * step + 1))
    engine.backward(0.5 * (first + second))
    engine.step()
    yield first.item()


class UsersError(Exception):
    pass


def failing(engine: Any, step: int, accumulation: int) -> Iterator[float]:
    """The user's forward fails in one step, and the backward in another; both go on with the next batch."""
    if step in (1, 3):

        def fail(*_: Any) -> None:
            raise UsersError

        block = engine.module.h[1]
        handle = block.register_forward_pre_hook(fail) if step == 1 else block.fc1.register_full_backward_hook(fail)
        try:
            engine.backward(engine(ids(engine, 500 + step)))
        except UsersError:
            pass
        else:
            raise AssertionError("nothing failed")
        finally:
            handle.remove()
    yield from micro_steps(engine, step, accumulation)


def offloading(engine: Any, step: int, accumulation: int) -> Iterator[float]:
    """Parameters, gradients and the bucket leave the device between two steps, as before a phase of inference."""
    if step in (2, 3):
        states = deepspeed.runtime.zero.offload_config.OffloadStateTypeEnum
        engine.offload_states([states.lp_params, states.lp_grads, states.contiguous_grad_buffer], pin_memory=step == 2)
        engine.reload_states()
    yield from micro_steps(engine, step, accumulation)


def compiled(engine: Any, step: int, accumulation: int) -> Iterator[float]:
    if step == 0:
        engine.compile(backend="eager")
    yield from micro_steps(engine, step, accumulation)


DRIVES: dict[str, Callable[..., Iterator[float]]] = {
    f.__name__: f
    for f in (
        micro_steps,
        unmanaged,
        boundary,
        coalesced,
        evaluating,
        interrupting,
        overflowing,
        several_forwards,
        failing,
        offloading,
        compiled,
    )
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
            values[name] = parameter.detach().float().cpu().clone()
    return values


def train(case: Case, plan: str) -> dict[str, Any]:
    """Losses, norms, final parameters, what is partitioned, and the collectives of every step."""
    engine = make_engine(case, plan)
    losses: list[float] = []
    norms: list[float] = []
    collectives: list[dict[str, int]] = []
    for step in range(case.steps):
        with counting_collectives() as counts:
            losses += list(DRIVES[case.drive](engine, step, case.accumulation))
        collectives.append(dict(counts))
        norms.append(float(engine.get_global_grad_norm()))
    result = {
        "losses": losses,
        "norms": norms,
        "collectives": collectives,
        "after_step": {n: p.ds_status.name for n, p in engine.module.named_parameters()},
        "held": {
            n: (p.ds_tensor.numel(), p.ds_numel, p.ds_zero_partition_world_size) for n, p in engine.module.named_parameters()
        },
        "parameters": full_parameters(engine),
    }
    if PLANS[plan] is not None:
        engine.osdp.check_replicas()
        result["resident_bytes"] = engine.osdp.plan.resident_bytes
        result["stages"] = {name: int(stage) for name, stage in engine.osdp.plan.stage_of.items()}
        result["degrees"] = {
            name: 1 if unit.stage is Stage.REPLICATED else unit.degree
            for unit in engine.osdp.plan.units
            for name in unit.parameters
        }
        result["state_bytes"] = ds_osdp.state_bytes(engine)
    engine.destroy()
    return result


def train_all(rows: list[tuple[Case, str]]) -> dict[tuple[str, str], dict[str, Any]]:
    found = {}
    for case, plan in rows:
        found[case.name, plan] = train(case, plan)
        # What DeepSpeed keeps of an engine would be looked through in every collection of the next.
        gc.collect()
        gc.freeze()
    return found
