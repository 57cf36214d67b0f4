"""The command line, ``ds-osdp``: one module a verb."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import shtab

from ds_osdp.cli import calibrate, check, diff, dry_run, explain, plan, run
from ds_osdp.cli.output import EXIT_BAD_INPUT, EXIT_INFEASIBLE, print_json
from ds_osdp.errors import InfeasiblePlanError, OsdpError

__all__ = ["main", "make_parser"]

_VERBS = (plan, explain, diff, calibrate, dry_run, run, check)

_STATUSES = """\
exit status:
  0  done
  2  bad input, or a file that is not what it should be
  3  no plan fits (plan, dry-run), or the installed DeepSpeed does not fit this package (check)

completion of your shell:
  ds-osdp --print-completion bash > ~/.local/share/bash-completion/completions/ds-osdp     (also zsh, tcsh)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = make_parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except InfeasiblePlanError as error:
        if arguments.format == "json":
            print_json({"error": str(error), "budget_bytes": error.budget_bytes, "least_bytes": error.least_bytes})
        return _fail(error, EXIT_INFEASIBLE)
    except OsdpError as error:
        return _fail(error, EXIT_BAD_INPUT)


def make_parser() -> argparse.ArgumentParser:
    """All verbs with their arguments."""
    parser = argparse.ArgumentParser(
        prog="ds-osdp",
        description="Plan which ZeRO stage each module of a model gets, and say why.",
        epilog=_STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    shtab.add_argument_to(parser)
    # The deepspeed launcher puts it before the arguments of every program it starts.
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="COMMAND")
    for verb in _VERBS:
        verb.add(verbs)
    return parser


def _fail(error: Exception, status: int) -> int:
    sys.stderr.write(f"ds-osdp: error: {error}\n")
    return status
