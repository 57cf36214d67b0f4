"""Predicted seconds per optimizer step beside measured ones, between hosts whose links are limited (see netlab.py).

    python benchmarks/time_prediction.py --json [--only 2x1gbit] [--steps 4] [--measured FILE]

Three settings, three models, five plans: the four uniform ones, and one that mixes all stages.  In each setting the ranks first
calibrate, as `ds-osdp calibrate` does, and observe each model without DeepSpeed, all at once; then they train.  The prediction
knows the observed model, the calibration and the DeepSpeed JSON, and nothing of the steps.  A measured step is the median
after warm-up.  `--measured` predicts again what an earlier run measured.

Prints `rows, median_error, worst_error, order_errors`: errors in percent; an order error is a pair of plans of one model
and setting whose measured times differ by more than 10 per cent, predicted the other way round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

from _lab import IN_PROPORTION, SEED, MeasurementError, Setting, environment, plan_section, run_worker, training_config
from _models import SHAPES
from netlab import NetLabError, exit_on_signals

from ds_osdp.cluster import Cluster
from ds_osdp.config import OsdpConfig
from ds_osdp.job import job_from_config
from ds_osdp.planner import make_plan
from ds_osdp.profile import ModelProfile

CALIBRATION_SECONDS = 15.0
DIFFERENCE = 0.1
"""Plans whose measured times differ by less are not compared."""

SETTINGS = {"2x1gbit": Setting(2, "1gbit"), "4x400mbit": Setting(4, "400mbit"), "4xunlimited": Setting(4)}

PLANS: dict[str, list[dict[str, Any]]] = {
    **{f"stage {stage}": [{"match": "*", "stage": stage}] for stage in (3, 2, 1, 0)},
    "mixed": [
        {"match": "*.fc_in.*", "stage": 0},
        {"match": "*.fc_out.*", "stage": 2},
        {"match": "*.qkv.*", "stage": 1},
        {"match": "*", "stage": 3},
    ],
}


def deepspeed_config(model: str, plan: str) -> dict[str, Any]:
    """The JSON that a model is trained with."""
    section = plan_section(SHAPES[model]["tokens"], memory_budget="1GiB", rules=PLANS[plan])
    return training_config(2, 2, IN_PROPORTION, osdp=section)


def measured(setting: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Calibrate and train in one setting.

    Raises:
        MeasurementError: a rank failed.
    """
    cells = {
        model: {
            "kind": "gpt",
            "model": size,
            "systems": {plan: {"program": "ds_osdp", "config": deepspeed_config(model, plan)} for plan in PLANS},
        }
        for model, size in SHAPES.items()
    }
    found = run_worker(
        SETTINGS[setting],
        cells,
        warmup=arguments.warmup,
        steps=arguments.steps,
        passes=1,
        calibration_seconds=CALIBRATION_SECONDS,
        observe=True,
    )
    steps = {model: {plan: run["step_seconds"][0] for plan, run in of.items()} for model, of in found["cells"].items()}
    return {"cluster": found["cluster"], "profiles": found["profiles"], "steps": steps}


def predicted_seconds(setting: str, model: str, plan: str, run: dict[str, Any]) -> float:
    """What the planner says of a plan, from the observed model and the calibration."""
    config = deepspeed_config(model, plan)
    job, section = job_from_config(config, SETTINGS[setting].world_size), OsdpConfig.model_validate(config["osdp"])
    cluster, profile = Cluster.from_dict(run["cluster"]), ModelProfile.from_dict(run["profiles"][model])
    assert section.memory_budget is not None
    return make_plan(profile, cluster, job, section.memory_budget, rules=section.rules).step_seconds


def rows(runs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One per setting, model and plan."""
    for setting, run in runs.items():
        for model, plans in run["steps"].items():
            for plan, steps in plans.items():
                seconds = statistics.median(steps)
                predicted = predicted_seconds(setting, model, plan, run)
                yield {
                    "setting": setting,
                    "model": model,
                    "plan": plan,
                    "measured_seconds": seconds,
                    "predicted_seconds": predicted,
                    "error": 100 * (predicted / seconds - 1),
                }


def order_errors(table: list[dict[str, Any]]) -> list[str]:
    """Pairs of plans that were predicted the other way round."""
    wrong = []
    for a, b in combinations(table, 2):
        if (a["setting"], a["model"]) != (b["setting"], b["model"]):
            continue
        fast, slow = sorted((a, b), key=lambda row: float(row["measured_seconds"]))
        differ = slow["measured_seconds"] > (1 + DIFFERENCE) * fast["measured_seconds"]
        if differ and slow["predicted_seconds"] <= fast["predicted_seconds"]:
            wrong.append(f"{a['setting']}, {a['model']}: {fast['plan']} is faster than {slow['plan']}")
    return wrong


def main() -> int:
    """Run the command line; the exit status is 1 where something could not be measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="end with the whole result as one line of JSON")
    parser.add_argument("--only", choices=SETTINGS, help="one setting")
    parser.add_argument("--warmup", type=int, default=2, help="steps not counted; ZeRO-3 records its trace in them")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--measured", type=Path, nargs="+", help="results of earlier runs: predict them again")
    arguments = parser.parse_args()
    exit_on_signals()
    before = environment()
    try:
        if arguments.measured:
            runs = {name: run for file in arguments.measured for name, run in json.loads(file.read_text())["runs"].items()}
        else:
            runs = {name: measured(name, arguments) for name in ([arguments.only] if arguments.only else SETTINGS)}
    except (MeasurementError, NetLabError) as error:
        print(f"time_prediction: {error}", file=sys.stderr)
        return 1
    table = list(rows(runs))
    for row in table:
        print(
            "{setting:12} {model:13} {plan:11} {measured_seconds:7.3f} s {predicted_seconds:7.3f} s {error:+6.1f}%".format(
                **row
            )
        )
    wrong = order_errors(table)
    print("\n".join(wrong))
    errors = [abs(row["error"]) for row in table]
    result = {
        "rows": len(table),
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "order_errors": len(wrong),
        "table": table,
        "wrong_order": wrong,
        "environment": before,
        "settings": {"warmup": arguments.warmup, "steps": arguments.steps, "seed": SEED, "zero_optimization": IN_PROPORTION},
        "runs": runs,
    }
    if arguments.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
