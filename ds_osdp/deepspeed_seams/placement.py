"""Put a plan onto a module: give every parameter the partition group that its stage and degree ask for.

DeepSpeed (since 0.19.3) partitions each parameter over the group that ``ds_zero_partition_process_group`` names, and its
gathers, gradient buckets, sub-groups and norms honour it.  A group of one is a parameter that every rank holds whole; a
group of the ranks of a node is one of which every node holds a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import deepspeed.comm as dist
import torch
import torch.distributed
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn

from ds_osdp.errors import PlanMismatchError
from ds_osdp.plan import Plan, Stage, UnitPlan
from ds_osdp.split import sliced, unsplit_name

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "Groups",
    "Placement",
    "accumulates_whole",
    "full_shapes",
    "is_replicated",
    "is_whole",
    "peers",
    "place",
    "regroup",
    "verify",
]


def is_replicated(parameter: torch.Tensor) -> bool:
    """Whether a plan made every rank hold the parameter, its gradient and its optimizer states whole."""
    return getattr(parameter, "osdp_stage", None) is Stage.REPLICATED


def accumulates_whole(parameter: torch.Tensor) -> bool:
    """Whether a plan lets every rank sum up the whole gradient, and reduce it once per optimizer step."""
    return getattr(parameter, "osdp_stage", None) in (Stage.REPLICATED, Stage.OPTIMIZER_STATES)


def is_whole(parameter: torch.Tensor) -> bool:
    """Whether a plan keeps the parameter whole on every rank between its uses."""
    return getattr(parameter, "osdp_stage", Stage.FULLY_SHARDED) is not Stage.FULLY_SHARDED


def peers(parameter: torch.Tensor) -> Any:
    """The group of ranks that hold the same part of the parameter as this rank; None when no other does."""
    return getattr(parameter, "osdp_peers", None)


def full_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name to full shape of every parameter, tied ones once; also of those that ``zero.Init`` has partitioned, or that are
    split, as they were before.
    """
    shapes = {}
    for name, parameter in module.named_parameters():
        whole = sliced(parameter)
        shapes[unsplit_name(name)[0]] = tuple(getattr(parameter, "ds_shape", parameter.shape) if whole is None else whole.shape)
    return shapes


class Placement:
    """The stage and the degree of every parameter, by its name on the engine."""

    def __init__(self, plan: Plan) -> None:
        self._units: dict[str, UnitPlan] = {name: unit for unit in plan.units for name in unit.parameters}

    def __call__(self, name: str) -> tuple[Stage, int]:
        planned, index = unsplit_name(name)
        unit = self._units[planned]
        stage = Stage.REPLICATED if index is not None and index < unit.whole_slices else unit.stage
        return stage, 1 if stage is Stage.REPLICATED else unit.degree


@dataclass(frozen=True, slots=True)
class _Pair:
    """The groups of one degree that this rank is in."""

    partition: Any
    """The ranks that hold one part each."""
    peers: Any
    """The ranks that hold the same part."""


class Groups:
    """The process groups of one engine: made once per degree, when a plan first asks for it."""

    def __init__(self) -> None:
        self._of_degree: dict[int, _Pair] = {}

    def of(self, name: str, degree: int) -> _Pair:
        """Those of a parameter's degree; every rank must ask, in the same order.

        Raises:
            PlanMismatchError: the degree does not divide the job's ranks.
        """
        if degree not in self._of_degree:
            self._of_degree[degree] = _make_groups(name, degree, dist.get_world_size())
        return self._of_degree[degree]


