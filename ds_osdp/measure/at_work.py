"""Which unit is at work, from one operator to the next.

In forward, it is the one whose forward began last.  In backward it is the one that was at work when autograd recorded the
node that now runs: nodes carry a sequence number, and noting the number at which each unit began is enough.  Module backward
hooks would answer too, but they put nodes of their own into the graph.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

__all__ = ["UnitAtWork"]

_UNNUMBERED = 2**64 - 1
"""The sequence number of nodes that accumulate a gradient: they run right after the node that made it."""


class UnitAtWork:
    """Follows one model through forwards and backwards.  Units are numbered in the order of their first forward."""

    def __init__(self, model: nn.Module, units: Iterable[str], entered: Callable[[int], None]) -> None:
        """Watch the modules of ``model`` that ``units`` name; ``entered`` is called with the number of the one that begins."""
        self.order: dict[str, int] = {}
        self.recomputed: set[str] = set()
        """Units whose forward ran again in backward."""
        self.in_backward = False
        self._entered = entered
        # Where in the sequence of autograd nodes each unit began: in the forward, and where it is computed again in backward.
        self._began: list[tuple[int, int]] = []
        self._began_again: list[tuple[int, int]] = []
        self._task: int | None = None
        self._running: tuple[int, int] | None = None
        self._hooks = [model.get_submodule(name).register_forward_pre_hook(self._begin(name), prepend=True) for name in units]

    def begin_forward(self) -> None:
        """A new pass through the model begins."""
        self.in_backward = False
        self._began, self._began_again, self._task, self._running = [], [], None, None

    def begin_backward(self) -> None:
        """The forward is over."""
        self.in_backward = True

    def follow_autograd(self) -> None:
        """Let the unit whose forward recorded the running node be at work, unless it is computing something again."""
        node = torch._C._current_autograd_node()
        if node is None or node._sequence_nr() == _UNNUMBERED:
            return
        running = torch._C._current_graph_task_id(), node._sequence_nr()
        if self._running is None:
            self._task = running[0]
        if running == self._running:
            return
        self._running = running
        # Reentrant checkpointing runs a backward of its own inside ours, over nodes recorded when it computed again.
        began = self._began if running[0] == self._task else self._began_again
        place = bisect_right(began, running[1], key=lambda mark: mark[0])
        self._entered(began[place - 1][1] if place else 0)

    def remove(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self, name: str) -> Callable[..., None]:
        def begin(*_: Any) -> None:
            unit = self.order.setdefault(name, len(self.order))
            if self.in_backward:
                self.recomputed.add(name)
            began = self._began_again if self.in_backward else self._began
            began.append((torch._C._autograd._get_sequence_nr(), unit))
            self._entered(unit)

        return begin
