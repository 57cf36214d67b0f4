"""Steps in which an allocation may fail on one rank: all ranks hear of it, leave the step together, and none waits for ever.

While the guard is up, every collective is preceded by a small one in which ranks say whether they are still in the step.  A
rank whose allocation failed says no in the place of the collective it does not reach; the others then leave from where they
are.  So no rank starts a collective that another will not.  This costs a round trip per collective: a guard is for the
first steps under a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed
from deepspeed.comm import comm
from deepspeed.runtime.zero import parameter_offload

__all__ = ["Guard"]

T = TypeVar("T")

_COLLECTIVES = (
    "all_reduce", "inference_all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor",
    "all_gather", "all_gather_into_tensor", "all_gather_coalesced", "all_to_all", "all_to_all_single", "broadcast", "gather",
    "scatter", "barrier",
)  # fmt: skip


class _AnotherRankLeftError(Exception):
    """Raised in place of a collective."""


class Guard:
    """Of one engine; made once, by all ranks together, since it has a process group of its own."""

    def __init__(self) -> None:
        # On the host: a flag must not wait for the device.
        self._group = torch.distributed.new_group(backend="gloo")

    def together(self, run: Callable[[], T]) -> tuple[bool, T | None]:
        """Run ``run`` on all ranks; (False, None) on all of them if an allocation failed on any."""
        depth = len(parameter_offload.FWD_MODULE_STACK)
        result = None
        try:
            with self._asking_first():
                try:
                    result = run()
                    failed = False
                except torch.OutOfMemoryError:
                    failed = True
                    result = None
            passed = self._agree(failed=failed)
        except _AnotherRankLeftError:
            passed = False
        if passed:
            return True, result
        # Modules that were left in the middle of their forward.
        del parameter_offload.FWD_MODULE_STACK[depth:]
        return False, None

    def _agree(self, *, failed: bool) -> bool:
        flag = torch.tensor([int(failed)])
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX, group=self._group)
        return not flag.item()

    @contextmanager
    def _asking_first(self) -> Iterator[None]:
        backend = comm.cdb

        def asking(collective: Callable[..., Any]) -> Callable[..., Any]:
            def ask(*args: Any, **kwargs: Any) -> Any:
                if not self._agree(failed=False):
                    raise _AnotherRankLeftError
                return collective(*args, **kwargs)

            return ask

        before = dict(vars(backend))
        for name in _COLLECTIVES:
            setattr(backend, name, asking(getattr(backend, name)))
        try:
            yield
        finally:
            for name in _COLLECTIVES:
                if name in before:
                    setattr(backend, name, before[name])
                else:
                    delattr(backend, name)
