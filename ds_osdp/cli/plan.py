"""``ds-osdp plan``: plan a model for a cluster, without either."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ds_osdp.cli.inputs import Inputs, add_inputs, read_inputs
from ds_osdp.cli.output import add_format, print_json
from ds_osdp.prices import Space
from ds_osdp.report import explanation_renderable, plan_renderable

if TYPE_CHECKING:
    from ds_osdp.cli.output import Verbs
    from ds_osdp.explain import Explanation
    from ds_osdp.plan import Plan

__all__ = ["add"]

_EXAMPLE = """\
example:
  ds-osdp plan --config ds.json --model hf:Llama/config.json --world-size 64 --ranks-per-node 8 --memory-budget 70GiB
"""


def add(verbs: Verbs) -> None:
    """Add the verb to the command line."""
    parser = verbs.add_parser(
        "plan",
        help="plan a model for a cluster, without either",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_inputs(parser)
    parser.add_argument("--output", metavar="plan.json", help="write the plan here, for osdp.plan")
    parser.add_argument("--explain", action="store_true", help="also say why: what binds, what memory buys, how far stock is")
    add_format(parser)
    parser.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    inputs = read_inputs(arguments)
    plan = _make(inputs)
    reasons = _explain(plan, inputs) if arguments.explain else None
    if arguments.output:
        plan.save(arguments.output)
    if arguments.format == "json":
        print_json({**plan.to_dict(), **({"explanation": asdict(reasons)} if reasons else {})})
    else:
        console = Console()
        console.print(plan_renderable(plan))
        if reasons:
            console.print(explanation_renderable(plan, reasons))
        console.print(f"planned for: {inputs.cluster.name}", style="dim")
        if arguments.output:
            console.print(f'written to {arguments.output}; apply it with "osdp": {{"plan": "{arguments.output}"}}')
    return 0


def _make(inputs: Inputs) -> Plan:
    # pyomo takes seconds to import: not before the input is known to be good.
    from ds_osdp.planner import best_micro_batch, make_plan

    job, search = inputs.job, _search(inputs)
    if inputs.micro_batches:
        return best_micro_batch(inputs.micro_batches, inputs.profile_of, inputs.cluster, job, inputs.budget_bytes, **search)
    return make_plan(inputs.profile_of(job), inputs.cluster, job, inputs.budget_bytes, **search)


def _explain(plan: Plan, inputs: Inputs) -> Explanation:
    from ds_osdp.explain import explain

    job = inputs.job.model_copy(update={"micro_batch": plan.micro_batch, "accumulation": plan.accumulation})
    return explain(plan, inputs.profile_of(job), inputs.cluster, job, **_search(inputs))


def _search(inputs: Inputs) -> dict[str, Any]:
    section = inputs.section
    space = Space(section.stages, max_slices=section.max_slices, node_degree=inputs.cluster.node_differs)
    return {"space": space, "rules": section.rules, "solver": section.solver}
