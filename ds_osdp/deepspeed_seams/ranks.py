"""What ranks do together before there is an engine: agree, or fail together, but never wait for one another for ever."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

import deepspeed
import deepspeed.comm as dist
import torch.distributed
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import log_dist

from ds_osdp.errors import OsdpError, RankMismatchError
from ds_osdp.frozen import fingerprint

__all__ = [
    "broadcast_from_rank_zero",
    "gather_from_all_ranks",
    "init_distributed",
    "least_of_all_ranks",
    "log_on_rank_zero",
    "most_memory_held",
    "on_every_rank",
    "same_on_every_rank",
]

T = TypeVar("T")


def init_distributed(**options: Any) -> tuple[int, int]:
    """Join the process group as ``deepspeed.initialize`` would, if that has not been done; returns (rank, ranks)."""
    accelerator = get_accelerator()
    backend = accelerator.communication_backend_name()
    deepspeed.init_distributed(dist_backend=backend, **{k: v for k, v in options.items() if v is not None})
    if not accelerator.is_synchronized_device() and "LOCAL_RANK" in os.environ:
        # Collectives on objects use the current device, which DeepSpeed sets only when it makes the engine.
        accelerator.set_device(int(os.environ["LOCAL_RANK"]))
    return dist.get_rank(), dist.get_world_size()


def on_every_rank(step: Callable[[], T]) -> T:
    """Run ``step`` on every rank; if it fails on any, all raise.

    Raises:
        OsdpError: this rank's own error, or :class:`RankMismatchError` with that of the first rank that failed.
    """
    problem: OsdpError | None = None
    try:
        value = step()
    except OsdpError as error:
        problem = error
    problems = gather_from_all_ranks(None if problem is None else str(problem))
    if problem is not None:
        raise problem
    for rank, text in enumerate(problems):
        if text is not None:
            raise RankMismatchError(f"rank {rank} fails: {text}")
    return value


def same_on_every_rank(what: str, value: dict[str, Any]) -> None:
    """Check that ``value`` is the same on all ranks.

    Raises:
        RankMismatchError: on all ranks, naming the keys of ``what`` that differ, and on which rank.
    """
    everyone = gather_from_all_ranks({key: fingerprint(repr(part)) for key, part in value.items()})
    for rank, other in enumerate(everyone):
        keys = sorted(key for key in everyone[0].keys() | other.keys() if everyone[0].get(key) != other.get(key))
        if keys:
            raise RankMismatchError(
                f"{what} of rank {rank} differs from rank 0's in {', '.join(map(repr, keys))}: start all ranks with the same"
            )


def broadcast_from_rank_zero(make: Callable[[], T]) -> T:
    """The value rank 0 makes, on every rank; if rank 0 fails, all raise.

    Raises:
        OsdpError: what rank 0 raised.
    """
    box: list[Any] = [None, None]
    problem: Exception | None = None
    if dist.get_rank() == 0:
        try:
            box = [make(), None]
        except OsdpError as error:
            problem, box = error, [None, error]
        except Exception as error:
            # Not one of ours, and perhaps not to be pickled: the others learn its text, rank 0 shows where it was.
            problem, box = error, [None, OsdpError(f"rank 0 could not plan: {type(error).__name__}: {error}")]
    torch.distributed.broadcast_object_list(box, src=0)
    if problem is not None:
        raise problem
    if box[1] is not None:
        raise box[1]
    return box[0]  # type: ignore[no-any-return]


def least_of_all_ranks(value: int) -> int:
    """The smallest ``value`` of any rank, on all ranks."""
    return min(gather_from_all_ranks(value))


def log_on_rank_zero(message: str) -> None:
    """Write ``message`` to DeepSpeed's log, once per job."""
    # DeepSpeed's logger shows nothing below a warning, and users are to see what their model is planned as.
    log_dist(message, ranks=[0], level=logging.WARNING)


def gather_from_all_ranks(value: T) -> list[T]:
    """``value`` of every rank, in the order of ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def most_memory_held() -> int | None:
    """Bytes of this rank's tensors on its device, the most since the last call; None where the device does not count them."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return None  # It tells the size of the process, of which tensors may be the smaller part.
    held = int(accelerator.max_memory_allocated())
    accelerator.reset_peak_memory_stats()
    return held
