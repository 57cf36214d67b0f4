"""One rank of one system: trains for some steps; rank 0 writes a JSON line of step seconds and losses.

Started by engine_overhead.py with one argument, a JSON object with the fields of `Request`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from _models import MODELS, GPTConfig, token_batches
from torch import Tensor, nn

Step = Callable[[list[Tensor]], Tensor]  # the micro-batches of one optimizer step; returns their mean loss


@dataclass(frozen=True)
class Request:
    """What to run: `config` is the DeepSpeed JSON, from which DDP too takes optimizer, clipping and batch sizes."""

    system: str
    kind: str
    """A key of `MODELS`."""
    model: dict[str, int]
    config: dict[str, Any]
    warmup: int
    steps: int
    seed: int


def deepspeed_step(model: nn.Module, config: dict[str, Any]) -> Step:
    """Stock DeepSpeed."""
    import deepspeed

    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return _engine_step(engine)


def ds_osdp_step(model: nn.Module, config: dict[str, Any]) -> Step:
    """DeepSpeed with the plan in the `osdp` section of the JSON."""
    try:
        from ds_osdp import initialize
    except ImportError as error:
        sys.exit(f"ds_osdp.initialize cannot be imported: {error}")
    engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=config)
    return _engine_step(engine)


def _engine_step(engine: Any) -> Step:
    def step(batches: list[Tensor]) -> Tensor:
        losses = []
        for ids in batches:
            loss = engine(ids=ids)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    return step


def ddp_step(model: nn.Module, config: dict[str, Any]) -> Step:
    """DistributedDataParallel of torch: one all-reduce per optimizer step, overlapped with backward."""
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    options = {name: value for name, value in config["optimizer"]["params"].items() if name != "torch_adam"}
    optimizer = torch.optim.AdamW(wrapped.parameters(), **options)

    def step(batches: list[Tensor]) -> Tensor:
        losses = []
        for i, ids in enumerate(batches):
            with nullcontext() if i == len(batches) - 1 else wrapped.no_sync():
                loss = wrapped(ids=ids)
                (loss / len(batches)).backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(wrapped.parameters(), config["gradient_clipping"])
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean()

    return step


SYSTEMS: dict[str, Callable[[nn.Module, dict[str, Any]], Step]] = {
    "deepspeed": deepspeed_step,
    "ds_osdp": ds_osdp_step,
    "ddp": ddp_step,
}


def train(request: Request) -> dict[str, list[float]]:
    """Run all steps; seconds of the steps after warm-up (the slowest rank's), losses of all (the ranks' mean)."""
    torch.manual_seed(request.seed)
    size = GPTConfig(**request.model)
    step = SYSTEMS[request.system](MODELS[request.kind](size), request.config)
    accumulate = request.config["gradient_accumulation_steps"]
    count = request.warmup + request.steps
    micro_batches = token_batches(
        size,
        count=count * accumulate,
        micro_batch=request.config["train_micro_batch_size_per_gpu"],
        seed=request.seed + 1 + dist.get_rank(),
    )
    losses, ends = [], []
    dist.barrier()
    for i in range(count):
        losses.append(step(micro_batches[i * accumulate : (i + 1) * accumulate]))
        # No barrier between steps: what a step leaves running is charged to the next one, not hidden by waiting.
        ends.append(time.perf_counter())
    seconds = torch.tensor(ends[request.warmup - 1 :], dtype=torch.float64).diff()
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    mean_losses = torch.stack(losses).double()
    dist.all_reduce(mean_losses)
    return {"step_seconds": seconds.tolist(), "losses": (mean_losses / dist.get_world_size()).tolist()}


def main() -> None:
    """Keep standard output for the result: DeepSpeed and the compilers that it starts write there too."""
    with os.fdopen(os.dup(1), "w") as result:
        os.dup2(2, 1)
        # The lab's links carry gloo; on a machine with GPUs DeepSpeed would choose them by itself.
        os.environ["DS_ACCELERATOR"] = "cpu"
        dist.init_process_group("gloo")
        measured = train(Request(**json.loads(sys.argv[1])))
        if dist.get_rank() == 0:
            print(json.dumps(measured), file=result, flush=True)
        dist.barrier()
    # Not through the interpreter's own end: gloo's threads may still hold tensors then, and abort the process at times.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
