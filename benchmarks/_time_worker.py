"""One rank of time_prediction.py: calibrates, observes each model, then times its optimizer steps under every plan.

Started with one argument, a JSON object with the fields of `Request`; rank 0 writes one JSON line.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from _models import GPT, GPTConfig, token_batches

from ds_osdp import measure

OBSERVED_STEPS = 8


@dataclass(frozen=True)
class Request:
    """What to run: sizes of GPTs by name, and the DeepSpeed JSON of each plan of each (without the cluster)."""

    models: dict[str, dict[str, int]]
    configs: dict[str, dict[str, dict[str, Any]]]
    warmup: int
    steps: int
    seed: int
    calibration_seconds: float


def time_steps(size: GPTConfig, config: dict[str, Any], request: Request) -> list[float]:
    """Seconds of each step after warm-up, on the slowest rank."""
    from ds_osdp import initialize  # it loads DeepSpeed, which writes to standard output

    torch.manual_seed(request.seed)
    model = GPT(size)
    engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=config)
    accumulate, count = config["gradient_accumulation_steps"], request.warmup + request.steps
    batches = token_batches(
        size,
        count=count * accumulate,
        micro_batch=config["train_micro_batch_size_per_gpu"],
        seed=request.seed + 1 + dist.get_rank(),
    )
    ends = []
    dist.barrier()
    for step in range(count):
        for ids in batches[step * accumulate : (step + 1) * accumulate]:
            engine.backward(engine(ids=ids))
            engine.step()
        # No barrier between steps: what a step leaves running is charged to the next one, not hidden by waiting.
        ends.append(time.perf_counter())
    engine.destroy()
    seconds = torch.tensor(ends[request.warmup - 1 :], dtype=torch.float64).diff()
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.tolist()


def observed_profile(size: GPTConfig, micro_batch: int, request: Request) -> dict[str, Any]:
    """The model's units with the seconds they take on this rank, while all ranks compute."""
    torch.manual_seed(request.seed)
    model = GPT(size)
    batches = token_batches(size, count=OBSERVED_STEPS, micro_batch=micro_batch, seed=request.seed + 1 + dist.get_rank())
    with measure.observe(model, micro_batch=micro_batch) as observer:
        for ids in batches:
            dist.barrier()
            model(ids=ids).backward()
            model.zero_grad()
    return observer.profile().to_dict()


def run(request: Request) -> dict[str, Any]:
    """Everything of one setting."""
    effort = replace(measure.THOROUGH, seconds=request.calibration_seconds)
    cluster = measure.measure_cluster(measure.machines_of_this_job(measure.ranks_per_node()), effort=effort)
    steps: dict[str, dict[str, list[float]]] = {}
    profiles = {}
    for name, sizes in request.models.items():
        micro_batch = next(iter(request.configs[name].values()))["train_micro_batch_size_per_gpu"]
        profiles[name] = observed_profile(GPTConfig(**sizes), micro_batch, request)
        steps[name] = {}
        for plan, config in request.configs[name].items():
            config["osdp"]["cluster"] = cluster.to_dict()
            steps[name][plan] = time_steps(GPTConfig(**sizes), config, request)
            if dist.get_rank() == 0:
                print(f"{name}, {plan}: {statistics.median(steps[name][plan]):.3f} s", file=sys.stderr, flush=True)
    return {"cluster": cluster.to_dict(), "profiles": profiles, "steps": steps}


def main() -> None:
    """Keep standard output for the result: DeepSpeed and the compilers that it starts write there too."""
    with os.fdopen(os.dup(1), "w") as result:
        os.dup2(2, 1)
        # The lab's links carry gloo; on a machine with GPUs DeepSpeed would choose them by itself.
        os.environ["DS_ACCELERATOR"] = "cpu"
        # Before all other programs, and with all threads, which inherit it: half a core that something else takes is a quarter
        # of the compute.
        os.setpriority(os.PRIO_PROCESS, 0, -20)
        dist.init_process_group("gloo")
        measured = run(Request(**json.loads(sys.argv[1])))
        if dist.get_rank() == 0:
            print(json.dumps(measured), file=result, flush=True)
        dist.barrier()
    # Not through the interpreter's own end: gloo's threads may still hold tensors then, and abort the process at times.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
