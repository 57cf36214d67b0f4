"""One rank: trains with its vocabulary projection in slices, by ds_osdp and by DeepSpeed's TiledLinear; rank 0 writes JSON.

Started by split.py with one argument, a JSON object with the fields of `Request`.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from _alive import Alive
from _models import GPTConfig, Projection, token_batches
from _rank import measure_on_this_rank
from deepspeed.runtime.zero.tiling import TiledLinear
from torch import nn

import ds_osdp
from ds_osdp.plan import Plan


@dataclass(frozen=True)
class Request:
    """What to run: `plans` are ds_osdp's, by number of slices, as JSON."""

    model: dict[str, int]
    config: dict[str, Any]
    plans: dict[str, Any]
    warmup: int
    steps: int
    repeats: int
    seed: int


def osdp_engine(request: Request, slices: int) -> Any:
    """Our way: the plan says how many slices."""
    with tempfile.TemporaryDirectory() as folder:
        path = [f"{folder}/plan.json"]
        dist.broadcast_object_list(path)  # one configuration on all ranks
        if dist.get_rank() == 0:
            Plan.from_dict(request.plans[str(slices)], "plan").save(path[0])
        dist.barrier()
        config = request.config | {"osdp": {"plan": path[0]}}
        model = Projection(GPTConfig(**request.model))
        return ds_osdp.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def tiled_engine(request: Request, slices: int) -> Any:
    """DeepSpeed's way: another module in the place of the projection."""
    model = Projection(GPTConfig(**request.model))
    if slices > 1:
        head: nn.Linear = model.head
        model.head = TiledLinear(head.in_features, head.out_features, bias=False, out_splits=slices, init_linear=head)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=request.config)[0]


ENGINES = {"osdp": osdp_engine, "tiled": tiled_engine}


def measure(request: Request, system: str, slices: int, *, peak: bool) -> dict[str, Any]:
    """Seconds of each step (the slowest rank's), losses (rank 0's) and, if asked for, the peak of another step."""
    torch.manual_seed(request.seed)
    before_bytes = Alive().peak_bytes  # DeepSpeed holds on to some of an engine that is destroyed
    engine = ENGINES[system](request, slices)
    count = request.warmup + request.steps + 1
    micro_batch = request.config["train_micro_batch_size_per_gpu"]
    batches = token_batches(GPTConfig(**request.model), count=count, micro_batch=micro_batch, seed=dist.get_rank())

    losses, ends = [], []
    for ids in batches[:-1]:
        losses.append(_step(engine, ids))
        ends.append(time.perf_counter())
    seconds = torch.tensor(ends[request.warmup - 1 :], dtype=torch.float64).diff()
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    result: dict[str, Any] = {"step_seconds": seconds.tolist(), "losses": losses}
    if peak:
        with Alive() as alive:
            _step(engine, batches[-1])
        most = torch.tensor(alive.peak_bytes - before_bytes)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        result["peak_bytes"] = int(most)
    engine.destroy()
    return result


def _step(engine: Any, ids: torch.Tensor) -> float:
    loss = engine(ids=ids)
    engine.backward(loss)
    engine.step()
    return float(loss)


def run(asked: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """All systems and numbers of slices in alternating order."""
    request = Request(**asked)
    rounds = [(system, int(slices)) for slices in request.plans for system in ENGINES]
    runs: dict[str, list[dict[str, Any]]] = {}
    for repeat in range(request.repeats):
        for system, slices in rounds[:: -1 if repeat % 2 else 1]:
            runs.setdefault(f"{system} {slices}", []).append(measure(request, system, slices, peak=repeat == 0))
    return runs


if __name__ == "__main__":
    measure_on_this_rank(run)
