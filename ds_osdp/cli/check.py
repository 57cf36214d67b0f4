"""``ds-osdp check``: whether the installed DeepSpeed has what this package leans on."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from ds_osdp.cli.output import EXIT_UNFIT_DEEPSPEED, add_format, print_json

if TYPE_CHECKING:
    from ds_osdp.cli.output import Verbs

__all__ = ["add"]


def add(verbs: Verbs) -> None:
    """Add the verb to the command line."""
    parser = verbs.add_parser(
        "check",
        help="say whether the installed DeepSpeed has every seam this package needs",
        epilog="example:\n  ds-osdp check --format json\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_format(parser)
    parser.set_defaults(run=_check)


def _check(arguments: argparse.Namespace) -> int:
    from ds_osdp.deepspeed_seams import SEAMS, missing_seams

    rows = [{"owner": s.owner.split(":")[1], "name": s.name, "reason": s.reason, "problem": s.problem() or ""} for s in SEAMS]
    # What enabling would refuse, and not the rows alone: some mechanisms show in no signature.
    problems = missing_seams()
    if arguments.format == "json":
        print_json({"fits": not problems, "problems": problems, "seams": rows})
    else:
        table = Table("seam", "why", "found")
        for row in rows:
            table.add_row(f"{row['owner']}.{row['name']}", row["reason"], row["problem"] or "yes")
        console = Console()
        console.print(table)
        for problem in problems:
            console.print(problem, markup=False)
    return EXIT_UNFIT_DEEPSPEED if problems else 0
