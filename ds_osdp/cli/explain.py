"""``ds-osdp explain``: why a saved plan is what it is, and what it would be with more memory."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ds_osdp.cli.inputs import size
from ds_osdp.cli.output import add_format, print_json, working
from ds_osdp.errors import ConfigError
from ds_osdp.plan import Plan
from ds_osdp.prices import Space
from ds_osdp.question import Question
from ds_osdp.report import alternatives_renderable, explanation_renderable, plan_renderable
from ds_osdp.report.measured import read_measured
from ds_osdp.report.page import write_page, write_pictures

if TYPE_CHECKING:
    from ds_osdp.cli.output import Verbs
    from ds_osdp.explain import Alternative

__all__ = ["add"]

_EXAMPLE = """\
examples:
  ds-osdp explain plan.json                        what binds, what memory buys, how far stock configurations are
  ds-osdp explain plan.json --more 10GiB           what 10 GiB more per rank would buy
  ds-osdp explain plan.json --unit 'h.3.*'         why these units have the stage they have
  ds-osdp explain plan.json --html report.html     one page of figures
"""


def add(verbs: Verbs) -> None:
    """Add the verb to the command line."""
    parser = verbs.add_parser(
        "explain",
        help="say why a plan is what it is, in words and figures",
        description="Explain a plan that 'ds-osdp plan --output' or osdp.save_plan wrote. Nothing else is needed.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("plan", metavar="PLAN.json")
    parser.add_argument("--more", type=size, default="1GiB", metavar="SIZE", help="memory to look at beside the plan's budget")
    parser.add_argument("--unit", metavar="PATTERN", help="only say why the units of this name are placed as they are")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page of figures that needs no network")
    parser.add_argument("--png", type=Path, metavar="FOLDER", help="write every figure as a picture (needs Chrome or Chromium)")
    parser.add_argument(
        "--measured", type=Path, metavar="FOLDER", help="of DeepSpeed's csv_monitor: compare with what was predicted"
    )
    add_format(parser)
    parser.set_defaults(run=_explain)


def _explain(arguments: argparse.Namespace) -> int:
    plan = Plan.load(arguments.plan)
    question = Question.of(plan, arguments.plan)
    if arguments.unit:
        return _why(arguments, plan, question)
    measured = read_measured(arguments.measured) if arguments.measured else None
    # pyomo takes seconds to import: not before the input is known to be good.
    from ds_osdp.explain import explain

    with working("solving for other budgets"):
        reasons = explain(
            plan,
            question.profile,
            question.cluster,
            question.job,
            space=_space(question),
            rules=question.section.rules,
            solver=question.section.solver,
            delta_bytes=arguments.more,
        )
    written: list[Path] = []
    with working("drawing"):
        if arguments.html:
            write_page(arguments.html, plan, reasons, measured)
            written.append(arguments.html)
        if arguments.png:
            written += write_pictures(arguments.png, plan, reasons, measured)
    if arguments.format == "json":
        print_json({**asdict(reasons), "measured": asdict(measured) if measured else None})
        return 0
    console = Console()
    console.print(plan_renderable(plan))
    console.print(explanation_renderable(plan, reasons))
    for path in written:
        console.print(f"written to {path}", markup=False)
    return 0


def _why(arguments: argparse.Namespace, plan: Plan, question: Question) -> int:
    """Every option of the units that a pattern names."""
    from ds_osdp.explain import alternatives

    chosen = [u for u, unit in enumerate(plan.units) if fnmatchcase(unit.name, arguments.unit)]
    if not chosen:
        names = ", ".join(repr(unit.name) for unit in plan.units[:3])
        raise ConfigError(f"--unit {arguments.unit!r} names no unit; units are named like {names}")
    made_from = question.profile, question.cluster, question.job
    search: dict[str, Any] = {"space": _space(question), "rules": question.section.rules}
    found: list[tuple[Alternative, ...]] = [alternatives(plan, *made_from, u, **search) for u in chosen]
    if arguments.format == "json":
        rows: list[dict[str, Any]] = [asdict(other) for options in found for other in options]
        print_json({"alternatives": rows})
    else:
        Console().print(alternatives_renderable(plan, found))
    return 0


def _space(question: Question) -> Space:
    """What units might take when the plan was made."""
    section = question.section
    return Space(section.stages, max_slices=section.max_slices, node_degree=question.cluster.node_differs)
