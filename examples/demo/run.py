"""The demo: the same training twice on two ranks, first with stock ZeRO-3, then with a plan; what changed, as a table.

python examples/demo/run.py [--ranks 2] [--steps 20] [--output build]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ds_osdp import Plan, Stage
from ds_osdp.quantities import format_bytes, format_seconds
from ds_osdp.report import plan_renderable

HERE = Path(__file__).resolve().parent
WARM_UP_STEPS = 3  # DeepSpeed learns the order of modules in the first, and prefetches from the third


@dataclass(frozen=True)
class Run:
    """What one training reported."""

    losses: list[float]
    seconds: list[float]
    state_bytes: int

    @property
    def step_seconds(self) -> float:
        """Median, without the first steps."""
        return statistics.median(self.seconds[WARM_UP_STEPS:])


def train(name: str, command: list[str], log: Path, steps: int, console: Console) -> Run:
    """Start the launcher, show progress while it trains, and read what it logged."""
    log.unlink(missing_ok=True)
    output = log.with_suffix(".out")
    with output.open("w") as sink, _progress(console) as progress:
        task = progress.add_task(name, total=steps, loss="starting")
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=_environment())
        try:
            while process.poll() is None:
                time.sleep(0.2)
                records = list(_records(log))
                losses = [record["loss"] for record in records if "loss" in record]
                if losses:
                    progress.update(task, completed=len(losses), loss=f"loss {losses[-1]:.4f}")
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    records = list(_records(log))
    # The last record is written when all is done: gloo's threads sometimes abort a process that is leaving.
    if not records or "state_bytes" not in records[-1]:
        console.print(output.read_text()[-4000:], markup=False, highlight=False)
        raise SystemExit(f"{name} failed with exit status {process.returncode}; its whole output is in {output}")
    done = [record for record in records if "loss" in record]
    return Run(
        losses=[record["loss"] for record in done],
        seconds=[record["seconds"] for record in done],
        state_bytes=sum(records[-1]["state_bytes"].values()),
    )


def main() -> None:
    """Run both, print the comparison, write ``demo.json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path("build"))
    arguments = parser.parse_args()
    if arguments.steps <= WARM_UP_STEPS:
        parser.error(f"--steps must exceed the {WARM_UP_STEPS} that warm up")
    arguments.output.mkdir(parents=True, exist_ok=True)
    console = Console()
    console.print("Training a byte-level GPT of 19 M parameters on the text of Python's library, twice from the same seed:")

    def command(config: str, log: Path, *module: str) -> list[str]:
        launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(arguments.ranks)]
        training = [str(HERE / "train.py"), "--deepspeed_config", config, "--steps", str(arguments.steps), "--log", str(log)]
        return [*launcher, *module, *training]

    stock_log, planned_log = arguments.output / "demo_stock.jsonl", arguments.output / "demo_planned.jsonl"
    plan_path = arguments.output / "demo_plan.json"
    stock = train("stock ZeRO-3", command(str(HERE / "ds_zero3.json"), stock_log), stock_log, arguments.steps, console)
    planned_config = _planned_config(plan_path, arguments.output / "demo_ds_osdp.json")
    planned = train(
        "with a plan ", command(planned_config, planned_log, "--module", "ds_osdp.run"), planned_log, arguments.steps, console
    )
    plan = Plan.load(plan_path)
    difference = max(abs(a - b) for a, b in zip(stock.losses, planned.losses, strict=True))
    _show(console, stock, planned, plan, difference)

    parameters = sum(len(unit.parameters) for unit in plan.units)
    replicated = sum(len(unit.parameters) for unit in plan.units if unit.stage is Stage.REPLICATED)
    result = {
        "stock_step_seconds": stock.step_seconds,
        "planned_step_seconds": planned.step_seconds,
        "predicted_step_seconds": plan.step_seconds,
        "max_loss_difference": difference,
        "stock_state_bytes": stock.state_bytes,
        "planned_state_bytes": planned.state_bytes,
        "predicted_state_bytes": plan.resident_bytes,
        "replicated_parameters": replicated,
        "sharded_parameters": parameters - replicated,
    }
    (arguments.output / "demo.json").write_text(json.dumps(result, indent=2) + "\n")
    console.print(f"written to {arguments.output / 'demo.json'}", style="dim")


def _planned_config(plan_path: Path, target: Path) -> str:
    """The JSON with the ``osdp`` section, saving its plan where this demo reads it."""
    config = json.loads((HERE / "ds_osdp.json").read_text())
    config["osdp"]["save_plan"] = str(plan_path)
    target.write_text(json.dumps(config, indent=2))
    return str(target)


def _show(console: Console, stock: Run, planned: Run, plan: Plan, difference: float) -> None:
    console.print(plan_renderable(plan))
    table = Table(title="what changed", title_justify="left")
    for heading in ("", "stock ZeRO-3", "with a plan", "predicted"):
        table.add_column(heading, justify="left" if not heading else "right")
    table.add_row(
        "seconds per step (median)",
        format_seconds(stock.step_seconds),
        format_seconds(planned.step_seconds),
        format_seconds(plan.step_seconds),
    )
    table.add_row(
        "states per rank",
        format_bytes(stock.state_bytes),
        format_bytes(planned.state_bytes),
        format_bytes(plan.resident_bytes),
    )
    table.add_row("last loss", f"{stock.losses[-1]:.6f}", f"{planned.losses[-1]:.6f}", "")
    console.print(table)
    console.print(
        f"[bold]{stock.step_seconds / planned.step_seconds:.2f}x as fast[/bold]; "
        f"the two loss curves differ by at most {difference:.1e}"
    )


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"))
    return Progress(*columns, TimeElapsedColumn(), console=console)


def _records(log: Path) -> Iterator[dict]:
    if log.exists():
        for line in log.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # the last one may be half written
                yield json.loads(line)


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


if __name__ == "__main__":
    main()
