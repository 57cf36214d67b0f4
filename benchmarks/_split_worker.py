"""One rank: trains with its vocabulary projection in slices, by ds_osdp and by DeepSpeed's TiledLinear; rank 0 writes JSON.

Started by split.py with one argument, a JSON object with the fields of `Request`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from _alive import Alive
from _models import GPTConfig, Projection, token_batches
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


def main() -> None:
    """Keep standard output for the result: DeepSpeed and the compilers that it starts write there too."""
    with os.fdopen(os.dup(1), "w") as result:
        os.dup2(2, 1)
        os.environ["DS_ACCELERATOR"] = "cpu"  # the lab's links carry gloo
        dist.init_process_group("gloo")
        request = Request(**json.loads(sys.argv[1]))
        rounds = [(system, int(slices)) for slices in request.plans for system in ENGINES]
        runs: dict[str, list[dict[str, Any]]] = {}
        for repeat in range(request.repeats):
            for system, slices in rounds[:: -1 if repeat % 2 else 1]:
                run = measure(request, system, slices, peak=repeat == 0)
                runs.setdefault(f"{system} {slices}", []).append(run)
        if dist.get_rank() == 0:
            print(json.dumps(runs), file=result, flush=True)
        dist.barrier()
    # Not through the interpreter's own end: gloo's threads may still hold tensors then, and abort the process at times.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
