"""Every way to train one model side by side, between hosts with limited links: seconds, memory and bytes of each (netlab.py).

    python benchmarks/lab_throughput.py --quick --json
    python benchmarks/lab_throughput.py --json --only 4x400mbit --model uneven --accumulation 4 > piece.json
    python benchmarks/lab_throughput.py --measured piece.json other.json --json --plot docs --table

Systems: torch DDP, with its own buckets and with small ones; FSDP2, resharding after forward or not; DeepSpeed ZeRO-1, 2 and
3, ZeRO-3 with sizes of communication in proportion to the model, with those that Hugging Face's "auto" gives, with what is
gathered kept until backward, with persistence thresholds at every size of a matrix, and with hpZ where a host has several
ranks; ds_osdp at budgets that are spread evenly from the least that any ZeRO-3 takes to what a plan takes that shards nothing,
and at what DDP takes.  All of one model run in one process per rank, in turns (A B C, C B A), with the same data, weights,
AdamW and clipping.  ds_osdp plans as it does for users: from the traced model, the links that the run has calibrated once
before, and a JSON that leaves all sizes to the plan.

- A system's memory is the most bytes of tensors alive within a step, on the rank that has most: the definition of a budget.
  A stock system fits a budget if its measured memory does.  `state_bytes` are those alive between steps.
- Seconds are the median of all timed steps of the slowest rank.  A ratio above 1 means that ds_osdp is slower.
- Bytes on the wire are read from the interface of the host that sends most.
- The bound is what no data parallel system can beat: the larger of the forwards and backwards of a step without communication
  or update, and the bytes of one all-reduce of the gradients over the rate of a host's link.
- gloo carries out a reduce-scatter as an all-reduce, with twice the bytes of a ring.  FSDP2 and ZeRO pay for that here, and
  so do stages 2 and 3 of a plan; over NCCL they would not.

Prints `settings, points, losses_equal, worst_ratio_to_best_stock, full_budget_ratio_to_ddp, half_budget_speedup_over_zero3_a1,
half_budget_speedup_over_zero3_a4` (the worst of all models, the last three where links are limited) and how many budgets no
plan fits.  Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _lab import (
    CLIPPING,
    IN_PROPORTION,
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
from _models import MODELS, SHAPES, GPTConfig
from netlab import NetLabError, exit_on_signals

SETTINGS = {
    "2x1gbit": Setting(2, "1gbit"),
    "4x400mbit": Setting(4, "400mbit"),
    "2x2x1gbit": Setting(2, "1gbit", ranks_per_host=2),
    "2xunlimited": Setting(2),
}
TRAINED = {**{name: ("gpt", shape) for name, shape in SHAPES.items()}, "lora": ("lora", SHAPES["wide-shallow"])}
"""By name: a key of `_models.MODELS`, and its size."""
ACCUMULATIONS = (1, 4)
MICRO_BATCH = 2
CALIBRATION_SECONDS = 15.0
SHARES = [i / 6 for i in range(7)]
"""Of the way from the least budget to the largest."""
HALF, FULL = "osdp 50%", "osdp 100%"
WHOLE, AS_DDP = "osdp whole", "osdp as DDP"
BITS = {"gbit": 1e9, "mbit": 1e6}
COLORS = {
    "DDP": "#2f8f4f",
    "FSDP2": "#bf6f1f",
    "ZeRO-1": "#c9a0dc",
    "ZeRO-2": "#9d5fc4",
    "ZeRO-3": "#bf3f3f",
    "osdp": "#1f5fbf",
}
"""Of systems whose names begin so."""

FREED = IN_PROPORTION
KEPT = {name: FREED[name] for name in FREED if name not in ("stage3_max_live_parameters", "stage3_max_reuse_distance")}
STAGES_1_AND_2 = {"reduce_bucket_size": FREED["reduce_bucket_size"], "allgather_bucket_size": FREED["reduce_bucket_size"]}


def systems(setting: Setting, size: dict[str, int], accumulation: int) -> dict[str, dict[str, Any]]:
    """By name, what `_worker.Cell` takes; stock comes first, for budgets are made from what it takes."""

    def torch_system(program: str, **options: Any) -> dict[str, Any]:
        return {"program": program, "options": options, "config": training_config(MICRO_BATCH, accumulation, None)}

    def zero(sizes: dict[str, int], **more: Any) -> dict[str, Any]:
        return {"program": "deepspeed", "config": training_config(MICRO_BATCH, accumulation, {**sizes, **more})}

    def osdp(budget: dict[str, Any], **section: Any) -> dict[str, Any]:
        config = training_config(MICRO_BATCH, accumulation, {}, osdp=plan_section(size["tokens"], **section))
        return {"program": "ds_osdp", "config": config, **budget}

    square = size["hidden"] ** 2
    auto = {
        "reduce_bucket_size": square,
        "stage3_prefetch_bucket_size": int(0.9 * square),
        "stage3_param_persistence_threshold": 10 * size["hidden"],
    }
    thresholds = {"h²": square, "3 h²": 3 * square, "4 h²": 4 * square, "all": 10**12}
    if size["vocab"] <= 4 * size["hidden"]:
        del thresholds["4 h²"]  # then nothing is larger
    found = {
        "local": torch_system("local"),
        "DDP": torch_system("ddp"),
        "DDP, small buckets": torch_system("ddp", bucket_mib=2.0),
        "FSDP2": torch_system("fsdp2", reshard_after_forward=True),
        "FSDP2, kept": torch_system("fsdp2", reshard_after_forward=False),
        "ZeRO-1": zero(STAGES_1_AND_2, stage=1),
        "ZeRO-2": zero(STAGES_1_AND_2, stage=2),
        "ZeRO-3": zero(FREED),
        "ZeRO-3, kept": zero(KEPT),
        "ZeRO-3, auto": zero(auto),
        **{
            f"ZeRO-3, threshold {text}": zero(FREED, stage3_param_persistence_threshold=threshold)
            for text, threshold in thresholds.items()
        },
    }
    if accumulation > 1:
        # With more memory than needed it reduces once; with less it can reduce every time, as ZeRO-2 and 3 do.
        found["FSDP2, reducing"] = torch_system("fsdp2", reshard_after_forward=True, reduce_every_micro_step=True)
    if setting.ranks_per_host > 1:
        found["ZeRO-3, hpZ"] = zero(FREED, zero_hpz_partition_size=setting.ranks_per_host) | {"may_fail": True}
    whole = {"memory_budget": "1GiB", "rules": [{"match": "*", "stage": 0}]}
    return {
        **found,
        WHOLE: osdp({}, **whole),
        **{f"osdp {share:.0%}": osdp({"budget_share": share}) for share in SHARES},
        AS_DDP: osdp({"budget_of": "DDP"}),
    }


def measured(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """All models of one setting, at every accumulation.

    Raises:
        MeasurementError: naming what could not be measured.
    """
    setting = SETTINGS[name]
    cells = {}
    for model in arguments.model:
        kind, size = TRAINED[model]
        for accumulation in arguments.accumulation:
            of_cell = systems(setting, size, accumulation)
            cells[f"{model}, accumulation {accumulation}"] = {
                "kind": kind,
                "model": size,
                "systems": of_cell,
                "budgets": ([each for each in of_cell if each.startswith("ZeRO-3")], ["DDP", WHOLE]),
            }
    before = environment()
    run = run_worker(
        setting,
        cells,
        warmup=arguments.warmup,
        steps=arguments.steps,
        passes=arguments.passes,
        calibration_seconds=CALIBRATION_SECONDS,
    )
    return {"setting": name, "environment": before, "asked": cells, **run}


class Cell:
    """What was measured with one model, in one setting, at one accumulation."""

    def __init__(self, run: dict[str, Any], name: str) -> None:
        self.setting, self.name = run["setting"], name
        self.model, _, accumulation = name.partition(", accumulation ")
        self.accumulation = int(accumulation)
        self.results: dict[str, dict[str, Any]] = {n: r for n, r in run["cells"][name].items() if "failure" not in r}
        self.failures = {n: r["failure"] for n, r in run["cells"][name].items() if "failure" in r}
        self.seconds = {n: statistics.median(s for timed in r["step_seconds"] for s in timed) for n, r in self.results.items()}
        self.stock = [n for n, r in self.results.items() if r["program"] not in ("ds_osdp", "local")]

    @property
    def limited(self) -> bool:
        """Whether links have a limit."""
        return SETTINGS[self.setting].rate is not None

    @property
    def samples(self) -> int:
        """Of one step."""
        return SETTINGS[self.setting].world_size * self.accumulation * MICRO_BATCH

    @property
    def bound_seconds(self) -> float:
        """What no data parallel system can beat here."""
        setting = SETTINGS[self.setting]
        compute = self.seconds["local"]
        if setting.rate is None:
            return compute
        digits, unit = setting.rate[:-4], setting.rate[-4:]
        kind, size = TRAINED[self.model]
        trained = sum(p.numel() for p in MODELS[kind](GPTConfig(**size)).parameters() if p.requires_grad)
        # A reduce-scatter and an all-gather among the hosts: each sends, and receives, all but its own share of either.
        sent_bytes = 2 * (setting.hosts - 1) / setting.hosts * 4 * trained
        return max(compute, 8 * sent_bytes / (float(digits) * BITS[unit]))

    @property
    def points(self) -> list[dict[str, Any]]:
        """One for each budget that a plan fits."""
        return [self._point(n) for n, r in self.results.items() if r["program"] == "ds_osdp" and n != WHOLE]

    def _point(self, name: str) -> dict[str, Any]:
        result, seconds = self.results[name], self.seconds[name]
        plan = result["plan"]
        fitting = [n for n in self.stock if self.results[n]["peak_bytes"] <= plan["budget_bytes"]]
        best = min(fitting, key=lambda n: self.seconds[n])
        return {
            "setting": self.setting,
            "model": self.model,
            "accumulation": self.accumulation,
            "budget": name,
            "budget_bytes": plan["budget_bytes"],
            "peak_bytes": result["peak_bytes"],
            "seconds": seconds,
            "best_stock": best,
            "best_stock_seconds": self.seconds[best],
            "ratio_to_best_stock": seconds / self.seconds[best],
            "predicted_seconds": plan["step_seconds"],
            "seconds_error_percent": 100 * (plan["step_seconds"] / seconds - 1),
            "predicted_peak_bytes": plan["peak_bytes"],
            "peak_error_percent": 100 * (plan["peak_bytes"] / result["peak_bytes"] - 1),
            "plan_hash": plan["hash"],
        }

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One for each system, the leanest first."""
        table = [
            {
                "system": n,
                "seconds": self.seconds[n],
                "times_the_bound": self.seconds[n] / self.bound_seconds,
                **{key: result[key] for key in ("peak_bytes", "state_bytes", "bytes_sent")},
            }
            for n, result in self.results.items()
            if n != "local"
        ]
        return sorted(table, key=lambda row: (row["peak_bytes"], row["seconds"]))

    @property
    def loss_difference(self) -> float:
        """The largest relative difference of any system's losses from those of DDP."""
        return loss_difference(self.results[n]["losses"] for n in ["DDP", *self.results] if n != "local")

    def ratio_to_ddp(self) -> float:
        """With memory for everything, over the faster DDP."""
        return self.seconds[FULL] / min(self.seconds[n] for n in self.stock if n.startswith("DDP"))

    def half_budget_speedup(self) -> float:
        """Over the fastest ZeRO-3 that keeps no matrix by a threshold, whatever memory that takes."""
        plain = [n for n in self.stock if n.startswith("ZeRO-3") and "threshold" not in n]
        return min(self.seconds[n] for n in plain) / self.seconds[HALF]


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What is printed, from one run or several."""
    cells = list(cells_of(runs))
    points = [point for cell in cells for point in cell.points]
    limited = [cell for cell in cells if cell.limited]

    def slowest_half(accumulation: int) -> float | None:
        own = (c for c in limited if c.accumulation == accumulation and HALF in c.results)
        return min((c.half_budget_speedup() for c in own), default=None)

    difference = max(cell.loss_difference for cell in cells)
    errors = [abs(point["seconds_error_percent"]) for point in points]
    return {
        "settings": list(dict.fromkeys(cell.setting for cell in cells)),
        "points": len(points),
        "points_without_plan": sum(name.startswith("osdp") for cell in cells for name in cell.failures),
        "losses_equal": difference <= LOSS_TOLERANCE,
        "loss_difference": difference,
        "worst_ratio_to_best_stock": max((point["ratio_to_best_stock"] for point in points), default=None),
        "full_budget_ratio_to_ddp": max((c.ratio_to_ddp() for c in limited if FULL in c.results), default=None),
        **{f"half_budget_speedup_over_zero3_a{a}": slowest_half(a) for a in ACCUMULATIONS},
        "worst_peak_over_budget": max((point["peak_bytes"] / point["budget_bytes"] for point in points), default=None),
        "median_seconds_error_percent": statistics.median(errors) if errors else None,
        "worst_peak_error_percent": max((abs(point["peak_error_percent"]) for point in points), default=None),
    }


def cells_of(runs: list[dict[str, Any]]) -> Iterator[Cell]:
    """Every cell of every run."""
    return (Cell(run, name) for run in runs for name in run["cells"])


def table(cell: Cell) -> str:
    """The cell in Markdown."""
    points = {point["budget"]: point for point in cell.points}
    lines = [
        f"{cell.setting}, {cell.name}: no system can take less than {cell.bound_seconds:.3f} s.",
        "",
        "| system | memory, MB | s per step | x the bound | MB sent per step | predicted s | best stock that fits |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in cell.rows:
        point = points.get(row["system"])
        beside = (
            f"{point['predicted_seconds']:.3f} | {point['best_stock']}: {point['best_stock_seconds']:.3f}" if point else "|"
        )
        sent = statistics.mean(row["bytes_sent"]) / 1e6
        lines.append(
            f"| {row['system']} | {row['peak_bytes'] / 1e6:.1f} | {row['seconds']:.3f} | {row['times_the_bound']:.2f} "
            f"| {sent:.1f} | {beside} |"
        )
    lines += [f"\n{name}: {failure}" for name, failure in cell.failures.items()]
    return "\n".join(lines)


def plot(cells: list[Cell], folder: Path) -> list[Path]:
    """One picture for each setting: throughput against memory, and the front of stock and of plans."""
    from plotly.io import write_images
    from plotly.subplots import make_subplots

    figures, files = [], []
    for setting in dict.fromkeys(cell.setting for cell in cells):
        own = [cell for cell in cells if cell.setting == setting]
        figure = make_subplots(rows=(len(own) + 1) // 2, cols=2, subplot_titles=[cell.name for cell in own])
        for i, cell in enumerate(own):
            place = {"row": 1 + i // 2, "col": 1 + i % 2}
            at = {name: (r["peak_bytes"] / 1e6, cell.samples / cell.seconds[name]) for name, r in cell.results.items()}
            for family, color in COLORS.items():
                points = [at[name] for name in at if name.startswith(family)]
                figure.add_scatter(
                    x=[x for x, _ in points], y=[y for _, y in points], mode="markers", marker_color=color, marker_size=9,
                    name=family, legendgroup=family, showlegend=i == 0, **place,
                )  # fmt: skip
            for members, color in ((cell.stock, "#999999"), ([n for n in at if n.startswith("osdp")], COLORS["osdp"])):
                front = pareto([at[name] for name in members])
                figure.add_scatter(
                    x=[x for x, _ in front], y=[y for _, y in front], line={"shape": "hv", "color": color}, mode="lines",
                    showlegend=False, **place,
                )  # fmt: skip
            figure.add_hline(y=cell.samples / cell.bound_seconds, line_dash="dot", line_color="#333333", **place)
            figure.update_xaxes(title_text="memory of a rank, MB", **place)
            figure.update_yaxes(title_text="samples per second", rangemode="tozero", **place)
        figure.update_layout(template="plotly_white", height=420 * ((len(own) + 1) // 2))
        figures.append(figure)
        files.append(folder / f"throughput-{setting}.png")
    write_images(figures, files, width=1200, scale=2)
    return files


def pareto(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those (memory, speed) that none with less memory is as fast as."""
    front: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda p: (p[0], -p[1])):
        if not front or point[1] > front[-1][1]:
            front.append(point)
    return front


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="end with the whole result as one line of JSON")
    parser.add_argument("--quick", action="store_true", help="one model between two hosts at 1 Gbit/s (8 minutes)")
    parser.add_argument("--only", choices=SETTINGS, nargs="+", default=list(SETTINGS), help="these settings")
    parser.add_argument("--model", choices=TRAINED, nargs="+", default=list(TRAINED), help="these models")
    parser.add_argument("--accumulation", type=int, choices=ACCUMULATIONS, nargs="+", default=list(ACCUMULATIONS))
    parser.add_argument("--warmup", type=int, default=2, help="steps not counted; ZeRO-3 records its trace in them")
    parser.add_argument("--passes", type=int, default=4, help="turns of every system")
    parser.add_argument("--steps", type=int, default=2, help="timed in each turn")
    parser.add_argument("--measured", type=Path, nargs="+", help="results of earlier runs: put them together")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="draw a picture of each setting there")
    parser.add_argument("--table", action="store_true", help="print every system in Markdown")
    arguments = parser.parse_args()
    if min(arguments.passes, arguments.warmup, arguments.steps) < 1:
        parser.error("--passes, --warmup and --steps must be at least 1")
    if arguments.quick:
        arguments.only, arguments.model = ["2x1gbit"], ["wide-shallow"]
    return arguments


