"""What all verbs share of their output: the exit statuses and the two formats."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

__all__ = ["EXIT_BAD_INPUT", "EXIT_INFEASIBLE", "EXIT_UNFIT_DEEPSPEED", "add_format", "print_json", "working"]

EXIT_BAD_INPUT = 2
EXIT_INFEASIBLE = 3
EXIT_UNFIT_DEEPSPEED = 3

if TYPE_CHECKING:
    # The type has no public name.
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]


def add_format(parser: argparse.ArgumentParser) -> None:
    """The choice between text for people and JSON for programs."""
    parser.add_argument("--format", choices=("text", "json"), default="text")


def print_json(value: Any) -> None:
    """Print ``value`` and nothing else."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show on a terminal that something goes on, and for how long; nothing stays when it ends."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        progress.add_task(what)
        yield
