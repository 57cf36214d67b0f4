"""``ds-osdp run``: run a script that is not to be touched, with the ``osdp`` section of its JSON applied."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ds_osdp import run

if TYPE_CHECKING:
    from ds_osdp.cli.output import Verbs

__all__ = ["add"]

_EXAMPLE = """\
examples:
  ds-osdp run train.py --deepspeed_config ds.json                                one process
  deepspeed --module ds_osdp.run train.py --deepspeed_config ds.json             one process a GPU
  torchrun --nproc_per_node 8 --module ds_osdp.run train.py --deepspeed_config ds.json
"""


def add(verbs: Verbs) -> None:
    """Add the verb to the command line."""
    parser = verbs.add_parser(
        "run",
        help="run an unmodified training script with its plan applied",
        description="Run SCRIPT as it is; deepspeed.initialize applies the osdp section. Launchers take ds_osdp.run.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="of the script")
    parser.set_defaults(run=_run, format="text")


def _run(arguments: argparse.Namespace) -> int:
    run.main([arguments.script, *arguments.arguments])
    return 0
