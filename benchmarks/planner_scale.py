"""How long planning takes: models of 12 to 10,000 layers, worlds of 8 to 16,384 ranks, and one of 300 different units.

    python benchmarks/planner_scale.py --json

Profiles are made here, not traced: this times the planner alone (pricing, building the model, solving it, placing units).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

from ds_osdp.cluster import DEFAULT_CLUSTER, Cluster
from ds_osdp.job import Job
from ds_osdp.plan import Stage
from ds_osdp.prices import Space
from ds_osdp.profile import ModelProfile, ParameterProfile, UnitProfile, Work
from ds_osdp.solve import fastest
from ds_osdp.step import Instance, evaluate, priced

LAYERS = (12, 96, 1_000, 10_000)
WORLDS = (8, 128, 2_048, 16_384)
BUDGET_SHARES = (0.25, 0.5, 0.75)
"""Of the way from the leanest uniform plan to the fastest."""
TIME_LIMIT_SECONDS = 2.8
TOKENS = 2048


def main() -> int:
    """Time every combination; print a table, or one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    cluster, space = Cluster.shipped(DEFAULT_CLUSTER), Space(tuple(Stage), node_degree=True)
    _plan(_gpt(12, 1024), cluster, 8, space, 0.5)  # imports and first use are no planning time
    rows = []
    for layers in LAYERS:
        profile = _gpt(layers, 1024)
        for world in WORLDS:
            rows.append(_row(f"GPT, {layers} layers", profile, cluster, world, space, arguments.repeats))
    rows.append(_row("300 different units", _different(300), cluster, 64, space, arguments.repeats))
    worst = {layers: max(row["seconds"] for row in rows if row["model"] == f"GPT, {layers} layers") for layers in LAYERS}
    summary = {
        "worst_seconds_by_layers": worst,
        "worst_gap_by_layers": {
            layers: max(row["worst_gap"] for row in rows if row["model"] == f"GPT, {layers} layers") for layers in LAYERS
        },
        "different_units_seconds": rows[-1]["seconds"],
        "different_units_gap": rows[-1]["worst_gap"],
        "rows": rows,
    }
    if arguments.json:
        print(json.dumps(summary))
    else:
        for row in rows:
            print(row)
    return 0


def _row(name: str, profile: ModelProfile, cluster: Cluster, world: int, space: Space, repeats: int) -> dict[str, Any]:
    """Median seconds of pricing and of solving, the slowest budget; the largest gap of any budget."""
    runs = {share: [_plan(profile, cluster, world, space, share) for _ in range(repeats)] for share in BUDGET_SHARES}
    slowest = max(statistics.median(run["build_and_solve_seconds"] for run in repeated) for repeated in runs.values())
    pricing = statistics.median(run["pricing_seconds"] for repeated in runs.values() for run in repeated)
    return {
        "model": name,
        "units": len(profile.units),
        "kinds": runs[0.5][0]["kinds"],
        "world_size": world,
        "pricing_seconds": pricing,
        "build_and_solve_seconds": slowest,
        "seconds": pricing + slowest,
        "worst_gap": max(run["gap"] for repeated in runs.values() for run in repeated),
    }


def _plan(profile: ModelProfile, cluster: Cluster, world: int, space: Space, share: float) -> dict[str, Any]:
    began = time.perf_counter()
    problem = priced(profile, cluster, _job(world), space)
    pricing = time.perf_counter() - began
    budget = _budget(problem, share)
    began = time.perf_counter()
    solution = fastest(problem, budget, time_limit_seconds=TIME_LIMIT_SECONDS, gap=0.0)
    seconds = time.perf_counter() - began
    assert solution is not None, "a budget above the leanest uniform plan is feasible"
    step = evaluate(problem, solution.choice).step_ns
    return {
        "pricing_seconds": pricing,
        "build_and_solve_seconds": seconds,
        "gap": max(0.0, (step - solution.bound_ns) / step),
        "kinds": len(problem.kinds),
    }


def _budget(problem: Instance, share: float) -> int:
    """Between all units replicated (option 0) and all fully sharded over the world."""
    sharded = [
        next(i for i, o in enumerate(problem.options(u)) if o.stage is Stage.FULLY_SHARDED) for u in range(len(problem.units))
    ]
    least, most = (evaluate(problem, choice).peak_bytes for choice in (sharded, [0] * len(sharded)))
    return int(least + share * (most - least))


def _job(world: int) -> Job:
    return Job(
        world_size=world,
        micro_batch=1,
        accumulation=4,
        parameter_dtype="bfloat16",
        gradient_dtype="bfloat16",
        communication_dtype="bfloat16",
        optimizer_states=2,
        reduce_bucket_size=50_000_000,
        prefetch_bucket_size=5_000_000,
        max_live_parameters=10**9,
        max_reuse_distance=0,
        sub_group_size=10**9,
    )


def _unit(name: str, *shape: int) -> UnitProfile:
    weight = ParameterProfile(name=f"{name}.weight", shape=shape, dtype="bfloat16", trainable=True)
    product = len(shape) > 1
    flops = 2 * TOKENS * weight.numel if product else 0
    moved = 0 if product else 4 * TOKENS * weight.numel
    return UnitProfile(
        name=name,
        parameters=(weight,),
        forward=Work(flops=flops, bytes_moved=moved),
        backward=Work(flops=2 * flops, bytes_moved=2 * moved),
        activation_bytes=2 * TOKENS * shape[-1],
        transient_bytes=2 * TOKENS * shape[0],
    )


def _gpt(layers: int, hidden: int) -> ModelProfile:
    """GPT-like: embeddings, layers of six units, a norm and the output projection."""
    units = [_unit("wte", 32_000, hidden), _unit("wpe", TOKENS, hidden)]
    for i in range(layers):
        shapes = {"ln_1": (hidden,), "qkv": (3 * hidden, hidden), "proj": (hidden, hidden), "ln_2": (hidden,)}
        shapes |= {"fc_in": (4 * hidden, hidden), "fc_out": (hidden, 4 * hidden)}
        units += [_unit(f"h.{i}.{name}", *shape) for name, shape in shapes.items()]
    units += [_unit("ln_f", hidden), _unit("head", 32_000, hidden)]
    return ModelProfile(model="GPT", micro_batch=1, sample="ids", units=tuple(units))


def _different(number: int) -> ModelProfile:
    """No two units alike: nothing can be counted together."""
    units = [_unit(f"u{i}", 512 + 37 * i % 4096 + i, 512 + 53 * i % 2048) for i in range(number)]
    return ModelProfile(model="Different", micro_batch=1, sample="x", units=tuple(units))


if __name__ == "__main__":
    sys.exit(main())
