"""One rank of live_move.py: two engines in one process, one moved to a plan and one started under it, train in turns."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from _models import GPT, GPTConfig, token_batches
from _rank import measure_on_this_rank

import ds_osdp


def start(size: GPTConfig, config: dict[str, Any], stage: int) -> Any:
    torch.manual_seed(0)
    model = GPT(size)
    section = {"memory_budget": "2GiB", "rules": [{"match": "*", "stage": stage}], "replan": False}
    section["input"] = {"ids": {"shape": [size.tokens], "dtype": "int64"}}
    return ds_osdp.initialize(model=model, model_parameters=model.parameters(), config={**config, "osdp": section})[0]


def block(engine: Any, batches: list[torch.Tensor]) -> list[float]:
    """Seconds of one step on each batch, the slowest rank's."""
    ends = [time.perf_counter()]
    for ids in batches:
        engine.backward(engine(ids=ids))
        engine.step()
        ends.append(time.perf_counter())
    seconds = torch.tensor(ends, dtype=torch.float64).diff()
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.tolist()


def measure(request: dict[str, Any]) -> dict[str, Any]:
    size = GPTConfig(**request["model"])
    batches = token_batches(size, count=request["steps"], micro_batch=2, seed=dist.get_rank())
    moved, started = (start(size, request["config"], stage) for stage in (3, 0))
    block(moved, batches)
    moves = []
    back = moved.osdp.plan
    for plan in (started.osdp.plan, back, started.osdp.plan):
        dist.barrier()
        begin = time.perf_counter()
        moved.osdp.apply(plan)
        moves.append(time.perf_counter() - begin)
    seconds: dict[str, list[list[float]]] = {"moved": [], "started": []}
    for engine in (moved, started):
        block(engine, batches)  # ZeRO-3 records its trace
    for turn in range(request["turns"]):
        for name, engine in [("moved", moved), ("started", started)][:: -1 if turn % 2 else 1]:
            seconds[name].append(block(engine, batches))
    return {"step_seconds": seconds, "move_seconds": moves, "state_bytes": sum(ds_osdp.state_bytes(started).values())}


if __name__ == "__main__":
    measure_on_this_rank(measure)
