"""Measure what collectives cost, alone and beside computation, and put it in the terms of a cluster."""

from __future__ import annotations

import datetime
import math
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any, get_args

import numpy as np
import torch
import torch.distributed as dist

from ds_osdp.cluster import Cluster, Collectives, Device, Line, Link, Machines, Overlapped
from ds_osdp.errors import CalibrationError
from ds_osdp.measure.device import current_device, mean_seconds, measure_device, seconds_of, synchronize
from ds_osdp.prices import Operation, ring_terms

__all__ = ["SHORT", "THOROUGH", "Effort", "machines_of_this_job", "measure_cluster", "ranks_per_node"]

# torch 2.13 warns where the names are used that torch 2.6 has.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class Effort:
    """How thoroughly to measure."""

    sizes: tuple[int, ...]
    """Bytes of the whole tensor, ascending."""
    seconds: float
    """About how long all collectives may take together; longer if the smallest sizes take longer."""


SHORT = Effort(sizes=(4 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20), seconds=2.0)
"""When a job starts: gradients of a norm, a small layer, a layer, a bucket."""
THOROUGH = Effort(sizes=tuple(1 << k for k in range(10, 27, 2)), seconds=60.0)
"""1 KiB to 64 MiB."""

TIMEOUT_SECONDS = 60.0
"""How long ranks wait for one that does not come."""
_SECONDS_TO_NAME = 5.0
"""How long to look for who is missing, once something failed."""
_NEEDED_SIZES = 3
"""Measured even if the time is up: the two smallest may differ by less than the noise, and give no bandwidth."""
_LEAST_REPETITIONS, _MOST_REPETITIONS = 3, 20
_OVERLAPPED_SECONDS = 0.02
"""Small collectives run one behind the other for this long: beside one of them nothing could be computed."""
_MOST_IN_FLIGHT = 32
_UNDISTURBED_SECONDS = 0.03
_COMPUTED_SIDE = 256
"""Of the products that are computed beside a collective: a few milliseconds on a CPU, and long enough for a GPU's stream."""
_ENDLESS_BYTES_PER_SECOND = 1e15
"""Of a link nothing is sent over."""


def measure_cluster(machines: Machines, *, effort: Effort = SHORT, timeout_seconds: float = TIMEOUT_SECONDS) -> Cluster:
    """Measure this job's devices and links.  Every rank must call it; all get the same cluster.

    The links are those of the world and, where nodes hold several ranks and there are several nodes, of the ranks of a
    node and of one rank of every node; all nodes measure at once, as they work at once.  The slowest rank counts.

    Args:
        machines: as :func:`machines_of_this_job` says.
        effort: at which sizes, and for how long.
        timeout_seconds: how long to wait for a rank that does not come.

    Raises:
        CalibrationError: naming the rank that did not take part or finish.
    """
    device, dtype, ranks_per_node = _device(), getattr(torch, machines.dtype), machines.ranks_per_node
    with _groups(ranks_per_node) as groups, _Control(timeout_seconds) as control:
        control.meet("measuring the device")
        rates = _slowest_device(measure_device(dtype), device)
        seconds = effort.seconds / (len(groups) * len(get_args(Operation)))

        def measured(name: str) -> Collectives:
            links = {
                operation: _measure_link(
                    operation, groups[name], dtype, device, effort.sizes, seconds, partial(control.meet, f"{operation} {name}")
                )
                for operation in get_args(Operation)
            }
            return Collectives(**links)

        found = {name: measured(name) for name in groups}
    cluster = Cluster(
        name=f"{machines.world_size} ranks, {ranks_per_node} per node",
        ranks_per_node=ranks_per_node,
        device=rates,
        world=found[_WORLD],
        node=found.get(_NODE),
        across=found.get(_ACROSS),
        reduce_scatter_blocks=device.type != "cuda",
        source=f"measured over {machines.backend}, {machines.dtype}, on {_listed(machines.hosts)}",
        machines=machines,
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    )
    # Least squares may differ in the last digit between machines, and one digit is another plan.
    shared: list[Any] = [cluster.to_dict()]
    dist.broadcast_object_list(shared, src=0)
    return Cluster.from_dict(shared[0])


