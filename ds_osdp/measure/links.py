"""Measure what collectives cost and how fast a device computes, and put it in the terms of a cluster."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, get_args

import numpy as np
import psutil
import torch
import torch.distributed as dist

from ds_osdp.cluster import Cluster, Collectives, Device, Link
from ds_osdp.prices import Operation, ring_terms

__all__ = ["free_bytes", "measure_cluster", "measure_device"]

# torch 2.13 warns where the names are used that torch 2.6 has.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_SIZES = (4 << 10, 256 << 10, 4 << 20, 16 << 20)
"""Bytes of the whole tensor: gradients of a norm, a small layer, a layer, a bucket."""
_NEEDED_SIZES = 3
"""Measured even if the time is up: the two smallest may differ by less than the noise, and give no bandwidth."""
_LEAST_REPETITIONS, _MOST_REPETITIONS = 3, 20
_ENDLESS_BYTES_PER_SECOND = 1e15
"""Of a link nothing is sent over."""
_DEVICE_REPETITIONS = 5
_MATMUL_SECONDS = 0.01
"""A product that takes this long is bound by arithmetic, not by its launch."""
_MOST_MATMUL_SIDE = 8192
_STREAMED_BYTES = 128 << 20
"""More than the caches hold."""


def measure_cluster(
    group: dist.ProcessGroup | None = None,
    *,
    seconds: float = 2.0,
    ranks_per_node: int,
    dtype: torch.dtype | None = None,
) -> Cluster:
    """Measure this job's devices and links.  Every rank of ``group`` must call it; all get the same cluster.

    The slowest rank counts: each figure is the median of what it took.

    Args:
        group: an initialised process group, gloo or NCCL; None is the world.
        seconds: about how long to measure the three collectives; longer if the three smallest sizes take longer.
        ranks_per_node: as the caller knows it; kept in the result.
        dtype: of parameters and gradients.  Left out: bfloat16 on CUDA, float32 elsewhere.
    """
    device = _device(group)
    if dtype is None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rates = _slowest_device(measure_device(dtype), group, device)
    links = {operation: _measure_link(operation, group, dtype, device, seconds / 3) for operation in get_args(Operation)}
    hosts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    backend = dist.get_backend(group)
    cluster = Cluster(
        name=f"{len(hosts)} ranks, {ranks_per_node} per node",
        ranks_per_node=ranks_per_node,
        device=rates,
        world=Collectives(**links),
        reduce_scatter_blocks=device.type != "cuda",
        source=f"measured over {backend}, {str(dtype).removeprefix('torch.')}, on {_listed(sorted(set(hosts)))}",
    )
    # Least squares may differ in the last digit between machines, and one digit is another plan.
    shared: list[Any] = [cluster.to_dict()]
    dist.broadcast_object_list(shared, group=group, group_src=0)
    return Cluster.from_dict(shared[0])


def measure_device(dtype: torch.dtype) -> Device:
    """How fast this process's device multiplies matrices and streams memory, in about half a second.

    Args:
        dtype: of the matrices and of the streamed tensor.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    side, seconds = 256, _matmul_seconds(256, dtype, device)
    while seconds < _MATMUL_SECONDS and side < _MOST_MATMUL_SIDE:
        side *= 2
        seconds = _matmul_seconds(side, dtype, device)
    source = torch.ones(_STREAMED_BYTES // dtype.itemsize, dtype=dtype, device=device)
    target = torch.empty_like(source)
    stream = _median_seconds(lambda: torch.mul(source, 2, out=target), device)
    return Device(flops_per_second=2 * side**3 / seconds, bytes_per_second=2 * _STREAMED_BYTES / stream)


def free_bytes(ranks_per_node: int) -> int:
    """Bytes this rank can still allocate: of its CUDA device, or its share of the node's free memory."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    return int(psutil.virtual_memory().available) // ranks_per_node


def _measure_link(
    operation: Operation, group: dist.ProcessGroup | None, dtype: torch.dtype, device: torch.device, seconds: float
) -> Link:
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return Link(latency_seconds=0.0, bytes_per_second=_ENDLESS_BYTES_PER_SECOND)
    sizes: list[int] = []
    medians: list[float] = []
    deadline = time.perf_counter() + seconds
    for index, size in enumerate(_SIZES):
        if index >= _NEEDED_SIZES:
            # A collective's time grows at most in proportion to the tensor.
            expected = (1 + _LEAST_REPETITIONS) * medians[-1] * size / sizes[-1]
            if not _agreed(int(time.perf_counter() + expected < deadline), group, device):
                break
        call, size_bytes = _collective(operation, group, dtype, device, size)
        call()  # The first call of a size allocates and connects.
        taken = _slowest_seconds(call, _LEAST_REPETITIONS, group, device)
        share_of_time = (deadline - time.perf_counter()) / (len(_SIZES) - index)
        more = min(int(share_of_time / np.median(taken)), _MOST_REPETITIONS - _LEAST_REPETITIONS)
        taken += _slowest_seconds(call, _agreed(max(more, 0), group, device), group, device)
        sizes.append(size_bytes)
        medians.append(float(np.median(taken)))
    return _link(operation, ranks, sizes, medians)


def _link(operation: Operation, ranks: int, sizes: Sequence[int], seconds: Sequence[float]) -> Link:
    """The ring terms of a collective that took ``seconds`` on whole tensors of ``sizes`` bytes."""
    fixed, per_byte = _fit(sizes, seconds)
    hops, share = ring_terms(operation, ranks)
    return Link(
        latency_seconds=fixed / hops,
        bytes_per_second=share / per_byte if per_byte > 0 else _ENDLESS_BYTES_PER_SECOND,
    )


def _collective(
    operation: Operation, group: dist.ProcessGroup | None, dtype: torch.dtype, device: torch.device, size: int
) -> tuple[Callable[[], Any], int]:
    """A call of the collective on a tensor of ``size`` bytes, and the bytes it has after rounding up to equal parts."""
    ranks = dist.get_world_size(group)
    part = torch.zeros(-(-size // (dtype.itemsize * ranks)), dtype=dtype, device=device)
    whole = torch.zeros(part.numel() * ranks, dtype=dtype, device=device)
    calls: dict[Operation, Callable[[], Any]] = {
        "all_gather": lambda: _all_gather(whole, part, group=group),
        "reduce_scatter": lambda: _reduce_scatter(part, whole, group=group),
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
    }
    return calls[operation], whole.numel() * dtype.itemsize


def _slowest_seconds(
    call: Callable[[], Any], repetitions: int, group: dist.ProcessGroup | None, device: torch.device
) -> list[float]:
    """Seconds of each repetition on the rank that took longest."""
    seconds = []
    for _ in range(repetitions):
        dist.barrier(group)
        seconds.append(_seconds(call, device))
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return slowest.tolist()


def _agreed(number: int, group: dist.ProcessGroup | None, device: torch.device) -> int:
    """The first rank's number: clocks differ, and a rank that repeats once more than the others waits for ever."""
    shared = torch.tensor([number], device=device)
    dist.broadcast(shared, group=group, group_src=0)
    return int(shared.item())


def _fit(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """The line ``fixed + per_byte * size`` nearest to ``seconds``, relative to each; neither coefficient is negative."""
    x, t = np.asarray(sizes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    fixed, per_byte = np.linalg.lstsq(np.stack([1 / t, x / t], axis=1), np.ones_like(t), rcond=None)[0]
    # With two unknowns, a negative one is zero in the constrained optimum, and the other is fitted alone.
    if fixed < 0:
        fixed, per_byte = 0.0, (x / t).sum() / ((x / t) ** 2).sum()
    elif per_byte < 0:
        fixed, per_byte = (1 / t).sum() / ((1 / t) ** 2).sum(), 0.0
    return float(fixed), float(per_byte)


def _slowest_device(rates: Device, group: dist.ProcessGroup | None, device: torch.device) -> Device:
    slowest = torch.tensor([rates.flops_per_second, rates.bytes_per_second], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MIN, group=group)
    flops_per_second, bytes_per_second = slowest.tolist()
    return Device(flops_per_second=flops_per_second, bytes_per_second=bytes_per_second)


def _matmul_seconds(side: int, dtype: torch.dtype, device: torch.device) -> float:
    a, b = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
    product = torch.empty_like(a)
    return _median_seconds(lambda: torch.mm(a, b, out=product), device)


def _median_seconds(call: Callable[[], Any], device: torch.device) -> float:
    call()  # Warm up: first touch of memory, choice of a kernel.
    return float(np.median([_seconds(call, device) for _ in range(_DEVICE_REPETITIONS)]))


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    _synchronize(device)
    started = time.perf_counter()
    call()
    _synchronize(device)
    return time.perf_counter() - started


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Where the group's collectives run."""
    if torch.cuda.is_available() and "nccl" in dist.get_backend_config(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _listed(hosts: Sequence[str]) -> str:
    shown = ", ".join(hosts[:4])
    return shown if len(hosts) <= 4 else f"{shown} and {len(hosts) - 4} more"
