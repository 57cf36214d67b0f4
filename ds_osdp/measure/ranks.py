"""Join the ranks that a launcher started, or say which of them did not come."""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, and not in its __all__

from ds_osdp.errors import CalibrationError, ConfigError

__all__ = ["joined_ranks"]

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def joined_ranks(timeout_seconds: float) -> Iterator[int]:
    """A process group of the ranks described in the environment, as torchrun and deepspeed do; yields this rank.

    Raises:
        ConfigError: the environment describes no ranks.
        CalibrationError: naming the ranks that did not come in time.
    """
    missing = [name for name in _NEEDED if name not in os.environ]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not set: start it on all ranks, such as "
            "`torchrun --nproc_per_node 8 --module ds_osdp calibrate` or `deepspeed --module ds_osdp calibrate`"
        )
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = datetime.timedelta(seconds=timeout_seconds)
    store = _store(rank, world_size, timeout)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    yield rank
    dist.destroy_process_group()


def _store(rank: int, world_size: int, timeout: datetime.timedelta) -> PrefixStore:
    """The ranks' common store, once all of them have come to it."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # Under torchrun the store is served by the launcher.
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    seconds = timeout.total_seconds()
    try:
        tcp = TCPStore(host, port, is_master=serves, timeout=timeout, wait_for_workers=False)
    except RuntimeError as error:
        raise CalibrationError(f"no store at {host}:{port} within {seconds:g} s: is rank 0 running? ({error})") from error
    store = PrefixStore(f"ds_osdp-{os.environ.get('TORCHELASTIC_RUN_ID', '')}", tcp)
    present = [f"here-{r}" for r in range(world_size)]
    store.set(present[rank], socket.gethostname())
    try:
        store.wait(present, timeout)
    except RuntimeError as error:
        late = [str(r) for r, key in enumerate(present) if not store.check([key])]
        raise CalibrationError(
            f"rank {', '.join(late)} did not start within {seconds:g} s: look at its log and its host, and start again"
        ) from error
    return store
