"""Count the bytes of tensors, where no device does."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Bytes of all tensors that are alive, looked at after every operation."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[Any]] = {}
        gc.collect()
        for thing in gc.get_objects():
            if isinstance(thing, torch.Tensor):
                self._see(thing)
        self.peak = self.now()

    def now(self) -> int:
        return sum(storage.nbytes() for ref in list(self._storages.values()) if (storage := ref()) is not None)

    def _see(self, tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor):
            storage = tensor.untyped_storage()
            key = id(storage)
            self._storages[key] = weakref.ref(storage, lambda _: self._storages.pop(key, None))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_iter(out):
            self._see(leaf)
        self.peak = max(self.peak, self.now())
        return out