def machines_of_this_job(ranks_per_node: int, dtype: torch.dtype | None = None) -> Machines:
    """What the ranks of this job run on.  Every rank must call it; all get the same.

    Args:
        ranks_per_node: as :func:`ranks_per_node` says.
        dtype: of parameters and gradients.  Left out: bfloat16 on CUDA, float32 elsewhere.
    """
    hosts = _gathered(socket.gethostname())
    device = current_device()
    if dtype is None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return Machines(
        hosts=tuple(sorted(set(hosts))),
        world_size=len(hosts),
        ranks_per_node=ranks_per_node,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        backend=dist.get_backend(),
        dtype=str(dtype).removeprefix("torch."),
        torch=torch.__version__,
    )


def ranks_per_node() -> int:
    """Neighbouring ranks that share a node, as the launcher says or the hosts' names do.  Every rank must call it.

    If nodes hold different numbers of ranks, the most that divides all of them.
    """
    hosts = _gathered(socket.gethostname())
    said = next((os.environ[v] for v in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if os.environ.get(v, "").isdecimal()), "0")
    return math.gcd(*_gathered(int(said) or hosts.count(socket.gethostname())))


def _gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# -- groups


_WORLD, _NODE, _ACROSS = "over the world", "inside the nodes", "across the nodes"


@contextmanager
def _groups(ranks_per_node: int) -> Iterator[dict[str, dist.ProcessGroup | None]]:
    """The groups of this rank whose links differ, by name."""
    world = dist.get_world_size()
    groups: dict[str, dist.ProcessGroup | None] = {_WORLD: None}
    if 1 < ranks_per_node < world and world % ranks_per_node == 0:
        nodes = [list(range(first, first + ranks_per_node)) for first in range(0, world, ranks_per_node)]
        positions = [list(range(position, world, ranks_per_node)) for position in range(ranks_per_node)]
        groups[_NODE] = dist.new_subgroups_by_enumeration(nodes)[0]  # type: ignore[no-untyped-call]
        groups[_ACROSS] = dist.new_subgroups_by_enumeration(positions)[0]  # type: ignore[no-untyped-call]
    try:
        yield groups
    finally:
        for group in groups.values():
            if group is not None:
                dist.destroy_process_group(group)


