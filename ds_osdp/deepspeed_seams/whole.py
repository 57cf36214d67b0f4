"""Keep parameters whole between their uses (stages 0 to 2), though DeepSpeed's stage 3 frees what it has gathered.

DeepSpeed frees no parameter that a submodule is using, so the plan is entered among the users of what it keeps.  Only
where DeepSpeed frees everything, before an optimizer step and around a checkpoint, it forgets the users too; afterwards
the parameters are gathered again, in few coalesced all-gathers.  These are begun then and waited for at the first use in
the next forward, like a prefetch.  What this rank alone holds is not freed for a step: the step writes into it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

__all__ = ["WholeParameters", "through_partition"]

_USER = "osdp"
"""Stands beside the numbers of submodules in ``ds_active_sub_modules``."""


class WholeParameters:
    """The parameters of one engine that a plan keeps whole."""

    def __init__(self, parameters: Iterable[Any], optimized: Iterable[Any], in_flight: Any, *, bucket_bytes: int) -> None:
        """Take over ``parameters``, which DeepSpeed has partitioned.

        Args:
            parameters: what to keep whole.
            optimized: what the optimizer changes in a step.
            in_flight: DeepSpeed's registry of gathers that are under way.
            bucket_bytes: how much to gather together.
        """
        self.parameters = sorted(parameters, key=lambda p: int(p.ds_id))
        self._local = [p for p in self.parameters if p.ds_zero_partition_world_size == 1]
        spread = [p for p in self.parameters if p.ds_zero_partition_world_size > 1]
        changing = {p.ds_id for p in optimized}
        constant = [p for p in spread if p.ds_id not in changing]
        self._untouched = {p.ds_id for p in (*self._local, *constant)}
        self._buckets = _buckets([p for p in spread if p.ds_id in changing], bucket_bytes)
        self._buckets += _buckets(constant, bucket_bytes)
        self._in_flight = in_flight
        self.stepping = False
        for parameter in self.parameters:
            parameter.osdp_whole = self

    def gather(self) -> None:
        """Begin to make whole again what is not."""
        for parameter in self._local:
            if parameter.ds_status is ZeroParamStatus.NOT_AVAILABLE:
                _alias(parameter)
        for bucket in self._buckets:
            missing = [p for p in bucket if p.ds_status is ZeroParamStatus.NOT_AVAILABLE]
            if missing:
                handle = missing[0].all_gather_coalesced(missing)
                for parameter in missing:
                    self._in_flight[parameter] = handle
        self._hold()

    def wait(self, parameters: Iterable[Any]) -> None:
        """Wait for the gathers of ``parameters`` that are under way."""
        if self._in_flight:
            for parameter in parameters:
                handle = self._in_flight.pop(parameter, None)
                if handle is not None:
                    handle.wait()

    def provide(self, parameters: Iterable[Any]) -> None:
        """Have ``parameters`` whole now; every rank must call it."""
        if any(p.ds_status is ZeroParamStatus.NOT_AVAILABLE for p in parameters):
            self.gather()
        self.wait(parameters)

    def on_access(self, parameter: Any) -> None:
        """Have a parameter whole that is asked for, as far as one rank can by itself."""
        self.wait([parameter])
        if parameter.ds_zero_partition_world_size == 1 and parameter.ds_status is ZeroParamStatus.NOT_AVAILABLE:
            _alias(parameter)
            parameter.ds_active_sub_modules.add(_USER)

    @contextmanager
    def through_step(self) -> Iterator[None]:
        """During a step free what it changes, by :meth:`free_for_step`; afterwards gather it again."""
        self.stepping = True
        try:
            yield
        finally:
            self.stepping = False
        self.gather()

    def free_for_step(self, parameters: Iterable[Any]) -> None:
        """Free all ``parameters`` of the module but those that the step leaves alone or writes in place.

        What DeepSpeed's ``release_and_reset_all`` does to each.
        """
        for parameter in parameters:
            if parameter.ds_id in self._untouched:
                continue
            self.wait([parameter])
            parameter.ds_active_sub_modules.clear()
            if parameter.ds_status is ZeroParamStatus.AVAILABLE:
                parameter.partition()

    def forget(self) -> None:
        """Leave the parameters to whoever comes after this engine."""
        self.wait(self.parameters)
        for parameter in self.parameters:
            parameter.ds_active_sub_modules.discard(_USER)
            del parameter.osdp_whole
        self.parameters = []

    @contextmanager
    def left_in_flight(self) -> Iterator[None]:
        """Hide the gathers of these parameters from DeepSpeed, which waits for all that is in flight."""
        begun = {p: handle for p, handle in self._in_flight.items() if p.ds_status is ZeroParamStatus.INFLIGHT}
        ours = {p: handle for p, handle in begun.items() if getattr(p, "osdp_whole", None) is self}
        for parameter in ours:
            del self._in_flight[parameter]
        yield
        self._in_flight.update(ours)

    def _hold(self) -> None:
        for parameter in self.parameters:
            parameter.ds_active_sub_modules.add(_USER)


@contextmanager
def through_partition(parameters: Iterable[Any], whole: Iterable[Any]) -> Iterator[None]:
    """Keep the parameters ``whole`` while DeepSpeed partitions ``parameters``, of which they are some."""
    for parameter in parameters:
        parameter.ds_active_sub_modules.discard(_USER)
    kept = [(parameter, parameter.data) for parameter in whole]
    yield
    for parameter, data in kept:
        if parameter.ds_zero_partition_world_size == 1:
            _alias(parameter)
        else:
            _make_available(parameter, data)
        parameter.ds_active_sub_modules.add(_USER)


def _alias(parameter: Any) -> None:
    """Make a parameter available that this rank alone holds: the whole of it is its own part."""
    _make_available(parameter, parameter.ds_tensor.data.view(parameter.ds_shape))


def _make_available(parameter: Any, data: torch.Tensor) -> None:
    parameter.data = data
    parameter.ds_status = ZeroParamStatus.AVAILABLE


def _buckets(parameters: list[Any], bucket_bytes: int) -> list[list[Any]]:
    """Parameters that are gathered together: of one group and dtype, in the order of definition."""
    open_buckets: dict[tuple[int, torch.dtype], tuple[list[Any], int]] = {}
    buckets: list[list[Any]] = []
    for parameter in parameters:
        kind = (id(parameter.ds_process_group), parameter.ds_tensor.dtype)
        size = parameter.ds_numel_aligned * parameter.ds_tensor.element_size()
        bucket, filled = open_buckets.get(kind, ([], bucket_bytes))
        if filled + size > bucket_bytes:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(parameter)
        open_buckets[kind] = bucket, filled + size
    return buckets
