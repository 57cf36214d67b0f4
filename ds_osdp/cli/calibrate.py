"""``ds-osdp calibrate``: measure the links and the devices of the ranks that run it."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, get_args

from rich.console import Console
from rich.table import Table

from ds_osdp.cli.inputs import positive
from ds_osdp.cli.output import add_format, print_json
from ds_osdp.cluster import Cluster, Collectives, Line
from ds_osdp.errors import ConfigError
from ds_osdp.prices import Operation
from ds_osdp.quantities import format_seconds

if TYPE_CHECKING:
    from ds_osdp.cli.output import Verbs

__all__ = ["add"]

_EXAMPLE = """\
examples, on every node:
  torchrun --nnodes 4 --nproc_per_node 8 --rdzv_endpoint HOST:29400 --module ds_osdp calibrate --output cluster.json
  deepspeed --hostfile HOSTS --module ds_osdp calibrate --output cluster.json
"""


def add(verbs: Verbs) -> None:
    """Add the verb to the command line."""
    parser = verbs.add_parser(
        "calibrate",
        help="measure links and devices, on all ranks of a launcher, in about a minute",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", metavar="cluster.json", help="rank 0 writes the cluster here, for osdp.cluster")
    parser.add_argument(
        "--seconds", type=positive, default=60, metavar="S", help="about how long to measure links; fewer measure fewer sizes"
    )
    parser.add_argument("--timeout", type=positive, default=60, metavar="SECONDS", help="to wait for a rank that does not come")
    add_format(parser)
    parser.set_defaults(run=_calibrate)


def _calibrate(arguments: argparse.Namespace) -> int:
    # torch takes seconds to import.
    from ds_osdp import measure

    with measure.joined_ranks(arguments.timeout) as rank:
        machines = measure.machines_of_this_job(measure.ranks_per_node())
        if machines.world_size == 1:
            raise ConfigError("one rank has no links to measure: start it on all ranks that will train")
        effort = replace(measure.THOROUGH, seconds=arguments.seconds)
        cluster = measure.measure_cluster(machines, effort=effort, timeout_seconds=arguments.timeout)
        if rank == 0:
            _report(cluster, arguments)
    return 0


def _report(cluster: Cluster, arguments: argparse.Namespace) -> None:
    if arguments.output:
        cluster.save(arguments.output)
    if arguments.format == "json":
        print_json(cluster.to_dict())
        return
    console = Console()
    console.print(_table(cluster))
    device = cluster.device
    console.print(f"device: {device.flops_per_second / 1e12:.4g} TFLOP/s, {device.bytes_per_second / 1e9:.4g} GB/s of memory")
    console.print(cluster.source, style="dim")
    if arguments.output:
        console.print(f'written to {arguments.output}; use it with "osdp": {{"cluster": "{arguments.output}"}}')
    sys.stdout.flush()


def _table(cluster: Cluster) -> Table:
    table = Table(title=cluster.name, title_justify="left")
    for heading in ("collective", "over", "waited for", "beside computation", "holds it up"):
        table.add_column(heading)
    groups: dict[str, Collectives | None] = {"world": cluster.world, "node": cluster.node, "nodes": cluster.across}
    for over, collectives in groups.items():
        for operation in get_args(Operation) if collectives else ():
            link = getattr(collectives, operation)
            beside = link.overlapped
            table.add_row(operation, over, _figures(link), _figures(beside), f"{100 * beside.computation_share:.0f}%")
    return table


def _figures(line: Line) -> str:
    """Latency per hop, bandwidth, and how far the measured sizes are from them."""
    rate = f"{line.bytes_per_second / 1e9:.3g} GB/s"
    return f"{format_seconds(line.latency_seconds)}, {rate} ±{line.residual_percent:.0f}%"
