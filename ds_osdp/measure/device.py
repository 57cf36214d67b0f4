"""How fast this rank's device computes, and how much it can hold."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import torch

from ds_osdp.cluster import Device

__all__ = ["current_device", "free_bytes", "mean_seconds", "measure_device", "median_seconds", "seconds_of", "synchronize"]

_RATE_SECONDS = 0.1
_PRODUCT_SECONDS, _PASS_SECONDS = 2e-3, 2.5e-4
"""What a product and an elementwise operator of a layer take, whatever the device: so large are those that are measured."""
_SMALLEST_SIDE, _SMALLEST_ELEMENTS = 256, 1 << 18
_LARGEST_SIDE, _LARGEST_ELEMENTS = 8192, 1 << 27


def measure_device(dtype: torch.dtype) -> Device:
    """How fast this process's device multiplies matrices and streams memory, in about half a second.

    To be called on all ranks at once: ranks that share a device's cores or memory then slow one another down as they do
    in training.

    Args:
        dtype: of the matrices and of the streamed tensor.
    """
    device = current_device()

    def product(side: int) -> Callable[[], Any]:
        a, b = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
        return lambda: a @ b

    def elementwise(elements: int) -> Callable[[], Any]:
        # With a new tensor for the result, as layers make them: on a CPU touching new memory costs more than the sum.
        a, b = (torch.ones(elements, dtype=dtype, device=device) for _ in range(2))
        return lambda: a + b

    side, elements = _SMALLEST_SIDE, _SMALLEST_ELEMENTS
    while side < _LARGEST_SIDE and median_seconds(product(side), device) < _PRODUCT_SECONDS:
        side *= 2
    while elements < _LARGEST_ELEMENTS and median_seconds(elementwise(elements), device) < _PASS_SECONDS:
        elements *= 2
    return Device(
        flops_per_second=2 * side**3 / mean_seconds(product(side), device, _RATE_SECONDS),
        bytes_per_second=3 * dtype.itemsize * elements / mean_seconds(elementwise(elements), device, _RATE_SECONDS),
    )


def current_device() -> torch.device:
    """The CUDA device of this process, or the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def free_bytes(ranks_per_node: int) -> int:
    """Bytes this rank can still allocate: of its CUDA device, or its share of the node's free memory."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    return int(psutil.virtual_memory().available) // ranks_per_node


def median_seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of ``call``, once it is warm."""
    call()  # First touch of memory, choice of a kernel.
    return float(np.median([seconds_of(call, device) for _ in range(3)]))


def mean_seconds(call: Callable[[], Any], device: torch.device, seconds: float) -> float:
    """Seconds of ``call``, repeated for ``seconds``: long enough for ranks that share cores to get in one another's way."""
    calls, taken = 0, 0.0
    while taken < seconds:
        taken += seconds_of(call, device)
        calls += 1
    return taken / calls


def seconds_of(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds until ``call`` and what it started on ``device`` are done."""
    synchronize(device)
    started = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - started


def synchronize(device: torch.device) -> None:
    """Wait for what was started on ``device``."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
