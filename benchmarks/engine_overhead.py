"""Step times of ds_osdp beside stock ZeRO-3 and DDP, between hosts whose links are limited (see netlab.py).

    python benchmarks/engine_overhead.py --json [--rate 1gbit --hosts 2 --repeats 3 --steps 6] [--only a1 a4]

Comparisons, all in fp32 with the same model, data, AdamW and clipping:

- `stage3`, `stage2`, `stage1`: ds_osdp with every parameter at one stage does what stock ZeRO of that stage does, so it may
  not cost more;
- `a1`, `a4`: ds_osdp with every parameter at stage 0, with gradient accumulation 1 and 4, against DDP, which moves the least
  bytes that data parallelism can;
- `small`: a tower of 200 layers of width 64 with every parameter at stage 0, against stock ZeRO-3, on an unlimited network:
  what hooks and Python around small modules cost;
- `tunings_a1`, `tunings_a4`: every parameter at stage 0 against the fastest of the tunings that stock ZeRO-3 has.

The systems of a comparison live in one process per rank and take turns (A B C, C B A, ...), so that a drift of the machine
reaches all alike. A system's seconds are the median of its turns' medians. Differences below five per cent are noise; run it
on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from typing import Any

from _lab import (
    CLIPPING,
    LOSS_TOLERANCE,
    SEED,
    MeasurementError,
    Setting,
    environment,
    loss_difference,
    plan_section,
    run_worker,
    training_config,
)
from netlab import NetLabError, exit_on_signals

# DeepSpeed's default sizes are made for billions of parameters. A model as small as this one fits into one of its gradient
# buckets, so that nothing is reduced during backward, and into its live parameters, so that prefetching keeps what forward
# gathered and backward gathers nothing again. Stage 3 is compared at sizes that a large model would meet.
SHARDED = {"stage3_param_persistence_threshold": 0}
SMALL_BUCKETS = SHARDED | {"reduce_bucket_size": 2_000_000, "stage3_prefetch_bucket_size": 2_000_000}
GATHERED_TWICE = SMALL_BUCKETS | {"stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 6_000_000}
PERSISTENT = {"stage3_param_persistence_threshold": 10**12}


@dataclass(frozen=True)
class System:
    """A program of _systems.py, its `zero_optimization` section, and the stage ds_osdp pins every parameter to."""

    program: str
    zero: dict[str, int]
    stage: int | None = None


@dataclass(frozen=True)
class Comparison:
    """Systems that are run in turns, at one gradient accumulation."""

    accumulate: int
    systems: dict[str, System]
    ratios: dict[str, tuple[str, str]]
    """What it is made for: the seconds of the first system over those of the second."""
    tower: dict[str, int] | None = None
    """The size of a tower, instead of the GPT of the command line; then also without the lab's limits."""


ZERO1, ZERO2, ZERO3 = (System("deepspeed", {"stage": stage} | SMALL_BUCKETS) for stage in (1, 2, 3))
STAGE0 = System("ds_osdp", SMALL_BUCKETS, stage=0)
STOCK_TUNINGS = {
    "zero3_default": System("deepspeed", SHARDED),
    "zero3_small_buckets": System("deepspeed", SMALL_BUCKETS),
    "zero3_persistent": System("deepspeed", PERSISTENT),
}
TOWER = {"layers": 200, "hidden": 64, "heads": 1, "vocab": 64, "tokens": 16}


def _tunings(part: str, accumulate: int) -> Comparison:
    over = {f"{name}_over_stage0_{part}": (name, "osdp_stage0") for name in STOCK_TUNINGS}
    return Comparison(accumulate, {"osdp_stage0": STAGE0, **STOCK_TUNINGS}, over)


# ds_osdp goes first: where it does not run, there is nothing to compare.
COMPARISONS = {
    "stage3": Comparison(
        1,
        {"osdp_stage3": System("ds_osdp", GATHERED_TWICE, stage=3), "zero3": System("deepspeed", GATHERED_TWICE)},
        {"stage3_over_stock": ("osdp_stage3", "zero3")},
    ),
    "stage2": Comparison(
        1,
        {"osdp_stage2": System("ds_osdp", SMALL_BUCKETS, stage=2), "zero2": ZERO2},
        {"stage2_over_stock": ("osdp_stage2", "zero2")},
    ),
    "stage1": Comparison(
        1,
        {"osdp_stage1": System("ds_osdp", SMALL_BUCKETS, stage=1), "zero1": ZERO1},
        {"stage1_over_stock": ("osdp_stage1", "zero1")},
    ),
    "a1": Comparison(1, {"osdp_stage0": STAGE0, "ddp": System("ddp", {})}, {"stage0_over_ddp_a1": ("osdp_stage0", "ddp")}),
    "a4": Comparison(4, {"osdp_stage0": STAGE0, "ddp": System("ddp", {})}, {"stage0_over_ddp_a4": ("osdp_stage0", "ddp")}),
    "small": Comparison(
        1, {"osdp_stage0": STAGE0, "zero3": ZERO3}, {"small_layers_speedup": ("zero3", "osdp_stage0")}, tower=TOWER
    ),
    "tunings_a1": _tunings("a1", 1),
    "tunings_a4": _tunings("a4", 4),
}


