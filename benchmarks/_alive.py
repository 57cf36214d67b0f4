"""Count the bytes of tensors that are alive, on any device: what an allocator that wastes nothing would hold."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode


class Alive(TorchDispatchMode):
    """Inside, ``peak_bytes`` grows to the most that was alive at once; before it is entered, it is what is alive."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._now = 0
        self._sizes: dict[int, int] = {}
        gc.collect()
        # A tensor that pretends has a size and no memory.
        self._see(o for o in gc.get_objects() if isinstance(o, torch.Tensor) and not isinstance(o, FakeTensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator and count what it made."""
        out = func(*args, **(kwargs or {}))
        self._see(out if isinstance(out, (tuple, list)) else (out,))
        return out

    def _see(self, tensors: Any) -> None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if size and key not in self._sizes:
                    self._sizes[key] = size
                    self._now += size
                    weakref.finalize(storage, self._gone, key)
        self.peak_bytes = max(self.peak_bytes, self._now)

    def _gone(self, key: int) -> None:
        self._now -= self._sizes.pop(key, 0)
