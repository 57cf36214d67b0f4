"""Reduce gradients once per optimizer step: summed up here, sent in few, large, asynchronous collectives.

What a rank sums up is [ranks, columns]: row r is what rank r of the scattering group keeps of it.  Three kinds of
parameters come here, and differ in what is sent in the last micro-step only:

- replicated (stage 0): one row, averaged in place over all ranks that hold a copy;
- optimizer states spread (stage 1): a row per rank, reduce-scattered; then averaged over the nodes, if each has a copy;
- gradients spread inside a node (stages 2 and 3): one row, DeepSpeed's own share of it, averaged over the nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import deepspeed.comm as dist
import torch

__all__ = ["DeferredReducer", "GradientSlot", "Route"]


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """Where the gradients of some parameters go; one object per way, so that those of one way can travel together."""

    scatter: Any
    """The ranks that get one row each; None where there is but one row."""
    peers: Any
    """The ranks that hold the same row; None where no other rank does."""


@dataclass(slots=True)
class GradientSlot:
    """Where the gradient of one parameter ends up."""

    key: int
    """DeepSpeed's id of the parameter, which follows the order of definition."""
    part: torch.Tensor
    """This rank's share: a 1-D view of DeepSpeed's flat gradient buffer, from which it takes norms and steps."""
    route: Route


class _Bucket:
    """Gradients that travel together."""

    def __init__(self, slots: list[GradientSlot], whole: torch.Tensor) -> None:
        self.slots = slots
        self.whole = whole
        self.route = slots[0].route
        self.wire: Any = None
        self.work: Any = None
        self.pending: set[int] = set()
        self._columns: dict[int, slice] = {}
        begin = 0
        for slot in slots:
            self._columns[slot.key] = slice(begin, begin + slot.part.numel())
            begin += slot.part.numel()
        self.reset()

    @property
    def launched(self) -> bool:
        return self.wire is not None

    def rows(self, key: int) -> torch.Tensor:
        """Where the gradient of one parameter is summed up: [ranks, its columns]."""
        return self.whole[:, self._columns[key]]

    def launch(self, wire_dtype: torch.dtype) -> None:
        self.wire = self.whole if self.whole.dtype == wire_dtype else self.whole.to(wire_dtype)
        self.work = _launch(self.route, self.wire)

    def cross(self) -> None:
        """Begin to average over the nodes what was scattered inside each."""
        self.work = _launch_mean(_own_row(self.route, self.wire), self.route.peers)

    def settle(self) -> None:
        """Hand the result to DeepSpeed."""
        if self.route.scatter is None:
            if self.wire is not self.whole:
                self.whole.copy_(self.wire)
            return
        row = _own_row(self.route, self.wire)
        for slot in self.slots:
            slot.part.copy_(row[self._columns[slot.key]])
        # DeepSpeed's accumulators keep the last gradient of a parameter until a new one comes.  So must these, though
        # the sum of what they hold is scattered by now: each rank holds the mean of its share, times the mean's divisor.
        self.whole.zero_()
        row = _own_row(self.route, self.whole)
        for slot in self.slots:
            torch.mul(slot.part, len(self.whole), out=row[self._columns[slot.key]])

    def reset(self) -> None:
        self.wire = self.work = None
        self.pending = {slot.key for slot in self.slots}


class DeferredReducer:
    """Reduces neighbouring gradients together, as soon as the last backward has finished a bucket of them.

    Ranks launch buckets in one fixed order, whatever order their gradients come in: collectives must match.
    """

    def __init__(
        self, slots: list[GradientSlot], flat_gradients: torch.Tensor, *, bucket_bytes: int, wire_dtype: torch.dtype
    ) -> None:
        self._wire_dtype = wire_dtype
        by_route: dict[Route, list[GradientSlot]] = {}
        for slot in slots:
            by_route.setdefault(slot.route, []).append(slot)
        self._buckets = [
            bucket
            for route, members in by_route.items()
            for bucket in (_in_place if route.scatter is None else _scattering)(members, flat_gradients, bucket_bytes)
        ]
        # Backward runs against the order of definition: the bucket that holds the earliest parameter is done last.
        self._buckets.sort(key=lambda bucket: -min(slot.key for slot in bucket.slots))
        self._bucket_of = {slot.key: bucket for bucket in self._buckets for slot in bucket.slots}
        self._late: list[tuple[_Bucket, int, torch.Tensor]] = []
        self._seen: set[int] = set()
        self._next = 0

    @property
    def buffers(self) -> list[torch.Tensor]:
        """What is held here beside DeepSpeed's own buffers, all the time."""
        return [bucket.whole for bucket in self._buckets if bucket.route.scatter is not None]

    def rebind(self, parts: Mapping[int, torch.Tensor], flat_gradients: torch.Tensor) -> None:
        """Go on with the same gradients in other memory: the buffer and this rank's shares by key, as they were laid out."""
        for bucket in self._buckets:
            for slot in bucket.slots:
                slot.part = parts[slot.key]
            if bucket.route.scatter is None:
                bucket.whole = _region(bucket.slots, flat_gradients)

    def begin_micro_step(self) -> None:
        """Forget which parameters gave a gradient in the micro-step before, and what a backward that failed has launched."""
        self._seen.clear()
        for bucket in self._buckets[: self._next]:
            bucket.work.wait()
            bucket.settle()
            bucket.reset()
        self._late.clear()
        self._next = 0

    def add(self, key: int, gradient: torch.Tensor, *, first_micro_step: bool, last_micro_step: bool) -> None:
        """Accumulate the gradient of one parameter; in the last micro-step, reduce the buckets that are complete.

        Args:
            key: the slot's key.
            gradient: as autograd gave it, or this rank's share of it where DeepSpeed has scattered it.
            first_micro_step: the accumulator still holds the last step's gradient and is overwritten.
            last_micro_step: no gradient of this parameter follows in this optimizer step.
        """
        bucket = self._bucket_of[key]
        if bucket.launched:
            # A parameter used both inside and outside a reentrant checkpoint gives two gradients in one backward; its
            # bucket is on the wire and must not be touched: reduce the second part by itself, when all is done.
            rows = torch.zeros_like(bucket.rows(key), dtype=self._wire_dtype, memory_format=torch.contiguous_format)
            _write(rows, gradient, torch.Tensor.copy_)
            self._late.append((bucket, key, rows))
            return
        overwrites = first_micro_step and key not in self._seen
        _write(bucket.rows(key), gradient, torch.Tensor.copy_ if overwrites else torch.Tensor.add_)
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
        crossing = [bucket for bucket in self._buckets if _crosses(bucket.route)]
        for bucket in crossing:
            bucket.cross()
        for bucket in crossing:
            bucket.work.wait()
        for bucket in self._buckets:
            bucket.settle()
            bucket.reset()
        for bucket, key, rows in self._late:
            self._reduce_late(bucket, key, rows)
        self._late.clear()
        self._seen.clear()
        self._next = 0

    def abandon(self) -> None:
        """Wait for what is on the wire, which ends: all ranks have begun it.  The reducer is of no use after that."""
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()

    def _reduce_late(self, bucket: _Bucket, key: int, rows: torch.Tensor) -> None:
        route = bucket.route
        _launch(route, rows).wait()
        row = _own_row(route, rows)
        if _crosses(route):
            _launch_mean(row, route.peers).wait()
        part = next(slot.part for slot in bucket.slots if slot.key == key)
        part.add_(row.to(part.dtype))

    def _launch_next(self) -> None:
        self._buckets[self._next].launch(self._wire_dtype)
        self._next += 1


