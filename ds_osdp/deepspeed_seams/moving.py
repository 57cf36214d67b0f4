"""Move a live engine to another plan: every parameter with its optimizer states, between two steps, in memory.

DeepSpeed keeps what it optimizes in flat tensors that span parameters.  A move cuts these into one part per parameter,
gathers and spreads the parts anew one parameter at a time, those that shrink first, and joins them to the flat tensors that
a fresh engine of the new plan would have.  What needs no moving is freed before and made again after: whole parameters,
gradients (a move begins when they are spent) and DeepSpeed's bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from ds_osdp.deepspeed_seams import layout
from ds_osdp.deepspeed_seams.placement import Groups, Placement, regroup
from ds_osdp.plan import CommunicationSizes, Plan

__all__ = ["MovableStage3Optimizer"]


class _Loose:
    """Master weights and optimizer states, cut into one tensor per parameter."""

    def __init__(
        self, sub_groups: Sequence[Sequence[Any]], flats: list[Any], masters: list[Any], states: dict[Any, dict[str, Any]]
    ) -> None:
        """Cut up ``masters`` and ``states``, and empty both and ``flats``.

        Args:
            sub_groups: the parameters of each flat tensor, in its order.
            flats: the flat tensors of parameters; no parameter is a view of one any more.
            masters: DeepSpeed's flat master weights; one that is its flat tensor goes where the parameters go.
            states: the optimizer's, by master.
        """
        self._parts: dict[str, dict[int, torch.Tensor]] = {}
        self._rest: dict[int, dict[str, Any]] = {}
        for group in sub_groups:
            flat, master = flats.pop(0), masters.pop(0)
            state = states.pop(master, {})
            numel = master.numel()
            if not layout.share_memory(flat, master):
                self._cut(_MASTER, group, master)
            del flat, master
            for key in list(state):
                if torch.is_tensor(state[key]) and state[key].dim() == 1 and state[key].numel() == numel:
                    self._cut(key, group, state.pop(key))
            self._rest |= {p.ds_id: state for p in group}

    def _cut(self, key: str, group: Sequence[Any], flat: torch.Tensor) -> None:
        parts = torch.split(flat.detach(), [p.partition_numel() for p in group])
        self._parts.setdefault(key, {}).update({p.ds_id: part.clone() for p, part in zip(group, parts, strict=True)})

    def spread_anew(self, parameter: Any, group: Any) -> None:
        """Gather the parts of ``parameter`` from the ranks it is spread over, and keep what ``group`` leaves to this rank."""
        size = _part_numel(parameter, group)
        for parts in self._parts.values():
            if parameter.ds_id in parts:
                whole = layout.gathered(parts.pop(parameter.ds_id), parameter.ds_process_group)
                parts[parameter.ds_id] = layout.cut(whole[: parameter.ds_numel], size, dist.get_rank(group=group))

    def join(self, group: Sequence[Any], flat: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        """The flat master weights of one sub-group, and the optimizer's states for them; their parts are gone after that.

        ``flat`` is the flat tensor of its parameters, which are their own master weights if there are no others.
        """
        # The optimizer advances what is no flat tensor (Adam's step) in place: one for each sub-group.
        state = {key: value.clone() if torch.is_tensor(value) else value for key, value in self._rest[group[0].ds_id].items()}
        flats = {
            key: torch.cat([parts.pop(p.ds_id) for p in group]) for key, parts in self._parts.items() if group[0].ds_id in parts
        }
        return flats.pop(_MASTER, flat.detach()), {**state, **flats}


_MASTER = "ds_osdp master weights"
"""Beside the optimizer's own names."""


