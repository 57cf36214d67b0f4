"""``ds-osdp diff``: what changes from one plan to another."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rich.console import Console

from ds_osdp.cli.output import add_format, print_json
from ds_osdp.plan import Plan
from ds_osdp.report import difference_renderable, moved_units

if TYPE_CHECKING:
    from ds_osdp.cli.output import Verbs

__all__ = ["add"]

_EXAMPLE = """\
example:
  ds-osdp diff plan_40GiB.json plan_70GiB.json
"""

_TOTALS = (
    "world_size",
    "micro_batch",
    "accumulation",
    "step_seconds",
    "samples_per_second",
    "budget_bytes",
    "peak_bytes",
    "resident_bytes",
)


def add(verbs: Verbs) -> None:
    """Add the verb to the command line."""
    parser = verbs.add_parser(
        "diff",
        help="say what changes from one plan to another of the same model",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("one", metavar="ONE.json")
    parser.add_argument("other", metavar="OTHER.json")
    add_format(parser)
    parser.set_defaults(run=_diff)


def _diff(arguments: argparse.Namespace) -> int:
    one, other = Plan.load(arguments.one), Plan.load(arguments.other)
    if arguments.format == "json":
        totals = {name: {"one": getattr(one, name), "other": getattr(other, name)} for name in _TOTALS}
        moved = [{"one": a.model_dump(mode="json"), "other": b.model_dump(mode="json")} for a, b in moved_units(one, other)]
        print_json({"totals": totals, "units": moved})
    else:
        Console().print(difference_renderable(one, other))
    return 0