class _Control:
    """Lets ranks meet before each measurement, and says who is missing when one does not come or does not finish."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout = datetime.timedelta(seconds=timeout_seconds)
        self._step = "starting"

    def __enter__(self) -> _Control:
        # Only gloo has a barrier that tells who is missing.
        self._group = dist.new_group(backend="gloo", timeout=self._timeout)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None:
            dist.destroy_process_group(self._group)
        elif isinstance(error, RuntimeError) and not isinstance(error, CalibrationError):
            # A collective failed: its text names an address at best.
            self._barrier(datetime.timedelta(seconds=_SECONDS_TO_NAME), "did not finish")
            raise CalibrationError(f"measuring links failed at {self._step}: {error}") from error

    def meet(self, step: str) -> None:
        """Wait for all ranks.

        Raises:
            CalibrationError: naming those that did not come.
        """
        self._step = step
        self._barrier(self._timeout, "did not take part")

    def _barrier(self, timeout: datetime.timedelta, what: str) -> None:
        try:
            dist.monitored_barrier(self._group, timeout=timeout, wait_all_ranks=True)
        except RuntimeError as error:
            named = re.search(r"[Rr]anks? ([\d, ]+) failed to pass", str(error))
            who = f"rank {named[1].strip()}" if named else "another rank (rank 0 says which)"
            within = f"{timeout.total_seconds():g} s"
            raise CalibrationError(
                f"{who} {what} in {self._step} within {within}: look at its log and its host, and start again"
            ) from error


# -- one collective


def _measure_link(
    operation: Operation,
    group: dist.ProcessGroup | None,
    dtype: torch.dtype,
    device: torch.device,
    sizes: Sequence[int],
    seconds: float,
    meet: Callable[[], None],
) -> Link:
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return Link(latency_seconds=0.0, bytes_per_second=_ENDLESS_BYTES_PER_SECOND)
    measured: list[int] = []
    alone: list[float] = []
    beside: list[float] = []
    held_up: list[float] = []
    deadline = time.perf_counter() + seconds
    for index, size in enumerate(sizes):
        if index >= _NEEDED_SIZES:
            # A collective's time grows at most in proportion to the tensor.
            expected = (2 + _LEAST_REPETITIONS) * alone[-1] * size / measured[-1]
            if not _agreed(int(time.perf_counter() + expected < deadline), device):
                break
        meet()
        call, size_bytes = _collective(operation, group, dtype, device, size)
        call(False)  # The first call of a size allocates and connects.
        taken = _slowest_seconds(call, _LEAST_REPETITIONS, device)
        share_of_time = (deadline - time.perf_counter()) / (len(sizes) - index) / 2
        more = min(int(share_of_time / np.median(taken)), _MOST_REPETITIONS - _LEAST_REPETITIONS)
        taken += _slowest_seconds(call, _agreed(max(more, 0), device), device)
        measured.append(size_bytes)
        alone.append(float(np.median(taken)))
        overlapped, held = _overlapped_seconds(call, alone[-1], device)
        beside.append(overlapped)
        held_up.append(held / alone[-1])
    line = _line(operation, ranks, measured, beside)
    # Of the larger ones: what a small one holds up is less than what can be told apart.
    share = float(np.median(held_up[-_NEEDED_SIZES:]))
    return Link(
        **_line(operation, ranks, measured, alone).model_dump(),
        overlapped=Overlapped(**line.model_dump(), computation_share=share),
    )


def _line(operation: Operation, ranks: int, sizes: Sequence[int], seconds: Sequence[float]) -> Line:
    """The ring terms of a collective that took ``seconds`` on whole tensors of ``sizes`` bytes."""
    fixed, per_byte = _fit(sizes, seconds)
    hops, share = ring_terms(operation, ranks)
    differences = [abs(fixed + per_byte * size - taken) / taken for size, taken in zip(sizes, seconds, strict=True)]
    return Line(
        latency_seconds=fixed / hops,
        bytes_per_second=share / per_byte if per_byte > 0 else _ENDLESS_BYTES_PER_SECOND,
        residual_percent=100 * float(np.mean(differences)),
    )


def _collective(
    operation: Operation, group: dist.ProcessGroup | None, dtype: torch.dtype, device: torch.device, size: int
) -> tuple[Callable[[bool], Any], int]:
    """A call of the collective on a tensor of ``size`` bytes, and the bytes it has after rounding up to equal parts.

    The call takes whether to return at once, with the work to wait for.
    """
    ranks = dist.get_world_size(group)
    part = torch.zeros(-(-size // (dtype.itemsize * ranks)), dtype=dtype, device=device)
    whole = torch.zeros(part.numel() * ranks, dtype=dtype, device=device)
    calls: dict[Operation, Callable[[bool], Any]] = {
        "all_gather": lambda begin: _all_gather(whole, part, group=group, async_op=begin),
        "reduce_scatter": lambda begin: _reduce_scatter(part, whole, group=group, async_op=begin),
        "all_reduce": lambda begin: dist.all_reduce(whole, group=group, async_op=begin),
    }
    return calls[operation], whole.numel() * dtype.itemsize


def _slowest_seconds(call: Callable[[bool], Any], repetitions: int, device: torch.device) -> list[float]:
    """Seconds of each repetition on the rank that took longest."""
    seconds = []
    for _ in range(repetitions):
        dist.barrier()
        seconds.append(seconds_of(lambda: call(False), device))
    return _slowest(seconds, device)


def _overlapped_seconds(call: Callable[[bool], Any], alone_seconds: float, device: torch.device) -> tuple[float, float]:
    """Seconds of a collective while all ranks compute, and by how many of them their computation was held up."""
    at_once = _agreed(min(_MOST_IN_FLIGHT, max(1, int(_OVERLAPPED_SECONDS / alone_seconds))), device)
    a, b = (torch.ones(_COMPUTED_SIDE, _COMPUTED_SIDE, device=device) for _ in range(2))
    product = torch.empty_like(a)

    def compute() -> None:
        torch.mm(a, b, out=product)

    dist.barrier()
    undisturbed = mean_seconds(compute, device, _UNDISTURBED_SECONDS)
    dist.barrier()
    synchronize(device)
    with ThreadPoolExecutor(max_workers=1) as pool:
        began = time.perf_counter()
        works = [call(True) for _ in range(at_once)]
        # Not every work tells whether it is done: one can only wait for it.
        ended = pool.submit(_finish, works, device)
        launched, computed = time.perf_counter(), 0
        while not ended.done():
            compute()
            synchronize(device)
            computed += 1
        held = max(0.0, time.perf_counter() - launched - computed * undisturbed)
        seconds = ended.result() - began
    # Ranks that share cores take turns: none is held up most all the time.
    return _slowest([seconds / at_once], device)[0], _mean(held / at_once, device)


def _finish(works: Sequence[Any], device: torch.device) -> float:
    for work in works:
        work.wait()
    synchronize(device)
    return time.perf_counter()


def _slowest(values: Sequence[float], device: torch.device) -> list[float]:
    """The largest of each value over all ranks."""
    slowest = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist()


def _mean(value: float, device: torch.device) -> float:
    total = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return float(total.item()) / dist.get_world_size()


def _agreed(number: int, device: torch.device) -> int:
    """The first rank's number: clocks differ, and a rank that repeats once more than the others waits for ever."""
    shared = torch.tensor([number], device=device)
    dist.broadcast(shared, src=0)
    return int(shared.item())


