"""Watch one forward and backward of a model, operator by operator, and count each with the unit at work.

In forward, the unit at work is the one whose forward began last.  In backward it is the one that was at work when autograd
recorded the node that now runs: nodes carry a sequence number, and noting the number at which each unit began is enough.
Module backward hooks would answer too, but they put nodes of their own into the graph.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from ds_osdp.measure.fake import ShapeRunner, tensors_in
from ds_osdp.measure.memory import StorageLedger
from ds_osdp.measure.operators import flop_formula, moved_bytes
from ds_osdp.profile import ParameterProfile, UnitProfile, Work

__all__ = ["Tracer"]

_UNNUMBERED = 2**64 - 1
"""The sequence number of nodes that accumulate a gradient: they run right after the node that made it."""


@dataclass(slots=True)
class _Phase:
    """What one pass through the model costs, by unit."""

    flops: Counter[int] = field(default_factory=Counter)
    moved: Counter[int] = field(default_factory=Counter)

    def work(self, unit: int) -> Work:
        return Work(flops=self.flops[unit], bytes_moved=self.moved[unit])


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator, and counts it with the unit at work.  Units are numbered in the order of their first forward."""

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module, units: tuple[str, ...], runner: ShapeRunner) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.order: dict[str, int] = {}
        resident = [*model.parameters(), *model.buffers()]
        self.ledger = StorageLedger(frozenset(t.untyped_storage()._cdata for t in resident))
        self._model = model
        self._units = units
        self._runner = runner
        self._forward, self._backward = _Phase(), _Phase()
        self._kept: Counter[int] = Counter()
        self._output_bytes: Counter[str] = Counter()
        self._recomputed: set[str] = set()
        self._in_backward = False
        # Where in the sequence of autograd nodes each unit began: in the forward, and where it is computed again in backward.
        self._began: list[tuple[int, int]] = []
        self._began_again: list[tuple[int, int]] = []
        self._task: int | None = None
        self._running: tuple[int, int] | None = None

    def run(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """One forward and, if anything is trainable, one backward."""
        for name in self._units:
            unit = self._model.get_submodule(name)
            unit.register_forward_pre_hook(self._begin(name), prepend=True)
            unit.register_forward_hook(self._returned(name))
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]
        self.ledger.inputs.update(tensor.untyped_storage()._cdata for tensor in inputs.values())
        with self, saved_tensors_hooks(self._save, lambda tensor: tensor):
            output = self._model(**inputs)
        if not self.order:  # Parameters were used, and no unit's forward was called: all work is the first unit's.
            self.order = dict.fromkeys(self._units[:1], 0)
        edges, gradients = _backward_roots(output)
        # Only edges into the graph are held now: the outputs die here, as in a training loop that returns the loss.
        del output
        self._kept = self.ledger.end_forward()
        self._in_backward = True
        if edges:
            with self:
                torch.autograd.backward(edges, gradients)

    def profiles(self, owned: Mapping[str, tuple[ParameterProfile, ...]], rows: Mapping[str, int]) -> Iterator[UnitProfile]:
        """What was seen, unit by unit; ``rows`` of the parameters that can be split, by name."""
        peaks = self.ledger.peaks_beyond_kept()
        for name, index in self.order.items():
            yield UnitProfile(
                name=name,
                parameters=owned[name],
                forward=self._forward.work(index),
                backward=self._backward.work(index),
                activation_bytes=self._kept[index],
                transient_bytes=peaks[index],
                output_bytes=self._output_bytes[name],
                recomputes=name in self._recomputed,
                split_rows=max(rows.get(parameter.name, 1) for parameter in owned[name]),
            )
        for name in owned:
            if name not in self.order:
                yield UnitProfile(name=name, parameters=owned[name])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # Asked many times per operator, and free.
            return func(*args, **kwargs)
        if self._in_backward:
            self._follow_autograd()
        inputs = tensors_in((args, kwargs))
        out = self._runner.run(func, args, kwargs, inputs)
        outputs = tensors_in(out)
        self.ledger.made(outputs)
        phase = self._backward if self._in_backward else self._forward
        packet = getattr(func, "overloadpacket", func)
        formula = flop_formula(packet)
        if formula is not None:
            phase.flops[self.ledger.unit] += formula(*args, **kwargs, out_val=out)
        elif outputs:
            mutates = isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable
            phase.moved[self.ledger.unit] += moved_bytes(packet, inputs, outputs, mutates)
        return out

    def _begin(self, name: str) -> Callable[..., None]:
        def begin(*_: Any) -> None:
            unit = self.order.setdefault(name, len(self.order))
            began = self._began_again if self._in_backward else self._began
            began.append((torch._C._autograd._get_sequence_nr(), unit))
            self.ledger.enter(unit)
            if self._in_backward:
                self._recomputed.add(name)

        return begin

    def _returned(self, name: str) -> Callable[..., None]:
        def returned(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if not self._in_backward:
                self._output_bytes[name] += sum(t.numel() * t.element_size() for t in tensors_in(output))

        return returned

    def _follow_autograd(self) -> None:
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
        self.ledger.enter(began[place - 1][1] if place else 0)

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        self.ledger.saved(tensor)
        return tensor

    def _accumulated(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self.ledger.accumulated(parameter.grad)
        parameter.grad = None  # As in DeepSpeed, which reduces it and lets it go.


def _backward_roots(output: Any) -> tuple[list[GradientEdge], list[torch.Tensor]]:
    """Where backward starts, and with which gradients: at the loss, or else at the sum of all differentiable outputs."""
    loss = getattr(output, "loss", None)
    candidates = tensors_in(output if loss is None else loss)
    roots = [t for t in candidates if t.is_floating_point() and t.requires_grad]
    # The gradient of a sum is one everywhere: an expanded scalar, as autograd itself makes it.
    gradients = [torch.ones((), dtype=t.dtype, device=t.device).expand(t.shape) for t in roots]
    return [get_gradient_edge(t) for t in roots], gradients
