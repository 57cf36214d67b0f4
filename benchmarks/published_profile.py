"""The planner on the profile published with the OSDP paper, beside the paper's own search.

    python benchmarks/published_profile.py --json [--cases FILE]

The paper's code (Jiang et al., IJCAI 2023) profiles a transformer layer with four options: all replicated, attention
sharded, MLP sharded, both sharded.  A case asks for the fastest option per layer within a device's memory.  Its search is a
dynamic program over layers and mebibytes, with memory truncated to whole mebibytes, so that it can exceed the device; it is
written again here, and both run on every case.  A case file lists cases with their proven optima.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from ds_osdp.plan import Stage
from ds_osdp.prices import Option, Price
from ds_osdp.solve import fastest
from ds_osdp.step import Instance, Kind, Live, Window, evaluate

DATA = Path(__file__).resolve().parent / "data"
UNITS_PER_MIB = 100
"""The profile gives memory in hundredths of a mebibyte: integers here."""
RELATIVE = 1e-6


def main() -> int:
    """Run every case with both; print a table, or one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=Path, default=DATA / "published_profile_optima.json")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    profile = json.loads((DATA / "published_profile.json").read_text())
    cases = json.loads(arguments.cases.read_text())["cases"]
    if not cases:
        print(f"{arguments.cases} has no cases", file=sys.stderr)
        return 1
    fastest(_instance(profile, cases[0]), 1, time_limit_seconds=10, gap=0.0)  # imports and first use are no planning time
    rows = [_run(profile, case) for case in cases]
    speedups = [row["published_seconds"] / row["planner_seconds"] for row in rows]
    summary = {
        "cases": len(rows),
        "optimal": sum(row["optimal"] for row in rows),
        "violated": sum(row["violated"] for row in rows),
        "published_violated": sum(row["published_violated"] for row in rows),
        "planner_seconds_median": statistics.median(row["planner_seconds"] for row in rows),
        "planner_seconds_median_feasible": statistics.median(
            [row["planner_seconds"] for row in rows if row["step_seconds"] is not None] or [0.0]
        ),
        "published_seconds_median": statistics.median(row["published_seconds"] for row in rows),
        "speedup_over_published_median": statistics.median(speedups),
        "speedup_over_published_median_feasible": statistics.median(
            [s for s, row in zip(speedups, rows, strict=True) if row["step_seconds"] is not None] or [0.0]
        ),
        "rows": rows,
    }
    if arguments.json:
        print(json.dumps(summary))
    else:
        for row in rows:
            print(row)
        print({key: value for key, value in summary.items() if key != "rows"})
    return 0


def _run(profile: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    problem, budget = _instance(profile, case), _budget(profile, case)
    began = time.perf_counter()
    solution = fastest(problem, budget, time_limit_seconds=60, gap=0.0)
    planner_seconds = time.perf_counter() - began
    found = evaluate(problem, solution.choice) if solution else None
    began = time.perf_counter()
    published = _published_search(profile, case)
    published_seconds = time.perf_counter() - began
    step_seconds = found.step_ns / 1e9 if found else None
    wanted = case["optimal_seconds"] if case["feasible"] else None
    optimal = step_seconds == wanted if None in (step_seconds, wanted) else abs(step_seconds - wanted) <= RELATIVE * wanted
    return {
        "case": {key: case[key] for key in ("layers", "hidden", "device_mib", "batch_row")},
        "step_seconds": step_seconds,
        "optimal": bool(optimal),
        "violated": bool(found and found.resident_bytes > budget),
        "published_violated": bool(published and evaluate(problem, published).resident_bytes > budget),
        "planner_seconds": planner_seconds,
        "published_seconds": published_seconds,
    }


def _tables(profile: dict[str, Any], case: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Seconds and mebibytes of the four options of a layer."""
    hidden = profile["hidden"].index(case["hidden"])
    row = case["batch_row"]
    return profile["seconds_per_layer"][hidden][row], profile["mib_per_layer"][hidden][row]


def _budget(profile: dict[str, Any], case: dict[str, Any]) -> int:
    return (case["device_mib"] - profile["extra_mib"]) * UNITS_PER_MIB


def _instance(profile: dict[str, Any], case: dict[str, Any]) -> Instance:
    """The case as our model sees it: seconds and memory that simply add up."""
    seconds, mib = _tables(profile, case)
    zeros = dict.fromkeys(Price.__dataclass_fields__, 0)
    prices = tuple(
        Price(**{**zeros, "update_ns": round(s * 1e9), "parameter_bytes": round(m * UNITS_PER_MIB)})
        for s, m in zip(seconds, mib, strict=True)
    )
    # The options are the paper's, not stages of ours: only their number matters here.
    options = tuple(Option(Stage.FULLY_SHARDED, 1, slices=i + 1) for i in range(len(prices)))
    layers = case["layers"]
    zero = np.zeros(layers, dtype=np.int64)
    nothing = Window(zero, zero, zero)
    return Instance(
        units=tuple(f"layer {i}" for i in range(layers)),
        kinds=(Kind(options, prices, kept=False, gathered_again=True),),
        kind_of=(0,) * layers,
        live_forward=Live(nothing, zero),
        live_backward=Live(nothing, zero),
        regathered=nothing,
        flat_elements=(0, 1),
        staging=nothing,
        fixed_bytes=0,
        update_limits={1: 0},
        accumulation=1,
        samples_per_step=1,
    )


def _published_search(profile: dict[str, Any], case: dict[str, Any]) -> list[int] | None:
    """The paper's dynamic program: f[v, s] is the least time of the layers so far in v mebibytes, the last with option s."""
    seconds, mib = _tables(profile, case)
    cost, size = np.array(seconds), np.trunc(np.array(mib)).astype(np.int64)
    capacity, layers, options = case["device_mib"] - profile["extra_mib"] + 1, case["layers"], len(seconds)
    f = np.zeros((capacity, options))
    mark = np.full((layers, capacity, options), -1)
    for i in range(layers):
        for v in range(capacity - 1, -1, -1):
            for s in range(options):
                if v < size[s]:
                    f[v, s] = np.inf
                    continue
                candidates = np.array([f[v - size[s], t] for t in range(options)]) + cost[s]
                mark[i, v, s] = np.argmin(candidates)
                f[v, s] = candidates[mark[i, v, s]]
    option, v = int(np.argmin(f[-1])), capacity - 1
    if not np.isfinite(f[-1, option]):
        return None
    choice = [option]
    for i in range(layers - 1, 0, -1):
        option, v = int(mark[i, v, option]), v - int(size[option])
        choice.append(option)
    return choice[::-1]


if __name__ == "__main__":
    sys.exit(main())
