"""Count the bytes of tensors that are alive, on any device: what an allocator that wastes nothing would hold."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode


class Alive(TorchDispatchMode):
    """Inside, ``now_bytes`` is what is alive and ``peak_bytes`` the most that was; before, both are what is alive.

    What ``gc.freeze()`` has put aside is not counted, unless an operator works on it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_bytes = self.peak_bytes = 0
        self._sizes: dict[int, int] = {}
        gc.collect()
        for tensor in [o for o in gc.get_objects() if isinstance(o, torch.Tensor)]:
            self._see((tensor, tensor.grad) if tensor.is_leaf else (tensor,))

    def __enter__(self) -> Alive:
        """Begin to see operators, and storages that are resized: FSDP2 frees what it has gathered so."""
        resize = torch.UntypedStorage.resize_

        def seen(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._add(storage)
            return result

        torch.UntypedStorage.resize_ = seen  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        """See no more; deaths are still counted."""
        super().__exit__(*exc)
        del torch.UntypedStorage.resize_  # the base class has it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator and count what it made."""
        out = func(*args, **(kwargs or {}))
        self._see(out if isinstance(out, (tuple, list)) else (out,))
        return out

    def _see(self, tensors: Any) -> None:
        for tensor in tensors:
            tensor = getattr(tensor, "_local_tensor", tensor)  # a DTensor has no memory of its own
            # Neither has a tensor that pretends.
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, FakeTensor):
                self._add(tensor.untyped_storage())

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._sizes:
            self.now_bytes += size - self._sizes[key]
            self._sizes[key] = size
        elif size:
            self._sizes[key] = size
            self.now_bytes += size
            weakref.finalize(storage, self._gone, key)
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def _gone(self, key: int) -> None:
        self.now_bytes -= self._sizes.pop(key, 0)