class MovableStage3Optimizer(DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    """DeepSpeed's stage-3 optimizer, whose flat tensors can be taken apart and joined anew."""

    osdp_sizes: CommunicationSizes
    osdp_deferred_bucket_bytes: int
    osdp_stock_groups: list[tuple[int, list[Any]]]
    averaged_gradients: dict[int, Any]
    debug_fp16_grads: list[dict[int, float]]

    _osdp_loose: _Loose | None = None

    def osdp_arrange(self) -> None:
        """Set up what follows from where parameters are placed; also called at the end of the constructor."""
        raise NotImplementedError

    def osdp_disarrange(self) -> None:
        """Undo it."""
        raise NotImplementedError

    @torch.no_grad()
    def osdp_move(self, plan: Plan, sizes: CommunicationSizes, groups: Groups) -> None:
        """Move to ``plan``, with the sizes DeepSpeed gathers with under it; every rank must call it, between two steps."""
        placement = Placement(plan)
        targets = []
        for name, parameter in self.module.named_parameters():
            stage, degree = placement(name)
            targets.append((parameter, stage, groups.of(name, degree)))
        loose = self._osdp_loosen()
        optimized = {p.ds_id for group in self.fp16_groups for p in group}

        def growth(parameter: Any, group: Any) -> int:
            return _part_numel(parameter, group) - int(parameter.partition_numel())

        # What shrinks makes room for what grows: in between, no more is held than before or after.
        for parameter, stage, pair in sorted(targets, key=lambda target: growth(target[0], target[2].partition)):
            moves = dist.get_world_size(group=pair.partition) != parameter.ds_zero_partition_world_size
            if moves and parameter.ds_id in optimized:
                loose.spread_anew(parameter, pair.partition)
            regroup(parameter, stage, pair)
        self.osdp_sizes, self.osdp_deferred_bucket_bytes = sizes, plan.deferred_bucket_bytes
        self.reduce_bucket_size, self.prefetch_elements = sizes.reduce_bucket_size, sizes.prefetch_bucket_size
        self._osdp_renew_coordinator()
        self._osdp_join(loose)

    def _osdp_loosen(self) -> _Loose:
        """Take the flat tensors apart, and free what can be made again."""
        self._partition_all_parameters()
        self.osdp_disarrange()
        # Its views are in a private dictionary of DeepSpeed's: free what they share.
        self.grad_partitions_flat_buffer.untyped_storage().resize_(0)
        self.averaged_gradients = {}
        for bucket in self.ipg_buckets.values():
            bucket.buffer = None
        for parameter in (p for group in self.fp16_groups for p in group):
            parameter.ds_tensor.data = parameter.ds_tensor.data.clone()
        self.lp_param_buffer = None
        return _Loose(
            self.fp16_groups, self.fp16_partitioned_groups_flat, self.fp32_partitioned_groups_flat, self.optimizer.state
        )

    def _osdp_renew_coordinator(self) -> None:
        """Gather with the sizes of the plan, and record anew in which order."""
        coordinator = copy(self._get_param_coordinator())  # DeepSpeed caches what to free by coordinator
        if not coordinator.is_invalid_trace():
            coordinator._invalidate_trace()
        for name, size in (
            ("prefetch_bucket_sz", self.osdp_sizes.prefetch_bucket_size),
            ("max_reuse_dist_in_numel", self.osdp_sizes.max_reuse_distance),
            ("max_n_available_params", self.osdp_sizes.max_live_parameters),
        ):
            setattr(coordinator, f"_PartitionedParameterCoordinator__{name}", size)
        self.parameter_offload.param_coordinator = coordinator

    def _osdp_join(self, loose: _Loose) -> None:
        """Make what DeepSpeed's constructor makes of the parameters, with the states that ``loose`` holds."""
        for name in _PER_SUB_GROUP:
            getattr(self, name).clear()
        for index, parameters in self.osdp_stock_groups:
            self.optimizer.param_groups[index]["params"] = layout.engine_parameters(parameters)
        self.trainable_param_groups = self._get_trainable_parameter_groups()
        self._create_fp16_partitions_with_defragmentation(self.trainable_param_groups)
        self._osdp_loose = loose
        self._setup_for_real_optimizer()
        self._osdp_loose = None
        self.set_grad_positions()
        self.debug_fp16_grads = [{} for _ in self.fp16_groups]
        self.osdp_arrange()

    def _create_fp32_partitions(self) -> None:
        if self._osdp_loose is None:
            super()._create_fp32_partitions()
            return
        for group, flat in zip(self.fp16_groups, self.fp16_partitioned_groups_flat, strict=True):
            master, state = self._osdp_loose.join(group, flat)
            master.ds_id = f"{group[0].ds_id}_{group[-1].ds_id}"  # type: ignore[attr-defined]
            master.requires_grad = True
            self.fp32_partitioned_groups_flat.append(master)
            if state:
                self.optimizer.state[master] = state
        self._clear_fp32_optimizer_param_groups()

    def initialize_optimizer_states(self) -> None:
        """Called by DeepSpeed once there are master weights."""
        if self._osdp_loose is None:
            super().initialize_optimizer_states()


_PER_SUB_GROUP = (
    "fp16_groups",
    "fp16_partitioned_groups",
    "fp16_partitioned_groups_flat_numel",
    "fp16_partitioned_groups_flat_id",
    "groups_padding",
    "sub_group_to_group_id",
    "sub_group_process_groups",
    "sub_group_partition_counts",
    "next_swappable_fp32_partitioned_groups",
    "grad_position",
)
"""What DeepSpeed's constructor fills, and expects to be empty."""


def _part_numel(parameter: Any, group: Any) -> int:
    """Elements that one rank of ``group`` holds of ``parameter``."""
    return -(-int(parameter.ds_numel) // int(dist.get_world_size(group=group)))
