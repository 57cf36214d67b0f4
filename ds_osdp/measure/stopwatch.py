"""A stopwatch that charges time to the unit at work, and stands still in between."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ds_osdp.measure.memory_sample import MemorySample

__all__ = ["AtWork", "MicroStep", "Stopwatch"]


class AtWork(NamedTuple):
    """Who is at work."""

    step: MicroStep
    backward: bool
    unit: int | None
    """None before the first unit of a forward has begun."""


@dataclass(slots=True, eq=False)
class MicroStep:
    """One forward and its backward."""

    sample: MemorySample | None = None
    """While it is sampled for memory; its seconds are not to be trusted then."""
    _spans: list[tuple[bool, int | None, Any, Any]] = field(default_factory=list)
    # Where in the sequence of autograd nodes each unit began: in the forward, and where it is computed again in backward.
    _began: tuple[list[tuple[int, int]], list[tuple[int, int]]] = field(default_factory=lambda: ([], []))

    def began(self, again: bool) -> list[tuple[int, int]]:
        """(sequence number of the next autograd node, unit) of all that began so far."""
        return self._began[again]

    def unit_at(self, sequence_number: int, again: bool) -> int | None:
        """The unit that was at work when autograd recorded the node with that number."""
        began = self._began[again]
        place = bisect_right(began, sequence_number, key=lambda mark: mark[0])
        return began[place - 1][1] if place else None

    def seconds(self) -> dict[tuple[bool, int], float]:
        """Per phase (whether it is backward) and unit; what ran before the first unit counts with the first."""
        first = self._began[False][0][1] if self._began[False] else 0
        total: dict[tuple[bool, int], float] = defaultdict(float)
        for backward, unit, start, end in self._spans:
            total[backward, first if unit is None else unit] += _seconds_between(start, end)
        return total


class Stopwatch:
    """Charges time to ``at_work``.  On CUDA it reads the clock of the stream: a kernel's time is its own, not its launch's."""

    def __init__(self, cuda: bool) -> None:
        self.at_work: AtWork | None = None
        self._now = _cuda_event if cuda else time.perf_counter
        self._since: Any = None

    @property
    def running(self) -> bool:
        """Whether somebody is at work and the watch does not stand still."""
        return self._since is not None

    def enter(self, at_work: AtWork) -> None:
        """From now on it is ``at_work``."""
        now = self._now()
        self._charge(now)
        self.at_work, self._since = at_work, now

    def leave(self) -> None:
        """From now on it is nobody."""
        self.pause()
        self.at_work = None

    def pause(self) -> None:
        """Stand still."""
        if self._since is not None:
            self._charge(self._now())
            self._since = None

    def resume(self) -> None:
        """Run again, for the one that was at work."""
        if self._since is None and self.at_work is not None:
            self._since = self._now()

    def _charge(self, now: Any) -> None:
        if self._since is not None:
            assert self.at_work is not None
            self.at_work.step._spans.append((self.at_work.backward, self.at_work.unit, self._since, now))


def _cuda_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _seconds_between(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
