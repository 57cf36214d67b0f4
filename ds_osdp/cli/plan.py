"""``ds-osdp plan``: plan a model for a cluster, without either."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ds_osdp.cli.inputs import Inputs, add_inputs, positive, read_inputs
from ds_osdp.cli.output import EXIT_INFEASIBLE, add_format, print_json, working
from ds_osdp.errors import ConfigError, InfeasiblePlanError
from ds_osdp.prices import Space
from ds_osdp.question import Question
from ds_osdp.report import plan_renderable, sizes_renderable

if TYPE_CHECKING:
    from ds_osdp.cli.output import Verbs
    from ds_osdp.plan import Plan

__all__ = ["add"]

_EXAMPLE = """\
examples:
  ds-osdp plan --config ds.json --model hf:Llama/config.json --world-size 64 --ranks-per-node 8 --memory-budget 70GiB
  ds-osdp plan --config ds.json --model py:my_package.models:build --world-size 8,16,32     on how many GPUs does it fit?
  ds-osdp plan ... --output plan.json, then: ds-osdp explain plan.json                      why, and what else would do
"""


def add(verbs: Verbs) -> None:
    """Add the verb to the command line."""
    parser = verbs.add_parser(
        "plan",
        help="plan a model for a cluster, without either",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_inputs(parser, _world_sizes, "number of ranks; several, as in 8,16,32, are compared")
    parser.add_argument("--output", metavar="plan.json", help="write the plan here, for osdp.plan and 'ds-osdp explain'")
    add_format(parser)
    parser.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    if len(arguments.world_size) > 1:
        return _compare(arguments)
    with working("planning"):
        inputs = _inputs(arguments, arguments.world_size[0])
        plan = _make(inputs)
    if arguments.output:
        kept = Question.kept_in(plan, inputs.section, inputs.job, inputs.cluster, inputs.profile_of)
        kept.save(arguments.output)
    if arguments.format == "json":
        print_json(plan.to_dict())
    else:
        console = Console()
        console.print(plan_renderable(plan))
        console.print(f"planned for: {inputs.cluster.name}", style="dim")
        if arguments.output:
            console.print(f'written to {arguments.output}; apply it with "osdp": {{"plan": "{arguments.output}"}}')
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    """One plan, or the reason why there is none, for each number of ranks."""
    if arguments.output:
        raise ConfigError("--output writes one plan: give one --world-size")
    found: dict[int, Plan | InfeasiblePlanError] = {}
    for ranks in arguments.world_size:
        with working(f"planning for {ranks} ranks"):
            try:
                found[ranks] = _make(_inputs(arguments, ranks))
            except InfeasiblePlanError as error:
                found[ranks] = error
    if arguments.format == "json":
        rows = {
            str(ranks): {"least_bytes": plan.least_bytes} if isinstance(plan, InfeasiblePlanError) else plan.to_dict()
            for ranks, plan in found.items()
        }
        print_json({"world_sizes": rows})
    else:
        Console().print(sizes_renderable(found))
    return EXIT_INFEASIBLE if all(isinstance(plan, InfeasiblePlanError) for plan in found.values()) else 0


def _inputs(arguments: argparse.Namespace, ranks: int) -> Inputs:
    return read_inputs(argparse.Namespace(**{**vars(arguments), "world_size": ranks}))


def _make(inputs: Inputs) -> Plan:
    # pyomo takes seconds to import: not before the input is known to be good.
    from ds_osdp.planner import best_micro_batch, make_plan

    job, search = inputs.job, _search(inputs)
    if inputs.micro_batches:
        return best_micro_batch(inputs.micro_batches, inputs.profile_of, inputs.cluster, job, inputs.budget_bytes, **search)
    return make_plan(inputs.profile_of(job), inputs.cluster, job, inputs.budget_bytes, **search)


def _search(inputs: Inputs) -> dict[str, Any]:
    section = inputs.section
    space = Space(section.stages, max_slices=section.max_slices, node_degree=inputs.cluster.node_differs)
    return {"space": space, "rules": section.rules, "solver": section.solver}


def _world_sizes(text: str) -> list[int]:
    """``8,16,32``, each once."""
    return list(dict.fromkeys(positive(part) for part in text.split(",")))