def main() -> int:
    """Run the command line: 0 when measured, 2 where there can be no lab, 1 when something could not be measured."""
    arguments = _arguments()
    exit_on_signals()
    try:
        if arguments.measured:
            runs = [run for file in arguments.measured for run in json.loads(file.read_text())["runs"]]
        else:
            runs = [measured(name, arguments) for name in arguments.only]
    except NetLabError as error:
        print(f"lab_throughput: {error}", file=sys.stderr)
        return 2
    except MeasurementError as error:
        print(f"lab_throughput: {error}", file=sys.stderr)
        return 1
    cells = list(cells_of(runs))
    found = summary(runs)
    for cell in cells if arguments.table else ():
        print(f"{table(cell)}\n")
    if arguments.plot:
        print(*plot(cells, arguments.plot))
    if not arguments.json:
        for name, value in found.items():
            print(f"{name:36} {value:.3g}" if isinstance(value, float) else f"{name:36} {value}")
        return 0
    settings = {"seed": SEED, "gradient_clipping": CLIPPING, "loss_tolerance": LOSS_TOLERANCE, "micro_batch": MICRO_BATCH}
    details = {
        "points": [point for cell in cells for point in cell.points],
        "systems": {f"{cell.setting}, {cell.name}": cell.rows for cell in cells},
        "bound_seconds": {f"{cell.setting}, {cell.name}": cell.bound_seconds for cell in cells},
    }
    print(json.dumps({**found, "details": details, "fixed": settings, "runs": runs}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
