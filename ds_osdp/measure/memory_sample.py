"""What one real micro-step allocates and keeps, unit by unit.

In forward a dispatch mode sees what operators return.  No mode can be held from one hook to another in backward, for autograd
restores its own state around every node: there, what nodes take and give is all that is seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from ds_osdp.measure.fake import tensors_in
from ds_osdp.measure.memory import StorageLedger

__all__ = ["MemorySample"]


class MemorySample:
    """The ledger of one micro-step.  The observer says which unit is at work, and when anyone is."""

    def __init__(self, module: nn.Module, inputs: list[torch.Tensor], counting: Callable[[], bool]) -> None:
        self.outermost: nn.Module | None = None
        """The module call inside which operators are seen."""
        self.kept: Counter[int] = Counter()
        """Per unit, the bytes kept for backward."""
        self.transient: Counter[int] = Counter()
        self.backward_transient: Counter[int] = Counter()
        """Per unit, the most bytes alive during its work, beyond what it and the units before it keep."""
        self.output_bytes: Counter[int] = Counter()
        self.viewed: set[str] = set()
        """Parameters of which views are saved for backward."""
        self._module = module
        # Alive as long as their storages are told from others by address.
        self._inputs = inputs
        self._counting = counting
        self._ledger = StorageLedger(frozenset(), set(map(_storage, inputs)))
        self._operators = _Operators(self._made_by_operator)
        self._saved: saved_tensors_hooks | None = None

    def open(self, module: nn.Module, *, again: bool) -> None:
        """See every operator until ``module`` returns; ``again`` if it is computed again in backward."""
        self.outermost = module
        self._operators.__enter__()  # type: ignore[no-untyped-call]
        if not again:
            self._saved = saved_tensors_hooks(self._save, lambda tensor: tensor)
            self._saved.__enter__()

    def close(self) -> None:
        """``outermost`` returned."""
        if self._saved is not None:
            self._saved.__exit__()
            self._saved = None
        self._operators.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.outermost = None

    def enter(self, unit: int) -> None:
        """From now on ``unit`` is at work."""
        self._ledger.enter(unit)

    def returned(self, unit: int, outputs: Iterable[torch.Tensor]) -> None:
        """The forward of ``unit`` returned ``outputs``."""
        self.output_bytes[unit] += sum(tensor.numel() * tensor.element_size() for tensor in outputs)

    def begin_backward(self) -> None:
        """What is alive now is kept for it."""
        self.kept = self._ledger.end_forward()

    def taken(self, gradients: Iterable[Any]) -> None:
        """A node of the graph is about to run, on ``gradients``: sums are made between nodes."""
        self._ledger.made(filter(_is_dense, gradients))

    def given(self, gradients: Iterable[Any]) -> None:
        """A node of the graph returned ``gradients``."""
        if self._counting():
            self._ledger.made_by_node(filter(_is_dense, gradients))

    def accumulated(self, gradient: torch.Tensor) -> None:
        """The gradient of a parameter is complete."""
        if _is_dense(gradient):
            self._ledger.accumulated(gradient)

    def end(self) -> None:
        """The backward is over."""
        self.transient, self.backward_transient = self._ledger.peaks_beyond_kept()
        self._inputs = []

    def _made_by_operator(self, inputs: Any, outputs: Any) -> None:
        if self._counting():
            # A view of what was there before is not new: parameters, and what others made.
            known = set(map(_storage, filter(_is_dense, tensors_in(inputs))))
            self._ledger.made(t for t in tensors_in(outputs) if _is_dense(t) and _storage(t) not in known)

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        if _is_dense(tensor) and (self._ledger.knows(tensor) or not self._is_resident(tensor)):
            self._ledger.saved(tensor)
        return tensor

    def _is_resident(self, tensor: torch.Tensor) -> bool:
        # Asked anew each time: a gathered parameter has its storage for one use only.
        storage = _storage(tensor)
        for name, parameter in self._module.named_parameters():
            if _storage(parameter) == storage:
                # Torch's linear saves a weight transposed; what DeepSpeed trains saves the weight itself.
                shape, stride = parameter.shape, parameter.stride()
                if (tensor.shape, tensor.stride()) not in ((shape, stride), (shape[::-1], stride[::-1])):
                    self.viewed.add(name)
                return True
        return any(_storage(buffer) == storage for buffer in self._module.buffers())


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs every operator, and tells what it took and returned."""

    def __init__(self, seen: Callable[[Any, Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._seen((args, kwargs), out)
        return out


def _is_dense(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
