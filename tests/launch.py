"""Run a function of the tests on several ranks, each a process of its own, and bring back what rank 0 returns."""

from __future__ import annotations

import importlib
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def on_ranks(
    world_size: int, function: str, *args: Any, timeout: float = 280.0, environment: dict[str, str] | None = None
) -> Any:
    """``function`` ("module:name") called with ``args`` on every rank; the result of rank 0.

    A rank that fails ends the others, and its output is in the error.
    """
    with tempfile.TemporaryDirectory() as folder:
        call = Path(folder, "call")
        call.write_bytes(pickle.dumps((function, args)))
        port = free_port()
        ranks = [_start(folder, rank, world_size, port, environment) for rank in range(world_size)]
        deadline = time.monotonic() + timeout
        try:
            while None in [rank.poll() for rank in ranks] and not any(rank.returncode for rank in ranks):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)
            if any(rank.returncode for rank in ranks):
                time.sleep(1.0)  # let the others say what they saw
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        failed = [i for i, rank in enumerate(ranks) if rank.returncode]
        if failed:
            texts = (f"--- rank {i}\n{Path(folder, f'log{i}').read_text()[-6000:]}" for i in failed)
            raise AssertionError("\n".join([f"{function} failed on {len(failed)} of {world_size} ranks", *texts]))
        return pickle.loads(Path(folder, "result").read_bytes())


def each(calls: list[tuple[str, tuple[Any, ...]]]) -> list[Any]:
    """To be called on ranks: several functions one after the other, since starting ranks takes longest."""
    return [_named(function)(*args) for function, args in calls]


def _named(function: str) -> Any:
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)


def _start(folder: str, rank: int, world_size: int, port: int, environment: dict[str, str] | None) -> subprocess.Popen[bytes]:
    env = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent / "benchmarks"), os.environ.get("PYTHONPATH", "")]),
        "PYTHONWARNINGS": "ignore",
        "DS_OSDP_CACHE": folder,
        **(environment or {}),
    }
    with Path(folder, f"log{rank}").open("w") as output:
        command = [sys.executable, __file__, folder]
        return subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT, cwd=folder)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _main(folder: str) -> None:
    function, args = pickle.loads(Path(folder, "call").read_bytes())
    result = _named(function)(*args)
    if os.environ["RANK"] == "0":
        Path(folder, "result").write_bytes(pickle.dumps(result))
    import torch.distributed

    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    # gloo's threads sometimes abort a process that leaves in the ordinary way, after all is done.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    _main(sys.argv[1])
