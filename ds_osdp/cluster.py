"""What is known about the machines: how fast a device computes, and what each collective costs."""

from __future__ import annotations

from importlib import resources
from typing import ClassVar

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from ds_osdp.frozen import Document, Frozen

__all__ = ["DEFAULT_CLUSTER", "Cluster", "Collectives", "Device", "Link"]

DEFAULT_CLUSTER = "a100-80g-8x-200g"
"""The shipped cluster that plans are made for when neither machines nor a cluster file are at hand."""


class Link(Frozen):
    """Latency and bandwidth of one collective over one group, in the terms of a ring.

    A collective over N ranks takes (N - 1) hops (an all-reduce twice as many); each hop costs the latency and moves
    1/N of the tensor.  Measured figures are converted to these terms, so that they can be read at another N.
    """

    latency_seconds: NonNegativeFloat
    """Seconds per hop."""
    bytes_per_second: PositiveFloat
    """Bytes that one rank sends per second while the collective runs."""


class Collectives(Frozen):
    """The three collectives of ZeRO over one group of ranks."""

    all_gather: Link
    reduce_scatter: Link
    all_reduce: Link


class Device(Frozen):
    """Rates of one device, as a training step reaches them (not the peak of a data sheet)."""

    flops_per_second: PositiveFloat
    bytes_per_second: PositiveFloat
    memory_bytes: PositiveInt | None = None
    """What it holds, if that is known without asking it."""


class Cluster(Document):
    """Devices, nodes and links; what a price is computed with."""

    FORMAT: ClassVar[str] = "ds_osdp.cluster"
    VERSION: ClassVar[int] = 1

    name: str
    ranks_per_node: PositiveInt
    device: Device
    world: Collectives
    """Over all ranks."""
    node: Collectives | None = None
    """Over ranks of one node, where that differs."""
    across: Collectives | None = None
    """Over one rank of every node, where that differs from the world."""
    reduce_scatter_blocks: bool = False
    """Whether DeepSpeed waits for a reduce-scatter before it goes on computing, as it does where the device has no
    streams (CPU and gloo); on CUDA it runs beside the backward pass."""
    source: str = ""
    """Where the figures come from: measured on which hosts, or whose publication."""

    def collectives_over(self, ranks: int) -> Collectives:
        """The collectives of a group of ``ranks`` neighbouring ranks: inside a node if they fit in one."""
        return self.node if self.node is not None and ranks <= self.ranks_per_node else self.world

    def collectives_across_nodes(self) -> Collectives:
        """The collectives of a group that has one rank in every node."""
        return self.across if self.across is not None else self.world

    @classmethod
    def shipped(cls, name: str) -> Cluster:
        """The cluster file of that name which comes with the package."""
        return cls.load(str(resources.files("ds_osdp") / "clusters" / f"{name}.json"))
