"""Measure the memory of one rank of many on one machine: the real engine, a real step, and no other rank.

DeepSpeed builds its engine on torch's fake process group, as rank 0 of N, with the plan applied as in a job.  Collectives
return at once and leave their buffers as they are: values mean nothing, sizes are those of the job.  Tensors have shapes and
no data unless asked otherwise, so that a laptop can tell about a model that it could not hold.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_osdp import deepspeed_seams as seams
from ds_osdp.config import SECTION
from ds_osdp.errors import ConfigError
from ds_osdp.measure import InputTensor, MemoryMeter, Sample, ShapeRunner, UnitAtWork, tensors_in
from ds_osdp.plan import Plan

__all__ = ["DryRun", "dry_run"]

STEPS = 3
"""In the first, DeepSpeed learns the order of modules; from the second on it prefetches."""

# What the code of these modules makes, when nothing more is known of it.
_MAKERS = {
    "deepspeed.runtime.zero.partition_parameters": "gathered",
    "deepspeed.runtime.comm.coalesced_collectives": "buckets",
    "deepspeed.runtime.zero.stage3": "buckets",
    "ds_osdp.deepspeed_seams.deferred": "buckets",
    "torch.optim.optimizer": "other",
}


@dataclass(frozen=True, slots=True)
class DryRun:
    """What one rank needs."""

    peak_bytes: int
    peak_moment: str
    moments: dict[str, dict[str, int]]
    """Bytes by kind where each moment needs most, whichever micro-step that is in."""
    allocator_bytes: int | None
    """What CUDA's allocator says, its rounding included (``torch.cuda.max_memory_allocated``); None where none was used."""


def dry_run(
    model: nn.Module,
    ds_config: Mapping[str, Any],
    plan: Plan,
    sample: Sample,
    *,
    accumulation: int,
    dtype: torch.dtype,
    real: bool = False,
) -> DryRun:
    """Run optimizer steps of rank 0 of ``plan.world_size`` and say what was alive.

    Args:
        model: the model; with ``real`` its parameters hold data and are taken over by the engine, else it may be on the meta
            device and is not touched.
        ds_config: the DeepSpeed configuration; its ``osdp`` section is not read.
        plan: what to apply.
        sample: the input of one micro-step.
        accumulation: micro-steps of an optimizer step.
        dtype: of parameters, as DeepSpeed casts them.
        real: run on data, on the device this process would train on, instead of on shapes.

    Raises:
        PlanMismatchError: the plan belongs to another model.
        ConfigError: this process has a process group already.
    """
    plan.check_belongs(seams.full_shapes(model), plan.world_size)
    runner = None if real else ShapeRunner("cuda" if torch.cuda.is_available() else "cpu")
    _join_alone(plan.world_size)
    meter = MemoryMeter(runner, _MAKERS)
    if runner is not None:
        model = runner.copy(model, dtype)
        # The copy has its dtype and device.  Torch changes fake parameters by swapping them, which weak references forbid.
        model._apply = lambda *_, **__: model  # type: ignore[method-assign]
    meter.made([*model.parameters(), *model.buffers()])
    call = {"model": model, "model_parameters": list(model.parameters()), "config": _torch_only(ds_config)}
    with meter:
        seams.split_slices(call, plan)
        with seams.applying(plan):
            engine = deepspeed.initialize(**call)[0]
        seams.attach(engine, plan)
        inputs = {tensor.name: _input(tensor, runner, engine.device) for tensor in sample.cast(dtype).tensors}
        meter.made(inputs.values(), "other")
        return _measured(engine, plan, meter, inputs, accumulation)


def _measured(engine: Any, plan: Plan, meter: MemoryMeter, inputs: dict[str, torch.Tensor], accumulation: int) -> DryRun:
    def enter(unit: int) -> None:
        meter.enter(f"{'backward' if at_work.in_backward else 'forward'} of {list(at_work.order)[unit]!r}")

    at_work = UnitAtWork(engine.module, [unit.name for unit in plan.units], enter)
    meter.follow(at_work)
    for parameter in engine.module.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: meter.made([gradient], "gradients"))
    meter.forget()
    on_cuda = engine.device.type == "cuda" and meter.real
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(engine.device)
    for _ in range(STEPS * accumulation):
        at_work.begin_forward()
        output = engine(**inputs)
        loss = output.loss if hasattr(output, "loss") else _total(output)
        del output
        # Now, since what is kept whole arrives in forward.
        for kind, tensors in seams.state_tensors(engine).items():
            meter.made(tensors, kind)
        meter.end_forward()
        at_work.begin_backward()
        engine.backward(loss)
        at_work.begin_forward()
        meter.enter("optimizer step")
        engine.step()
    moments = meter.highest()
    peak = max(moments, key=lambda moment: sum(moments[moment].values()))
    return DryRun(
        peak_bytes=sum(moments[peak].values()),
        peak_moment=peak,
        moments=moments,
        allocator_bytes=torch.cuda.max_memory_allocated(engine.device) if on_cuda else None,
    )


def _total(output: Any) -> torch.Tensor:
    """The sum of all outputs that need a gradient, as the profile takes it."""
    roots = [t for t in tensors_in(output) if t.is_floating_point() and t.requires_grad]
    return torch.stack([t.sum() for t in roots]).sum()


def _input(tensor: InputTensor, runner: ShapeRunner | None, device: torch.device) -> torch.Tensor:
    # Ones are a token that every vocabulary has, and a mask that hides nothing.
    if runner is not None and tensor.dtype.is_floating_point:
        return runner.empty(tensor.shape, tensor.dtype)
    return torch.ones(tensor.shape, dtype=tensor.dtype, device=device)


def _torch_only(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with DeepSpeed's compiled Adam, which reads memory past torch, replaced by torch's own fused one:
    both keep two states and need no temporary.
    """
    config = {key: value for key, value in ds_config.items() if key != SECTION}
    optimizer = config.get("optimizer") or {}
    parameters = optimizer.get("params") or {}
    if str(optimizer.get("type", "")).lower() in ("adam", "adamw") and not parameters.get("torch_adam"):
        config["optimizer"] = {**optimizer, "params": {**parameters, "torch_adam": True, "fused": True}}
    return config


def _join_alone(world_size: int) -> None:
    """Make this process rank 0 of ``world_size``, and of no others."""
    if not dist.is_initialized():
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(world_size))
        dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    if (dist.get_backend(), dist.get_world_size()) != ("fake", world_size):
        raise ConfigError(
            f"a dry run needs a process of its own for every world size: this one is in a group of {dist.get_world_size()} "
            f"ranks ({dist.get_backend()}) and the plan is for {world_size}"
        )