def _crosses(route: Route) -> bool:
    """Whether two collectives follow one another: inside the node, then between nodes."""
    return route.scatter is not None and route.peers is not None


def _launch(route: Route, rows: torch.Tensor) -> Any:
    """Begin the first collective of ``route``; the result will be in this rank's row."""
    if route.scatter is None:
        return _launch_mean(rows.view(-1), route.peers)
    # Divide before the sum, as DeepSpeed's reduce-scatter does: fp16 sums overflow later.
    rows.div_(len(rows))
    return dist.reduce_scatter_tensor(_own_row(route, rows), rows.view(-1), group=route.scatter, async_op=True)


def _launch_mean(row: torch.Tensor, group: Any) -> Any:
    row.div_(dist.get_world_size(group=group))
    return dist.all_reduce(row, group=group, async_op=True)


def _own_row(route: Route, rows: Any) -> Any:
    return rows[0 if route.scatter is None else dist.get_rank(group=route.scatter)]


def _write(rows: torch.Tensor, gradient: torch.Tensor, how: Callable[..., Any]) -> None:
    """Write or add a flat gradient onto [ranks, columns]; it may end before they do, which is DeepSpeed's padding."""
    columns = rows.shape[1]
    full, rest = divmod(gradient.numel(), columns)
    gradient = gradient.detach().reshape(-1).to(rows.dtype)
    how(rows[:full], gradient[: full * columns].view(full, columns))
    if rest:
        how(rows[full, :rest], gradient[full * columns :])


def _in_place(slots: list[GradientSlot], flat: torch.Tensor, bucket_bytes: int) -> list[_Bucket]:
    """Buckets of neighbours in DeepSpeed's flat gradient buffer, which are summed up and reduced there, without a copy."""
    capacity = bucket_bytes // flat.element_size()
    runs = _runs(sorted(slots, key=_begin), capacity, lambda a, b: _begin(a) + a.part.numel() == _begin(b))
    return [_Bucket(run, _region(run, flat)) for run in runs]


def _region(run: list[GradientSlot], flat: torch.Tensor) -> torch.Tensor:
    """Where neighbours lie in the flat buffer: [1, their elements]."""
    return flat.narrow(0, _begin(run[0]) - int(flat.storage_offset()), sum(slot.part.numel() for slot in run)).view(1, -1)


def _scattering(slots: list[GradientSlot], flat: torch.Tensor, bucket_bytes: int) -> list[_Bucket]:
    """Buckets with an accumulator of their own, allocated once, in the layout that a reduce-scatter sends."""
    ranks = dist.get_world_size(group=slots[0].route.scatter)
    capacity = bucket_bytes // (flat.element_size() * ranks)
    buckets = []
    for run in _runs(sorted(slots, key=lambda slot: slot.key), capacity, lambda a, b: True):
        buckets.append(_Bucket(run, flat.new_zeros(ranks, sum(slot.part.numel() for slot in run))))
    return buckets


def _runs(
    slots: list[GradientSlot], capacity: int, adjoin: Callable[[GradientSlot, GradientSlot], bool]
) -> list[list[GradientSlot]]:
    """Cut a sequence into runs of at most ``capacity`` elements of a row; a larger parameter is a run by itself."""
    runs: list[list[GradientSlot]] = []
    filled = 0
    for slot in slots:
        if not runs or filled + slot.part.numel() > capacity or not adjoin(runs[-1][-1], slot):
            runs.append([])
            filled = 0
        runs[-1].append(slot)
        filled += slot.part.numel()
    return runs


def _begin(slot: GradientSlot) -> int:
    return int(slot.part.storage_offset())
