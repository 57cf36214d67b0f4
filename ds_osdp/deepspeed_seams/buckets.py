"""One reduce bucket per partition group.

DeepSpeed has one bucket of gradients, and sends it off whenever the next gradient belongs to another group.  In backward,
groups alternate from parameter to parameter where a plan spreads some over a node and some over all ranks: many small
reduce-scatters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.zero.stage3 import IPGBucketZ3

__all__ = ["GroupBuckets"]

Buckets = dict[torch.dtype, Any]
"""DeepSpeed's: one bucket for each dtype in which it reduces."""


class GroupBuckets:
    """The buckets of one optimizer, by partition group; of ``reduce_bucket_size`` elements each, allocated whole."""

    def __init__(self, optimizer: Any, parameters: Sequence[Any]) -> None:
        """Make buckets for the groups of ``parameters``, those whose gradients DeepSpeed scatters in every micro-step."""
        self._optimizer = optimizer
        own: Buckets = optimizer.ipg_buckets
        groups = dict.fromkeys(id(p.ds_process_group) for p in parameters)
        # DeepSpeed's own stay also where nothing is scattered: it has allocated them, and memory is predicted with them.
        self._of_group = {group: _like(own) if i else own for i, group in enumerate(groups)} or {0: own}

    @contextmanager
    def of(self, parameter: Any) -> Iterator[None]:
        """Have DeepSpeed use the buckets of the parameter's group."""
        with self._in_use(self._of_group[id(parameter.ds_process_group)]):
            yield

    def drop(self) -> None:
        """Forget the gradients of a backward that ended before it had sent them."""
        for buckets in self._of_group.values():
            for bucket in buckets.values():
                for parameter in bucket.params:
                    parameter.grad = None
                bucket.clear_params()

    def for_each(self, method: Callable[[], None]) -> None:
        """Call a method of DeepSpeed's optimizer with the buckets of one group after the other."""
        for buckets in self._of_group.values():
            with self._in_use(buckets):
                method()

    @contextmanager
    def _in_use(self, buckets: Buckets) -> Iterator[None]:
        own = self._optimizer.ipg_buckets
        self._optimizer.ipg_buckets = buckets
        try:
            yield
        finally:
            self._optimizer.ipg_buckets = own


def _like(buckets: Buckets) -> Buckets:
    made = {}
    for dtype, bucket in buckets.items():
        made[dtype] = IPGBucketZ3()
        made[dtype].buffer = bucket.buffer if bucket.buffer is None else torch.empty_like(bucket.buffer)
    return made
