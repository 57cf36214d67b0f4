"""Watch one forward and backward of a model, operator by operator, and count each with the unit at work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from ds_osdp.measure.at_work import UnitAtWork
from ds_osdp.measure.fake import ShapeRunner, tensors_in
from ds_osdp.measure.linear import deepspeed_linear
from ds_osdp.measure.memory import StorageLedger
from ds_osdp.measure.operators import flop_formula, moved_bytes
from ds_osdp.measure.units import viewed_bytes
from ds_osdp.profile import ParameterProfile, UnitProfile, Work

__all__ = ["Tracer"]


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
        resident = [*model.parameters(), *model.buffers()]
        self.ledger = StorageLedger(frozenset(t.untyped_storage()._cdata for t in resident))
        self._model = model
        self._parameters = {p.untyped_storage()._cdata: (name, p) for name, p in model.named_parameters()}
        self._viewed: set[str] = set()
        self._units = units
        self._runner = runner
        self._at_work = UnitAtWork(model, units, self.ledger.enter)
        self.order = self._at_work.order
        self._forward, self._backward = _Phase(), _Phase()
        self._kept: Counter[int] = Counter()
        self._output_bytes: Counter[str] = Counter()

    def run(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """One forward and, if anything is trainable, one backward."""
        for name in self._units:
            self._model.get_submodule(name).register_forward_hook(self._returned(name))
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]
        self.ledger.inputs.update(tensor.untyped_storage()._cdata for tensor in inputs.values())
        with self, deepspeed_linear(), saved_tensors_hooks(self._save, lambda tensor: tensor):
            output = self._model(**inputs)
        if not self.order:  # Parameters were used, and no unit's forward was called: all work is the first unit's.
            self.order.update(dict.fromkeys(self._units[:1], 0))
        edges, gradients = _backward_roots(output)
        # Only edges into the graph are held now: the outputs die here, as in a training loop that returns the loss.
        del output
        self._kept = self.ledger.end_forward()
        self._at_work.begin_backward()
        if edges:
            with self, deepspeed_linear():
                torch.autograd.backward(edges, gradients)

    def profiles(self, owned: Mapping[str, tuple[ParameterProfile, ...]]) -> Iterator[UnitProfile]:
        """What was seen, unit by unit."""
        in_forward, in_backward = self.ledger.peaks_beyond_kept()
        for name, index in self.order.items():
            yield UnitProfile(
                name=name,
                parameters=owned[name],
                forward=self._forward.work(index),
                backward=self._backward.work(index),
                activation_bytes=self._kept[index],
                transient_bytes=in_forward[index],
                backward_transient_bytes=in_backward[index],
                viewed_bytes=viewed_bytes(owned[name], self._viewed),
                output_bytes=self._output_bytes[name],
                recomputes=name in self._at_work.recomputed,
            )
        for name in owned:
            if name not in self.order:
                yield UnitProfile(name=name, parameters=owned[name])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # Asked many times per operator, and free.
            return func(*args, **kwargs)
        if self._at_work.in_backward:
            self._at_work.follow_autograd()
        inputs = tensors_in((args, kwargs))
        out = self._runner.run(func, args, kwargs, inputs)
        outputs = tensors_in(out)
        self.ledger.made(outputs)
        phase = self._backward if self._at_work.in_backward else self._forward
        packet = getattr(func, "overloadpacket", func)
        formula = flop_formula(packet)
        if formula is not None:
            phase.flops[self.ledger.unit] += formula(*args, **kwargs, out_val=out)
        elif outputs:
            mutates = isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable
            phase.moved[self.ledger.unit] += moved_bytes(packet, inputs, outputs, mutates)
        return out

    def _returned(self, name: str) -> Callable[..., None]:
        def returned(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if not self._at_work.in_backward:
                self._output_bytes[name] += sum(t.numel() * t.element_size() for t in tensors_in(output))

        return returned

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        name, parameter = self._parameters.get(tensor.untyped_storage()._cdata, ("", tensor))
        if (tensor.shape, tensor.stride()) != (parameter.shape, parameter.stride()):
            self._viewed.add(name)
        self.ledger.saved(tensor)
        return tensor

    @staticmethod
    def _accumulated(parameter: torch.Tensor) -> None:
        parameter.grad = None  # As in DeepSpeed, which reduces it and lets it go.


def _backward_roots(output: Any) -> tuple[list[GradientEdge], list[torch.Tensor]]:
    """Where backward starts, and with which gradients: at the loss, or else at the sum of all differentiable outputs."""
    loss = getattr(output, "loss", None)
    candidates = tensors_in(output if loss is None else loss)
    roots = [t for t in candidates if t.is_floating_point() and t.requires_grad]
    # The gradient of a sum is one everywhere: an expanded scalar, as autograd itself makes it.
    gradients = [torch.ones((), dtype=t.dtype, device=t.device).expand(t.shape) for t in roots]
    return [get_gradient_edge(t) for t in roots], gradients
