"""Which bytes are alive while a unit is at work: a ledger of storages, read after the fact.

Which storages are kept for backward is known when the forward is over, not when they are born.  So the ledger writes births
and deaths down as they come, and peaks are found by going through them once more.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

import torch

__all__ = ["StorageLedger"]


@dataclass(slots=True, eq=False)
class _Entry:
    """One storage.  Units are numbered in the order of their first forward."""

    nbytes: int
    unit: int
    """The unit at work when an operator made it."""
    is_input: bool = False
    saved: int | None = None
    """The unit at work when it was first saved for backward."""
    reference: weakref.ref[torch.UntypedStorage] | None = None


@dataclass(slots=True)
class StorageLedger:
    """Births, deaths and purposes of all storages of one traced step."""

    resident: frozenset[int]
    """Storages of parameters and buffers: alive anyway, and never counted."""
    inputs: set[int] = field(default_factory=set)
    """Storages of the model's inputs: alive all the time, and kept by the unit that saves them."""
    unit: int = 0
    """The unit at work."""
    _alive: dict[int, _Entry] = field(default_factory=dict)
    _events: list[tuple[int, _Entry, int]] = field(default_factory=list)
    """(unit at work, storage, change in bytes)"""
    _kept: Counter[int] = field(default_factory=Counter)
    """Bytes that operators made and backward needs, by unit."""
    _forward_events: int = 0
    """How many of the events were in forward."""

    def enter(self, unit: int) -> None:
        """From now on ``unit`` is at work; what is alive now is alive during its work too."""
        self.unit = unit
        self._events.append((unit, _NOTHING, 0))

    def made(self, tensors: Iterable[torch.Tensor]) -> None:
        """An operator returned ``tensors``."""
        self._events += self._births(tensors)

    def made_by_node(self, tensors: Iterable[torch.Tensor]) -> None:
        """A node of the graph returned ``tensors``: what died meanwhile was needed for them, and they came first."""
        place = len(self._events)
        while place and self._events[place - 1][2] < 0:
            place -= 1
        self._events[place:place] = self._births(tensors)

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether an operator made it, or it was saved before."""
        return tensor.untyped_storage()._cdata in self._alive

    def saved(self, tensor: torch.Tensor) -> None:
        """Autograd saved ``tensor`` for backward."""
        storage = tensor.untyped_storage()
        if storage._cdata in self.resident:
            return
        entry = self._alive.get(storage._cdata)
        if entry is None:  # No operator made it.
            entry = self._add(storage)
            entry.is_input = True
        if entry.saved is None:
            entry.saved = self.unit

    def accumulated(self, gradient: torch.Tensor) -> None:
        """``gradient`` is complete: whoever holds it now, DeepSpeed reduces it and lets it go."""
        key = gradient.untyped_storage()._cdata
        if key in self._alive:
            self._alive[key].reference = None
            self._died(key)

    def end_forward(self) -> Counter[int]:
        """What is alive now is kept for backward.

        Returns:
            Kept bytes, inputs among them, by unit: the one that saved the storage first; or, for what the graph holds without
            having saved it (inputs of checkpointed blocks, attributes of a context), the one that made it.
        """
        self._forward_events = len(self._events)
        gc.collect()  # A reference cycle among the forward's leftovers would look like something kept.
        inputs: Counter[int] = Counter()
        for entry in self._alive.values():
            unit = entry.unit if entry.saved is None else entry.saved
            (inputs if entry.is_input else self._kept)[unit] += entry.nbytes
        return self._kept + inputs

    def peaks_beyond_kept(self) -> tuple[Counter[int], Counter[int]]:
        """By unit, the most bytes alive during its forward and during its backward, gradients among them, beyond what it and
        the units before it keep for backward.
        """
        units = 1 + max((unit for unit, _, _ in self._events), default=0)
        kept_so_far = list(accumulate(self._kept[unit] for unit in range(units)))
        forward: Counter[int] = Counter()
        backward: Counter[int] = Counter()
        alive = 0
        for place, (unit, _, change) in enumerate(self._events):
            alive += change
            peaks = forward if place < self._forward_events else backward
            peaks[unit] = max(peaks[unit], alive - kept_so_far[unit])
        return forward, backward

    def _births(self, tensors: Iterable[torch.Tensor]) -> list[tuple[int, _Entry, int]]:
        born = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._alive and key not in self.resident and key not in self.inputs:
                entry = self._add(storage)
                born.append((self.unit, entry, entry.nbytes))
        return born

    def _add(self, storage: torch.UntypedStorage) -> _Entry:
        key = storage._cdata
        entry = _Entry(storage.nbytes(), self.unit)
        entry.reference = weakref.ref(storage, lambda _: self._died(key))
        self._alive[key] = entry
        return entry

    def _died(self, key: int) -> None:
        entry = self._alive.pop(key)
        if not entry.is_input:
            self._events.append((self.unit, entry, -entry.nbytes))


_NOTHING = _Entry(0, 0)