def _fit(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """The line ``fixed + per_byte * size`` with the least sum of relative differences from ``seconds``.

    Absolute differences, and not squares: one disturbed size must not bend the line.  Neither coefficient is negative.
    """
    x, t = np.asarray(sizes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    # The best line goes through two of the points, or through one with a coefficient of zero: a linear programme's vertex.
    lines = [(fixed, 0.0) for fixed in t] + [(0.0, per_byte) for per_byte in t / x]
    for i, j in combinations(range(len(x)), 2):
        if x[i] != x[j]:
            per_byte = (t[j] - t[i]) / (x[j] - x[i])
            lines.append((t[i] - per_byte * x[i], per_byte))
    possible = [(float(fixed), float(per_byte)) for fixed, per_byte in lines if fixed >= 0 and per_byte >= 0]
    return min(possible, key=lambda line: float(np.abs((line[0] + line[1] * x - t) / t).sum()))


def _slowest_device(rates: Device, device: torch.device) -> Device:
    slowest = torch.tensor([rates.flops_per_second, rates.bytes_per_second], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MIN)
    flops_per_second, bytes_per_second = slowest.tolist()
    return Device(flops_per_second=flops_per_second, bytes_per_second=bytes_per_second)


def _device() -> torch.device:
    """Where the collectives run."""
    if torch.cuda.is_available() and "nccl" in dist.get_backend_config():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _listed(hosts: Sequence[str]) -> str:
    shown = ", ".join(hosts[:4])
    return shown if len(hosts) <= 4 else f"{shown} and {len(hosts) - 4} more"
