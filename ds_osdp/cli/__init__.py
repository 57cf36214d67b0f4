"""The command line, ``ds-osdp``: one module a verb.

Exit status: 0 done; 2 bad input; 3 no plan fits (``plan``, ``dry-run``) or DeepSpeed does not fit this package
(``check``).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ds_osdp.cli import calibrate, check, dry_run, plan
from ds_osdp.cli.output import EXIT_BAD_INPUT, EXIT_INFEASIBLE, print_json
from ds_osdp.errors import InfeasiblePlanError, OsdpError

__all__ = ["main"]

_VERBS = (plan, calibrate, dry_run, check)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except InfeasiblePlanError as error:
        if arguments.format == "json":
            print_json({"error": str(error), "budget_bytes": error.budget_bytes, "least_bytes": error.least_bytes})
        return _fail(error, EXIT_INFEASIBLE)
    except OsdpError as error:
        return _fail(error, EXIT_BAD_INPUT)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ds-osdp", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # The deepspeed launcher puts it before the arguments of every program it starts.
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="COMMAND")
    for verb in _VERBS:
        verb.add(verbs)
    return parser


def _fail(error: Exception, status: int) -> int:
    sys.stderr.write(f"ds-osdp: error: {error}\n")
    return status
