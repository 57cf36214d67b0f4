"""Average the gradients of replicated parameters across the ranks: few, large, asynchronous all-reduces."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import deepspeed.comm as dist
import torch

__all__ = ["GradientSlot", "ReplicaReducer"]


@dataclass(slots=True)
class GradientSlot:
    """Where the gradient of one replicated parameter accumulates."""

    key: int
    """DeepSpeed's id of the parameter, which follows the order of definition."""
    view: torch.Tensor
    """1-D view of the optimizer's flat gradient buffer."""


@dataclass(slots=True)
class _Bucket:
    slots: list[GradientSlot]
    flat: torch.Tensor
    """The part of the flat gradient buffer that its slots share: reduced in place, without a copy."""
    pending: set[int] = field(default_factory=set)
    wire: torch.Tensor | None = None
    work: Any = None

    @property
    def launched(self) -> bool:
        return self.wire is not None


class ReplicaReducer:
    """All-reduces neighbouring gradients together, as soon as backward has finished a bucket of them.

    Ranks launch buckets in one fixed order, whatever order their gradients come in: collectives must match.
    """

    def __init__(
        self,
        slots: list[GradientSlot],
        flat_gradients: torch.Tensor,
        *,
        bucket_bytes: int,
        group: Any,
        wire_dtype: torch.dtype,
    ) -> None:
        self._group = group
        self._world_size = dist.get_world_size(group=group)
        self._wire_dtype = wire_dtype
        self._buckets = _make_buckets(slots, flat_gradients, bucket_bytes)
        # Backward runs against the order of definition: the bucket that holds the earliest parameter is done last.
        self._buckets.sort(key=lambda bucket: -min(slot.key for slot in bucket.slots))
        self._bucket_of = {slot.key: bucket for bucket in self._buckets for slot in bucket.slots}
        self._view_of = {slot.key: slot.view for slot in slots}
        self._late: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._seen: set[int] = set()
        self._next = 0
        self.begin_micro_step()
        self._reset()

    def begin_micro_step(self) -> None:
        """Forget which parameters gave a gradient in the micro-step before."""
        self._seen.clear()

    def add(self, key: int, gradient: torch.Tensor, *, first_micro_step: bool, last_micro_step: bool) -> None:
        """Accumulate the gradient of one parameter; in the last micro-step, reduce the buckets that are complete.

        Args:
            key: the slot's key.
            gradient: as autograd gave it.
            first_micro_step: the accumulator still holds the last step's gradient and is overwritten.
            last_micro_step: no gradient of this parameter follows in this optimizer step.
        """
        view, bucket = self._view_of[key], self._bucket_of[key]
        if bucket.launched:
            # A parameter used both inside and outside a reentrant checkpoint gives two gradients in one backward; its
            # bucket is on the wire and must not be touched: reduce the second part by itself, when all is done.
            self._late.append((view, gradient.detach().to(self._wire_dtype, copy=True).reshape(-1)))
            return
        if first_micro_step and key not in self._seen:
            view.copy_(gradient.reshape(-1))
        else:
            view.add_(gradient.reshape(-1).to(view.dtype))
        self._seen.add(key)
        if last_micro_step:
            bucket.pending.discard(key)
            while self._next < len(self._buckets) and not self._buckets[self._next].pending:
                self._launch_next()

    def finish(self) -> None:
        """Reduce what is left (parameters that gave no gradient hold their bucket back) and wait for everything."""
        while self._next < len(self._buckets):
            self._launch_next()
        for bucket in self._buckets:
            bucket.work.wait()
            if bucket.wire is not None and bucket.wire is not bucket.flat:
                bucket.flat.copy_(bucket.wire)
        for view, gradient in self._late:
            gradient.div_(self._world_size)
            dist.all_reduce(gradient, group=self._group)
            view.add_(gradient.to(view.dtype))
        self._reset()

    def _launch_next(self) -> None:
        bucket = self._buckets[self._next]
        bucket.wire = bucket.flat if bucket.flat.dtype == self._wire_dtype else bucket.flat.to(self._wire_dtype)
        # Divide before the sum, as DeepSpeed's reduce-scatter does: fp16 sums overflow later.
        bucket.wire.div_(self._world_size)
        bucket.work = dist.all_reduce(bucket.wire, group=self._group, async_op=True)
        self._next += 1

    def _reset(self) -> None:
        self._next = 0
        self._late.clear()
        self._seen.clear()
        for bucket in self._buckets:
            bucket.wire = bucket.work = None
            bucket.pending = {slot.key for slot in bucket.slots}


def _make_buckets(slots: list[GradientSlot], flat: torch.Tensor, bucket_bytes: int) -> list[_Bucket]:
    """Cut neighbouring slots into buckets of at most ``bucket_bytes`` (a larger parameter is a bucket by itself)."""
    capacity = max(1, bucket_bytes // flat.element_size())
    runs: list[list[GradientSlot]] = []
    end = -1
    for slot in sorted(slots, key=_begin):
        begin = _begin(slot)
        if begin != end or begin + slot.view.numel() - _begin(runs[-1][0]) > capacity:
            runs.append([])
        runs[-1].append(slot)
        end = begin + slot.view.numel()
    origin = int(flat.storage_offset())
    return [_Bucket(run, flat.narrow(0, _begin(run[0]) - origin, sum(slot.view.numel() for slot in run))) for run in runs]


def _begin(slot: GradientSlot) -> int:
    return int(slot.view.storage_offset())