def place(module: nn.Module, plan: Plan, groups: Groups) -> None:
    """Mark and place every parameter of ``module``, before DeepSpeed converts it.

    Parameters that ``deepspeed.zero.Init`` has spread over the world already are gathered and spread anew one at a time,
    so that the peak exceeds the sharded model's by what the plan keeps and never by more than one parameter beside it.
    The copies of a parameter are made equal: rank 0's values, as DeepSpeed does for partitioned ones.

    Raises:
        PlanMismatchError: the plan spreads a unit over a number of ranks that does not divide the job's.
    """
    world_size = dist.get_world_size()
    placement = Placement(plan)
    # DeepSpeed has broadcast the parameters of an ordinary model by now, and none of one that zero.Init built, also not
    # those added to it since (adapters).
    built_partitioned = any(hasattr(parameter, "ds_id") for parameter in module.parameters())
    for name, parameter in module.named_parameters():
        stage, degree = placement(name)
        pair = groups.of(name, degree)
        if hasattr(parameter, "ds_id"):
            regroup(parameter, stage, pair)
            continue
        _mark(parameter, stage, pair)
        if degree != world_size:
            parameter.ds_zero_partition_process_group = pair.partition  # type: ignore[attr-defined]
            if built_partitioned:
                dist.broadcast(parameter.data, 0)


def regroup(parameter: Any, stage: Stage, pair: _Pair) -> None:
    """Mark a parameter that DeepSpeed has partitioned; if its degree is another now, gather it and spread it anew."""
    _mark(parameter, stage, pair)
    if dist.get_world_size(group=pair.partition) == dist.get_world_size(group=parameter.ds_process_group):
        _join(parameter, pair.partition)
        return
    parameter.all_gather()
    _join(parameter, pair.partition)
    parameter.ds_tensor = None
    parameter.partition()


def _mark(parameter: Any, stage: Stage, pair: _Pair) -> None:
    parameter.osdp_stage = stage
    parameter.osdp_peers = pair.peers


def _join(parameter: Any, group: Any) -> None:
    parameter.ds_process_group = group
    parameter.ds_zero_partition_process_group = group
    parameter.ds_zero_partition_rank = dist.get_rank(group=group)
    parameter.ds_zero_partition_world_size = dist.get_world_size(group=group)


def _make_groups(name: str, degree: int, world_size: int) -> _Pair:
    """Every rank takes part in making every group, or finds itself in another order than the others."""
    if degree == world_size:
        return _Pair(dist.get_world_group(), None)
    if degree == 1:
        # Made without the other ranks: a job has as many of these as ranks.
        alone = torch.distributed.new_group([dist.get_rank()], use_local_synchronization=True)
        return _Pair(alone, dist.get_world_group())
    if world_size % degree:
        raise PlanMismatchError(
            f"the plan spreads {name!r} over {degree} ranks, which does not divide the job's {world_size}: plan again"
        )
    nodes = [list(range(first, first + degree)) for first in range(0, world_size, degree)]
    positions = [list(range(position, world_size, degree)) for position in range(degree)]
    partition, _ = torch.distributed.new_subgroups_by_enumeration(nodes)  # type: ignore[no-untyped-call]
    peers, _ = torch.distributed.new_subgroups_by_enumeration(positions)  # type: ignore[no-untyped-call]
    return _Pair(partition, peers)


def verify(parameters: Iterable[tuple[str, Any]], plan: Plan) -> None:
    """Compare what the engine partitioned with the plan: a signature can stay while behaviour moves.

    Raises:
        PlanMismatchError: naming the first parameter that differs.
    """
    placement = Placement(plan)
    for name, parameter in parameters:
        stage, degree = placement(name)
        group = dist.get_world_size(group=parameter.ds_process_group)
        held, wanted = parameter.ds_tensor.ds_numel, -(-parameter.ds_numel // degree)
        if group != degree or held != wanted:
            raise PlanMismatchError(
                f"the plan spreads {name!r} over {degree} ranks ({wanted} elements each); the engine spread it over {group} "
                f"({held} each). This is a defect of ds_osdp: set osdp.enabled to false and report it"
            )
        if is_whole(parameter) and parameter.ds_status is not ZeroParamStatus.AVAILABLE:
            raise PlanMismatchError(
                f"the plan keeps {name!r} whole (stage {stage:d}); in the engine it is "
                f"{parameter.ds_status.name}. This is a defect of ds_osdp: set osdp.enabled to false and report it"
            )
