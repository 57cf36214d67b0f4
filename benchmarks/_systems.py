"""How each system trains one model: all from the same DeepSpeed JSON, which names optimizer, clipping and accumulation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from _models import Block
from torch import Tensor, nn

from ds_osdp.plan import Plan

Step = Callable[[list[Tensor]], Tensor]
"""One optimizer step on its micro-batches; returns their mean loss."""


@dataclass(frozen=True)
class Trainer:
    """One system with one model."""

    step: Step
    end: Callable[[], None] = lambda: None
    plan: Plan | None = None


def deepspeed_trainer(model: nn.Module, config: dict[str, Any]) -> Trainer:
    """Stock DeepSpeed."""
    import deepspeed
    from deepspeed.utils import groups

    engine, *_ = deepspeed.initialize(model=model, model_parameters=_trained(model), config=config)
    # An engine with hpZ leaves its group where those that are made later find it, and take it for theirs.
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    return Trainer(_engine_step(engine), engine.destroy)


def ds_osdp_trainer(model: nn.Module, config: dict[str, Any]) -> Trainer:
    """DeepSpeed with the plan that the `osdp` section of the JSON leads to."""
    from ds_osdp import initialize

    engine, *_ = initialize(model=model, model_parameters=_trained(model), config=config)
    return Trainer(_engine_step(engine), engine.destroy, engine.osdp.plan)


def ddp_trainer(model: nn.Module, config: dict[str, Any], *, bucket_mib: float = 25.0) -> Trainer:
    """DistributedDataParallel of torch: one all-reduce per optimizer step, overlapped with backward."""
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket_mib, gradient_as_bucket_view=True)
    return Trainer(_torch_step(wrapped, config, lambda last: nullcontext() if last else wrapped.no_sync()))


def fsdp2_trainer(
    model: nn.Module, config: dict[str, Any], *, reshard_after_forward: bool, reduce_every_micro_step: bool = False
) -> Trainer:
    """FSDP2 around every block and the rest; gradients are reduced in the last micro-step only, unless asked for."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in [module for module in model.modules() if isinstance(module, Block)]:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward)

    def micro_step(last: bool) -> AbstractContextManager[None]:
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(last or reduce_every_micro_step)
        return nullcontext()

    return Trainer(_torch_step(model, config, micro_step))


def local_trainer(model: nn.Module, config: dict[str, Any]) -> Trainer:
    """The forwards and backwards of a step and nothing else: what no system can do without.  It does not train."""

    def step(batches: list[Tensor]) -> Tensor:
        losses = []
        for ids in batches:
            loss = model(ids=ids)
            loss.backward()
            losses.append(loss.detach())
        model.zero_grad()
        return torch.stack(losses).mean()

    return Trainer(step)


TRAINERS: dict[str, Callable[..., Trainer]] = {
    "deepspeed": deepspeed_trainer,
    "ds_osdp": ds_osdp_trainer,
    "ddp": ddp_trainer,
    "fsdp2": fsdp2_trainer,
    "local": local_trainer,
}


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _engine_step(engine: Any) -> Step:
    def step(batches: list[Tensor]) -> Tensor:
        losses = []
        for ids in batches:
            loss = engine(ids=ids.to(engine.device))
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    return step


def _torch_step(wrapped: nn.Module, config: dict[str, Any], micro_step: Callable[[bool], AbstractContextManager[None]]) -> Step:
    """``micro_step(last)`` surrounds each micro-step."""
    options = {name: value for name, value in config["optimizer"]["params"].items() if name != "torch_adam"}
    optimizer = torch.optim.AdamW(_trained(wrapped), **options)

    def step(batches: list[Tensor]) -> Tensor:
        losses = []
        for i, ids in enumerate(batches):
            with micro_step(i == len(batches) - 1):
                loss = wrapped(ids=ids)
                (loss / len(batches)).backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(_trained(wrapped), config["gradient_clipping"])
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean()

    return step
