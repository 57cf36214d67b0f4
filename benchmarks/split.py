"""A vocabulary projection in slices: ds_osdp beside DeepSpeed's TiledLinear, between hosts with limited links (netlab.py).

    python benchmarks/split.py --json [--rate 1gbit --repeats 4 --steps 6]

Both train the same model from the same weights, with its projection in k = 1, 2, 4 and 8 slices and all else fully sharded, at
the same communication sizes. `peak_bytes` are tensors alive at once, on the rank that holds most; `step_seconds` the median of
all steps of runs that alternate. `noise` is by how much the medians differ where both run the same, unsplit: as much decides
nothing. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from _lab import LOSS_TOLERANCE, SEED, environment, loss_difference
from _models import GPTConfig, Projection
from netlab import NetLab, NetLabError, RanksFailedError, exit_on_signals, run_ranks

from ds_osdp.cluster import Cluster
from ds_osdp.config import OsdpConfig, Rule, TensorSpec
from ds_osdp.job import job_from_config
from ds_osdp.measure import profile_for
from ds_osdp.plan import Plan, Stage
from ds_osdp.planner import make_plan

WORKER = Path(__file__).with_name("_split_worker.py")
SLICES = (1, 2, 4, 8)
FREED_SLICE_BYTES = 4  # one element stays of a freed slice, for autograd to compare shapes


def deepspeed_config(arguments: argparse.Namespace) -> dict[str, Any]:
    """The JSON of both."""
    return {
        "train_micro_batch_size_per_gpu": arguments.micro_batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        # Without states and temporaries, so that no other moment is the peak.
        "optimizer": {"type": "SGD", "params": {"lr": 1e-2}},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "reduce_bucket_size": 2_000_000,
            "stage3_prefetch_bucket_size": arguments.prefetch,
            "stage3_max_reuse_distance": 0,
        },
    }


def plans(config: dict[str, Any], size: GPTConfig, world_size: int) -> dict[str, Any]:
    """All fully sharded, the projection in so many slices."""
    job = job_from_config(config, world_size)
    section = OsdpConfig(input={"ids": TensorSpec(shape=(size.tokens,))})
    profile = profile_for(section, Projection(size), job)
    sharded = [Rule(match="*", stage=Stage.FULLY_SHARDED)]
    plan = make_plan(profile, Cluster.shipped("a100-80g-8x-200g"), job, 1 << 40, rules=sharded)

    def with_slices(slices: int) -> Plan:
        units = [u.model_copy(update={"slices": slices}) if u.name == "head" else u for u in plan.units]
        return plan.model_copy(update={"units": tuple(units)})

    return {str(slices): with_slices(slices).to_dict() for slices in SLICES}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run both for every number of slices."""
    size = GPTConfig(**{name: getattr(arguments, name) for name in ("layers", "hidden", "vocab", "tokens")}, heads=1)
    config = deepspeed_config(arguments)
    request = {
        "model": vars(size),
        "config": config,
        "plans": plans(config, size, arguments.hosts),
        **{name: getattr(arguments, name) for name in ("warmup", "steps", "repeats")},
        "seed": SEED,
    }
    before = environment()
    lab = None if arguments.loopback else NetLab(arguments.hosts, arguments.rate)
    with lab or nullcontext(), tempfile.TemporaryFile() as output:
        command = [sys.executable, str(WORKER), json.dumps(request)]
        run_ranks(command, world=arguments.hosts, lab=lab, stdout=output, timeout_seconds=arguments.timeout_seconds)
        output.seek(0)
        runs: dict[str, list[dict[str, Any]]] = json.loads(output.read().splitlines()[-1])
    seconds = {name: statistics.median(s for run in of for s in run["step_seconds"]) for name, of in runs.items()}
    ratios = {k: seconds[f"osdp {k}"] / seconds[f"tiled {k}"] for k in SLICES}
    noise = abs(ratios[1] - 1)
    peaks = {name: of[0]["peak_bytes"] for name, of in runs.items()}
    difference = loss_difference(run["losses"] for of in runs.values() for run in of)
    return {
        "by_slices": {
            str(k): {
                system: {"peak_bytes": peaks[f"{system} {k}"], "step_seconds": seconds[f"{system} {k}"]}
                for system in ("osdp", "tiled")
            }
            for k in SLICES
        },
        "never_slower": all(ratio <= 1 + noise for ratio in ratios.values()),
        "never_larger": all(peaks[f"osdp {k}"] <= peaks[f"tiled {k}"] + k * FREED_SLICE_BYTES for k in SLICES),
        "worst_time_ratio": max(ratios.values()),
        "noise": noise,
        "losses_equal": difference <= LOSS_TOLERANCE,
        "loss_difference": difference,
        "environment": before,
        "settings": vars(arguments) | {"seed": SEED, "loss_tolerance": LOSS_TOLERANCE},
        "config": config,
        "runs": runs,
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a short table")
    parser.add_argument("--hosts", type=int, default=2, help="of one rank each")
    parser.add_argument("--rate", default="1gbit", help="limit of each host's link, each way, in tc's words")
    parser.add_argument("--loopback", action="store_true", help="no lab and no root; measures no network")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=2, help="steps not counted; ZeRO-3 records its trace in them")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--prefetch", type=int, default=0, help="stage3_prefetch_bucket_size, in elements")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=32_768)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--timeout-seconds", type=float, default=600.0)
    arguments = parser.parse_args()
    if min(arguments.repeats, arguments.warmup, arguments.steps) < 1:
        parser.error("--repeats, --warmup and --steps must be at least 1")
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
        print(f"split: {error}", file=sys.stderr)
        return 2
    except RanksFailedError as error:
        print(f"split: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(result))
    else:
        for slices, systems in result["by_slices"].items():
            for system, row in systems.items():
                print(f"{slices:>2} slices, {system:5}: {row['step_seconds']:.3f} s, {row['peak_bytes'] / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
