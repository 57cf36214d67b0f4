"""``ds-osdp dry-run``: will it fit on 64 GPUs?  Ask on one machine."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from ds_osdp.cli.inputs import Inputs, add_inputs, read_inputs
from ds_osdp.cli.output import EXIT_INFEASIBLE, add_format, print_json
from ds_osdp.plan import Plan, Stage
from ds_osdp.prices import Space
from ds_osdp.quantities import format_bytes

if TYPE_CHECKING:
    from ds_osdp.cli.output import Verbs
    from ds_osdp.dry_run import DryRun
    from ds_osdp.job import Job
    from ds_osdp.step import Moment

__all__ = ["add"]

_EXAMPLE = """\
example:
  ds-osdp dry-run --config ds.json --model hf:Llama/config.json --world-size 64 --ranks-per-node 8 --plan plan.json
"""
_SHOWN = 6
"""Moments in the table, those that need most."""


def add(verbs: Verbs) -> None:
    """Add the verb to the command line."""
    parser = verbs.add_parser(
        "dry-run",
        help="measure the memory of one rank of many with DeepSpeed's real engine, on this machine alone",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_inputs(parser)
    parser.add_argument("--plan", metavar="plan.json", help="what to apply; default: plan first")
    parser.add_argument(
        "--real",
        action="store_true",
        help="run on data and this machine's device, and ask CUDA's allocator too; default: on shapes, in no memory",
    )
    add_format(parser)
    parser.set_defaults(run=_dry_run)


def _dry_run(arguments: argparse.Namespace) -> int:
    inputs = read_inputs(arguments)
    plan = Plan.load(arguments.plan) if arguments.plan else _planned(inputs)
    budget = plan.budget_bytes if arguments.plan and not arguments.memory_budget else inputs.budget_bytes
    job = inputs.job.model_copy(
        update={"micro_batch": plan.micro_batch, "accumulation": plan.accumulation, **plan.sizes.model_dump()}
    )
    # What DeepSpeed logs is not what was asked for.
    with redirect_stdout(sys.stderr):
        measured = _measured(arguments, inputs, plan, job)
    predicted = _predicted(inputs, plan, job)
    needed = max(measured.peak_bytes, measured.allocator_bytes or 0)
    fits = needed <= budget
    verdict = (
        f"{'fits' if fits else 'does not fit'}: peak {format_bytes(needed)} of {format_bytes(budget)}, "
        f"at {measured.peak_moment}; predicted {format_bytes(plan.peak_bytes)}"
    )
    if arguments.format == "json":
        print_json(_document(plan, measured, predicted, fits, budget))
    else:
        console = Console()
        console.print(_kinds(measured, predicted))
        console.print(_moments(measured, predicted))
        if measured.allocator_bytes is not None:
            console.print(f"CUDA's allocator: {format_bytes(measured.allocator_bytes)}")
        console.print(verdict, soft_wrap=True)
    return 0 if fits else EXIT_INFEASIBLE


def _planned(inputs: Inputs) -> Plan:
    from ds_osdp.planner import best_micro_batch, make_plan

    section, job = inputs.section, inputs.job
    search: dict[str, Any] = {"space": Space(section.stages), "rules": section.rules, "solver": section.solver}
    if inputs.micro_batches:
        return best_micro_batch(inputs.micro_batches, inputs.profile_of, inputs.cluster, job, inputs.budget_bytes, **search)
    return make_plan(inputs.profile_of(job), inputs.cluster, job, inputs.budget_bytes, **search)


def _measured(arguments: argparse.Namespace, inputs: Inputs, plan: Plan, job: Job) -> DryRun:
    import torch

    from ds_osdp.dry_run import dry_run
    from ds_osdp.measure import sample_of

    model = inputs.model
    sample = sample_of(inputs.section, model, job.micro_batch, arguments.sequence_length)
    sizes = {"train_micro_batch_size_per_gpu": job.micro_batch, "gradient_accumulation_steps": job.accumulation}
    ds_config = {**inputs.ds_config, **sizes, "train_batch_size": job.train_batch_size}
    if arguments.real:
        # Values do not matter, but must not be what happens to be in memory: NaN would be an overflow.
        model = model.to_empty(device="cpu")
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.zero_()
    return dry_run(
        model,
        ds_config,
        plan,
        sample,
        accumulation=job.accumulation,
        dtype=getattr(torch, job.parameter_dtype),
        real=arguments.real,
    )


def _predicted(inputs: Inputs, plan: Plan, job: Job) -> tuple[Moment, ...]:
    from ds_osdp.explain import chosen_options
    from ds_osdp.step import priced, timeline

    slices = max(unit.slices for unit in plan.units)
    everything = Space(tuple(Stage), node_degree=True, max_slices=slices, recompute=True)
    problem = priced(inputs.profile_of(job), inputs.cluster, job, everything)
    return timeline(problem, chosen_options(problem, plan))


def _document(plan: Plan, measured: DryRun, predicted: tuple[Moment, ...], fits: bool, budget_bytes: int) -> dict[str, Any]:
    return {
        "fits": fits,
        "budget_bytes": budget_bytes,
        "peak_bytes": measured.peak_bytes,
        "peak_moment": measured.peak_moment,
        "allocator_bytes": measured.allocator_bytes,
        "predicted_peak_bytes": plan.peak_bytes,
        "predicted_peak_moment": plan.peak_moment,
        "moments": measured.moments,
        "predicted_moments": {moment.name: moment.bytes for moment in predicted},
        "world_size": plan.world_size,
        "plan_hash": plan.plan_hash,
    }


def _kinds(measured: DryRun, predicted: tuple[Moment, ...]) -> Table:
    highest = max(predicted, key=lambda moment: moment.total_bytes)
    table = _table("at the peak, by kind", f"measured, {measured.peak_moment}", f"predicted, {highest.name}")
    for kind, size in highest.bytes.items():
        table.add_row(kind, format_bytes(measured.moments[measured.peak_moment].get(kind, 0)), format_bytes(size))
    return table


def _moments(measured: DryRun, predicted: tuple[Moment, ...]) -> Table:
    sizes = {moment.name: moment.total_bytes for moment in predicted}
    updates = [size for name, size in sizes.items() if name not in measured.moments and name.startswith("optimizer step")]
    totals = {name: sum(kinds.values()) for name, kinds in measured.moments.items()}
    table = _table("moments that need most", "measured", "predicted")
    for name in sorted(totals, key=lambda name: -totals[name])[:_SHOWN]:
        size = sizes.get(name, max(updates, default=0))
        table.add_row(name, format_bytes(totals[name]), format_bytes(size))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    return table
