"""Count the bytes of every tensor that is alive, by kind and by moment, while something runs."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ds_osdp.measure.at_work import UnitAtWork
from ds_osdp.measure.fake import ShapeRunner, tensors_in

__all__ = ["MemoryMeter"]

_aten = torch.ops.aten
_KEPT, _REST = "activations", "other"


@dataclass(slots=True, eq=False)
class _Storage:
    nbytes: int
    kind: str
    reference: weakref.ref[torch.UntypedStorage] | None = None


class MemoryMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator, and through it every storage that is made; storages tell themselves when they die.

    What a storage is for is often known later than its birth (which ones outlive the forward, which gathered parameters are
    kept).  So births and deaths are written down, and added up when it is asked what was alive.
    """

    supports_higher_order_operators = True

    def __init__(self, runner: ShapeRunner | None, makers: Mapping[str, str]) -> None:
        """Begin to count.

        Args:
            runner: runs operators on shapes; None runs them on data.
            makers: the kind of what a Python module makes, by its name; of what no listed module makes, activations are what
                is alive at the end of a forward, and the rest is other.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.moment = "start"
        self._runner = runner
        self._makers = makers
        self._at_work: UnitAtWork | None = None
        self._alive: dict[int, _Storage] = {}
        self._events: list[tuple[str, _Storage, int]] = []
        """(moment, storage, change in bytes)"""

    @property
    def real(self) -> bool:
        """Whether tensors hold data."""
        return self._runner is None

    def follow(self, at_work: UnitAtWork) -> None:
        """Let ``at_work`` know which node of a backward is running."""
        self._at_work = at_work

    def enter(self, moment: str) -> None:
        """From now on it is ``moment``; what is alive now is alive in it too."""
        self.moment = moment
        self._events.append((moment, _NOTHING, 0))

    def made(self, tensors: Iterable[torch.Tensor], kind: str | None = None) -> None:
        """``tensors`` are alive, and what they are is ``kind``; None leaves it, or asks who has made them."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            known = self._alive.get(storage._cdata)
            if known is None:
                known = self._add(storage, kind or self._kind_of_maker())
            elif kind is not None:
                known.kind = kind

    def end_forward(self) -> None:
        """What is alive now, and is nothing else, is kept for backward."""
        for storage in self._alive.values():
            if storage.kind == _REST:
                storage.kind = _KEPT

    def forget(self) -> None:
        """Begin again with what is alive now."""
        self._events = [(self.moment, storage, storage.nbytes) for storage in self._alive.values()]

    def highest(self) -> dict[str, dict[str, int]]:
        """Bytes by kind where each moment needs most, in the order of the first time of each."""
        alive: Counter[str] = Counter()
        most: dict[str, int] = {}
        split: dict[str, dict[str, int]] = {}
        total = 0
        for moment, storage, change in self._events:
            alive[storage.kind] += change
            total += change
            if total > most.get(moment, -1):
                most[moment], split[moment] = total, {kind: size for kind, size in alive.items() if size}
        return split

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # Asked many times per operator, and free.
            return func(*args, **kwargs)
        if self._at_work is not None and self._at_work.in_backward:
            self._at_work.follow_autograd()
        out = func(*args, **kwargs) if self._runner is None else self._on_shapes(self._runner, func, args, kwargs)
        self.made(tensors_in(out))
        return out

    @staticmethod
    def _on_shapes(runner: ShapeRunner, func: Any, args: Any, kwargs: Any) -> Any:
        if func is _aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            # An engine looks at norms and flags.  One is a norm that is neither infinite nor clipped; zero is no overflow.
            return 1.0 if args[0].is_floating_point() else args[0].dtype is not torch.bool and 0
        return runner.run(func, args, kwargs, tensors_in((args, kwargs)))

    def _add(self, storage: torch.UntypedStorage, kind: str) -> _Storage:
        key = storage._cdata
        entry = _Storage(storage.nbytes(), kind)
        entry.reference = weakref.ref(storage, lambda _: self._died(key))
        self._alive[key] = entry
        self._events.append((self.moment, entry, entry.nbytes))
        return entry

    def _died(self, key: int) -> None:
        entry = self._alive.pop(key)
        self._events.append((self.moment, entry, -entry.nbytes))

    def _kind_of_maker(self) -> str:
        frame = sys._getframe(2)
        while frame is not None:
            kind = self._makers.get(frame.f_globals.get("__name__", ""))
            if kind is not None:
                return kind
            frame = frame.f_back  # type: ignore[assignment]
        return _REST


_NOTHING = _Storage(0, _REST)
