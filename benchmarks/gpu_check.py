"""What only a GPU can say: predicted memory beside CUDA's allocator, the time of a step without a network, and parity.

    python benchmarks/gpu_check.py --json
    python benchmarks/gpu_check.py --device cpu --quick    # a rehearsal: a small model, and no figure of a GPU

One CUDA device and about 6 minutes.  Three parts:

- memory: DeepSpeed's engine as rank 0 of 8 and of 64, on data, in every uniform stage and mixed; a model of 1 B parameters in
  bf16.  The predicted peak beside ``torch.cuda.max_memory_allocated``, and beside the bytes of tensors alive.
- time: a step as rank 0 of 8, whose collectives return at once, so that what is left is kernels and hooks: stock ZeRO-3 beside
  plans of one stage.  ``step_seconds`` is a whole step, ``host_seconds`` until Python has issued all of it, ``kernel_seconds``
  what the device worked (torch's profiler).
- parity: two ranks over gloo on the one device; losses of a mixed plan beside stock ZeRO-3.

Every measurement is a process of its own: the allocator forgets nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from _lab import (
    IN_PROPORTION,
    LOSS_TOLERANCE,
    MeasurementError,
    Setting,
    environment,
    loss_difference,
    plan_section,
    run_worker,
    training_config,
)
from _models import GPT, SHAPES, GPTConfig, token_batches
from memory_prediction import PLANS, compare, plan_named
from netlab import exit_on_signals

SIZES = {
    "cuda": {"layers": 16, "hidden": 2048, "heads": 16, "vocab": 50_304, "tokens": 1024},
    "cpu": {"layers": 2, "hidden": 64, "heads": 4, "vocab": 512, "tokens": 64},
}
"""1.0 B parameters, and a rehearsal's."""
WORLDS = (8, 64)
TIMED = ("stock", "stage 3", "stage 0", "mixed")
TIMED_WORLD, TIMED_STEPS, WARM_UP = 8, 10, 3
TIMEOUT_SECONDS = 240.0


def config(size: GPTConfig) -> dict[str, Any]:
    """bf16, with the sizes that Hugging Face gives to a model of this width."""
    sizes = {
        "reduce_bucket_size": size.hidden**2,
        "stage3_prefetch_bucket_size": int(0.9 * size.hidden**2),
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0,
    }
    return training_config(1, 2, sizes, bf16={"enabled": True})


def memory(size: GPTConfig, world: int, plan: str) -> dict[str, Any]:
    """Predicted and measured peak of one plan."""
    from ds_osdp.measure import Sample

    sample = Sample.from_config(_input(size), 1)
    row = compare(_empty_model(size), sample, config(size), torch.bfloat16, world, plan)
    measured = row["allocator_bytes"] or row["measured_bytes"]
    return {"world_size": world, "plan": plan, **row, "error_percent": 100 * (row["predicted_bytes"] / measured - 1)}


def step_times(size: GPTConfig, system: str) -> dict[str, Any]:
    """Seconds of a step that waits for nobody."""
    import deepspeed
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from ds_osdp import deepspeed_seams as seams
    from ds_osdp.job import job_from_config
    from ds_osdp.measure import Sample, profile_model

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(TIMED_WORLD))
    dist.init_process_group("fake", rank=0, world_size=TIMED_WORLD, store=FakeStore())
    model, asked = _empty_model(size), config(size)
    call = {"model": model, "model_parameters": list(model.parameters()), "config": asked}
    if system == "stock":
        engine = deepspeed.initialize(**call)[0]
    else:
        sample = Sample.from_config(_input(size), 1)
        profile = profile_model(model, sample, dtype=torch.bfloat16)
        plan = plan_named(system, profile, job_from_config(asked, TIMED_WORLD))
        with seams.applying(plan):
            engine = deepspeed.initialize(**call)[0]
        seams.attach(engine, plan)
    ids = token_batches(size, count=1, micro_batch=1, seed=0)[0].to(engine.device)
    wait = get_accelerator().synchronize

    def step() -> tuple[float, float]:
        wait()
        begin = time.perf_counter()
        for _ in range(asked["gradient_accumulation_steps"]):
            engine.backward(engine(ids=ids))
            engine.step()
        issued = time.perf_counter()
        wait()
        return issued - begin, time.perf_counter() - begin

    for _ in range(WARM_UP):
        step()
    timed = [step() for _ in range(TIMED_STEPS)]
    with torch.profiler.profile() as profiler:
        step()
    on_cuda = engine.device.type == "cuda"
    events = profiler.key_averages()
    kernels_us = sum(e.self_device_time_total if on_cuda else e.self_cpu_time_total for e in events)
    return {
        "system": system,
        "host_seconds": statistics.median(host for host, _ in timed),
        "step_seconds": statistics.median(whole for _, whole in timed),
        "kernel_seconds": kernels_us / 1e6,
        "every_step_seconds": [whole for _, whole in timed],
    }