def model_size(comparison: Comparison, arguments: argparse.Namespace) -> dict[str, int]:
    """The fields of `_models.GPTConfig`."""
    return comparison.tower or {name: getattr(arguments, name) for name in ("layers", "hidden", "heads", "vocab", "tokens")}


def deepspeed_config(system: System, comparison: Comparison, arguments: argparse.Namespace) -> dict[str, Any]:
    """The JSON the system is started with; DDP reads its batch sizes, optimizer and clipping from it."""
    more = {}
    if system.stage is not None:
        rules = [{"match": "*", "stage": system.stage}]
        more["osdp"] = plan_section(model_size(comparison, arguments)["tokens"], memory_budget="1GiB", rules=rules)
    zero = None if system.program == "ddp" else system.zero
    return training_config(arguments.micro_batch, comparison.accumulate, zero, **more)


def compare(part: str, arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Run the systems of one comparison in turns; by system, what `_worker.py` measured.

    Raises:
        MeasurementError: a rank failed.
    """
    comparison = COMPARISONS[part]
    cell = {
        "kind": "tower" if comparison.tower else "gpt",
        "model": model_size(comparison, arguments),
        "systems": {
            name: {"program": system.program, "config": deepspeed_config(system, comparison, arguments)}
            for name, system in comparison.systems.items()
        },
    }
    loopback = arguments.loopback or comparison.tower is not None
    found = run_worker(
        Setting(arguments.hosts, arguments.rate, arguments.ranks_per_host, loopback),
        {part: cell},
        warmup=arguments.warmup,
        steps=arguments.steps,
        passes=arguments.repeats,
        timeout_seconds=arguments.timeout_seconds,
    )
    systems: dict[str, dict[str, Any]] = found["cells"][part]
    return {name: {**result, "config": cell["systems"][name]["config"]} for name, result in systems.items()}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Make the comparisons asked for; the result holds the ratios first, then all they were made from."""
    parts = arguments.only or list(COMPARISONS)
    before = environment()
    runs = {part: compare(part, arguments) for part in parts}
    seconds = {
        part: {name: statistics.median(map(statistics.median, run["step_seconds"])) for name, run in runs[part].items()}
        for part in parts
    }
    difference = max(loss_difference(run["losses"] for run in runs[part].values()) for part in parts)
    return {
        **{
            name: seconds[part][above] / seconds[part][below]
            for part in parts
            for name, (above, below) in COMPARISONS[part].ratios.items()
        },
        "losses_equal": difference <= LOSS_TOLERANCE,
        "loss_difference": difference,
        "seconds": seconds,
        "environment": before,
        "settings": vars(arguments) | {"seed": SEED, "gradient_clipping": CLIPPING, "loss_tolerance": LOSS_TOLERANCE},
        "runs": runs,
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a short table")
    parser.add_argument("--only", choices=COMPARISONS, nargs="+", help="make these comparisons only (default: all)")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--rate", default="1gbit", help="limit of each host's link, each way, in tc's words")
    parser.add_argument("--loopback", action="store_true", help="no lab and no root; measures no network")
    parser.add_argument("--repeats", type=int, default=3, help="turns of every system")
    parser.add_argument("--warmup", type=int, default=2, help="steps not counted; ZeRO-3 records its trace in them")
    parser.add_argument("--steps", type=int, default=6, help="timed in each turn")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--timeout-seconds", type=float, default=900.0, help="limit of each comparison")
    arguments = parser.parse_args()
    if min(arguments.repeats, arguments.warmup, arguments.steps) < 1:
        parser.error("--repeats, --warmup and --steps must be at least 1")
    arguments.loopback |= arguments.hosts == 1
    if arguments.loopback:
        arguments.rate = None  # so that the settings in the result do not claim a limit
    return arguments


def main() -> int:
    """Run the command line: 0 when measured, 2 where there can be no lab, 1 when a run failed."""
    arguments = _arguments()
    exit_on_signals()
    try:
        result = measure(arguments)
    except NetLabError as error:
        print(f"engine_overhead: {error}", file=sys.stderr)
        return 2
    except MeasurementError as error:
        print(f"engine_overhead: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            if not isinstance(value, dict):
                print(f"{name:32} {value:.3g}" if isinstance(value, float) else f"{name:32} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
