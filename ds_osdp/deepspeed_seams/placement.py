"""Put a plan onto a module: give every replicated parameter a partition group of this rank alone.

DeepSpeed (since 0.19.3) partitions each parameter over the group that ``ds_zero_partition_process_group`` names, and its
gathers, gradient buckets, sub-groups and norms honour it.  A group of one is a parameter that every rank holds whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import deepspeed.comm as dist
import torch
import torch.distributed
from torch import nn

from ds_osdp.errors import PlanMismatchError
from ds_osdp.plan import Plan, Stage

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["full_shapes", "is_replicated", "place", "verify"]


def is_replicated(parameter: torch.Tensor) -> bool:
    """Whether a plan made every rank hold ``parameter`` whole."""
    return getattr(parameter, "osdp_stage", None) is Stage.REPLICATED


def full_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name to full shape of every parameter, tied ones once; also of those that ``zero.Init`` has partitioned."""
    return {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in module.named_parameters()}


def place(module: nn.Module, plan: Plan) -> None:
    """Mark and place every parameter of ``module``, before DeepSpeed converts it.

    Parameters that ``deepspeed.zero.Init`` has spread over the world already are gathered and kept whole one at a time,
    so that the peak exceeds the sharded model's by what stays replicated and never by more than one parameter beside it.
    The copies of a replicated parameter are made equal: rank 0's values, as DeepSpeed does for partitioned ones.
    """
    # DeepSpeed's wrapper cannot make a group of one without every rank taking part.
    alone = torch.distributed.new_group([dist.get_rank()], use_local_synchronization=True)
    stages = plan.stage_of
    # DeepSpeed has broadcast the parameters of an ordinary model by now, and none of one that zero.Init built, also not
    # those added to it since (adapters).
    built_partitioned = any(hasattr(parameter, "ds_id") for parameter in module.parameters())
    for name, parameter in module.named_parameters():
        parameter.osdp_stage = stages[name]  # type: ignore[attr-defined]
        if not is_replicated(parameter):
            continue
        if hasattr(parameter, "ds_id"):
            _keep_whole(parameter, alone)
        else:
            parameter.ds_zero_partition_process_group = alone  # type: ignore[attr-defined]
            if built_partitioned:
                dist.broadcast(parameter.data, 0)


def _keep_whole(parameter: Any, alone: Any) -> None:
    """Gather a parameter that is spread over the world, and make the whole of it this rank's part."""
    parameter.all_gather()
    parameter.ds_process_group = alone
    parameter.ds_zero_partition_process_group = alone
    parameter.ds_zero_partition_rank = 0
    parameter.ds_zero_partition_world_size = 1
    parameter.ds_tensor = None
    parameter.partition()


def verify(parameters: Iterable[tuple[str, Any]], plan: Plan, world_size: int) -> None:
    """Compare what the engine partitioned with the plan: a signature can stay while behaviour moves.

    Raises:
        PlanMismatchError: naming the first parameter that differs.
    """
    stages = plan.stage_of
    for name, parameter in parameters:
        degree = 1 if stages[name] is Stage.REPLICATED else world_size
        group = dist.get_world_size(group=parameter.ds_process_group)
        held, wanted = parameter.ds_tensor.ds_numel, -(-parameter.ds_numel // degree)
        if group != degree or held != wanted:
            raise PlanMismatchError(
                f"the plan spreads {name!r} over {degree} ranks ({wanted} elements each); the engine spread it over {group} "
                f"({held} each). This is a defect of ds_osdp: set osdp.enabled to false and report it"
            )