def parity() -> dict[str, Any]:
    """Losses of two ranks that share the device, planned and stock.

    Raises:
        MeasurementError: gloo cannot do it there, or a rank failed.
    """
    size = SHAPES["wide-shallow"]
    rules = [{"match": "*.fc_in.*", "stage": 0}, {"match": "*.fc_out.*", "stage": 2}, {"match": "*.qkv.*", "stage": 1}]
    section = plan_section(size["tokens"], memory_budget="1GiB", rules=[*rules, {"match": "*", "stage": 3}])
    systems = {
        "stock": {"program": "deepspeed", "config": training_config(2, 2, IN_PROPORTION)},
        "mixed": {"program": "ds_osdp", "config": training_config(2, 2, IN_PROPORTION, osdp=section)},
    }
    found = run_worker(
        Setting(2, loopback=True),
        {"parity": {"kind": "gpt", "model": size, "systems": systems}},
        warmup=2,
        steps=3,
        passes=1,
        timeout_seconds=TIMEOUT_SECONDS,
        worker=Path(__file__).with_name("_gpu_rank.py"),
    )
    losses = {name: result["losses"] for name, result in found["cells"]["parity"].items()}
    return {"loss_difference": loss_difference(losses.values()), "losses": losses}


def _input(size: GPTConfig) -> Any:
    from ds_osdp.config import TensorSpec

    return {"ids": TensorSpec(shape=(size.tokens,))}


def _empty_model(size: GPTConfig) -> GPT:
    """A model of zeros: values do not matter, but must not be what happens to be in memory."""
    with torch.device("meta"):
        model = GPT(size)
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def _apart(part: str, *arguments: str, device: str) -> dict[str, Any]:
    """One measurement in a process of its own."""
    command = [sys.executable, __file__, "--device", device, "--part", part, *arguments]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS, env=variables)
    if done.returncode:
        sys.stderr.write(done.stderr[-4000:])
        raise SystemExit(f"gpu_check: could not measure {part}, {', '.join(arguments)}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(found, file=sys.stderr, flush=True)
    return found


def main() -> int:
    """Run the command line: 0 when measured, 2 where there is no such device, 1 when something could not be measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="end with the whole result as one line of JSON")
    parser.add_argument("--device", choices=SIZES, default="cuda")
    parser.add_argument("--quick", action="store_true", help="one world, two plans, two systems")
    parser.add_argument("--part", nargs="+", metavar=("PART", "ARGUMENT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    exit_on_signals()
    os.environ["DS_ACCELERATOR"] = arguments.device
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("gpu_check: there is no CUDA device here; --device cpu rehearses with a small model", file=sys.stderr)
        return 2
    if arguments.part:
        size = GPTConfig(**SIZES[arguments.device])
        part, *rest = arguments.part
        print(json.dumps(memory(size, int(rest[0]), rest[1]) if part == "memory" else step_times(size, rest[0])))
        return 0
    before = environment()
    worlds, plans, systems = (WORLDS[:1], PLANS[3:], TIMED[:2]) if arguments.quick else (WORLDS, PLANS, TIMED)
    rows = [_apart("memory", str(world), plan, device=arguments.device) for world in worlds for plan in plans]
    times = {system: _apart("time", system, device=arguments.device) for system in systems}
    try:
        losses = parity()
    except MeasurementError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 1
    result = {
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "none: a rehearsal on the CPU",
        "rows": len(rows),
        "worst_memory_error_percent": max(abs(row["error_percent"]) for row in rows),
        "stage3_over_stock": times["stage 3"]["step_seconds"] / times["stock"]["step_seconds"],
        "stage3_host_over_stock": times["stage 3"]["host_seconds"] / times["stock"]["host_seconds"],
        "losses_equal": losses["loss_difference"] <= LOSS_TOLERANCE,
        "loss_difference": losses["loss_difference"],
        "memory": rows,
        "time": times,
        "parity": losses["losses"],
        "environment": before,
        "configuration": config(GPTConfig(**SIZES[arguments.device])),
        "model": SIZES[arguments.device],
    }
    for name in list(result)[:7]:
        print(f"{name:28} {result[name]}")
    if arguments.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
