"""What is known about the machines: how fast a device computes, and what each collective costs."""

from __future__ import annotations

from importlib import resources
from typing import ClassVar

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from ds_osdp.errors import ClusterMismatchError
from ds_osdp.frozen import Document, Frozen

__all__ = ["DEFAULT_CLUSTER", "Cluster", "Collectives", "Device", "Line", "Link", "Machines", "Overlapped"]

DEFAULT_CLUSTER = "a100-80g-8x-200g"
"""The shipped cluster that plans are made for when neither machines nor a cluster file are at hand."""


class Line(Frozen):
    """Latency and bandwidth of one collective over one group, in the terms of a ring.

    A collective over N ranks takes (N - 1) hops (an all-reduce twice as many); each hop costs the latency and moves
    1/N of the tensor.  Measured figures are converted to these terms, so that they can be read at another N.
    """

    latency_seconds: NonNegativeFloat
    """Seconds per hop."""
    bytes_per_second: PositiveFloat
    """Bytes that one rank sends per second while the collective runs."""
    residual_percent: NonNegativeFloat | None = None
    """How far measured sizes are from this line: the mean of their relative differences."""


class Overlapped(Line):
    """A collective beside computation: it may take longer, and it may hold the computation up."""

    computation_share: NonNegativeFloat
    """Seconds by which the computation is held up, per second that the collective takes alone."""


class Link(Line):
    """One collective over one group while the ranks wait for it, and while they compute."""

    overlapped: Overlapped | None = None
    """None: as when waited for, at no cost to the computation."""


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


class Machines(Frozen):
    """What figures were measured on."""

    hosts: tuple[str, ...]
    world_size: PositiveInt
    ranks_per_node: PositiveInt
    device: str
    """Name of the device model; ``cpu`` without one."""
    backend: str
    dtype: str
    torch: str
    """Its version, which brings that of gloo and NCCL."""

    def differences(self, other: Machines) -> str:
        """What differs, for people: ``backend is gloo, not nccl``; empty if nothing does."""
        ours, theirs = self.model_dump(mode="json"), other.model_dump(mode="json")
        return ", ".join(f"{key} is {ours[key]}, not {theirs[key]}" for key in ours if ours[key] != theirs[key])


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
    """Where the figures come from: measured how, or whose publications."""
    sources: dict[str, str] = Field(default_factory=dict)
    """By figure, such as ``node.bytes_per_second``, who published it."""
    machines: Machines | None = None
    """What they were measured on; None if they are published."""
    date: str | None = None
    """When they were measured."""

    def collectives_over(self, ranks: int) -> Collectives:
        """The collectives of a group of ``ranks`` neighbouring ranks: inside a node if they fit in one."""
        return self.node if self.node is not None and ranks <= self.ranks_per_node else self.world

    def collectives_across_nodes(self) -> Collectives:
        """The collectives of a group that has one rank in every node."""
        return self.across if self.across is not None else self.world

    @property
    def node_differs(self) -> bool:
        """Whether it is known what links inside a node cost, and what those between nodes do."""
        return self.node is not None and self.ranks_per_node > 1

    def check_describes(self, machines: Machines, source: str) -> None:
        """Refuse to plan a job on ``machines`` with figures that cannot be theirs.

        Hosts and the number of ranks may differ: schedulers give other hosts of one sort, and links are in terms that hold
        for any number of ranks.

        Args:
            machines: what the job runs on.
            source: what to call this cluster in the error.

        Raises:
            ClusterMismatchError: naming what differs.
        """
        differs = []
        ranks = machines.ranks_per_node
        # One node, however many ranks it could hold, has the same links.
        if self.ranks_per_node != ranks and machines.world_size > min(ranks, self.ranks_per_node):
            differs.append(f"it has {self.ranks_per_node} ranks per node, the job {ranks}")
        if self.machines is not None:
            differs += [
                f"it was measured with {name} {there}, the job has {here}"
                for name, there, here in (
                    ("the device", self.machines.device, machines.device),
                    ("backend", self.machines.backend, machines.backend),
                    ("torch", self.machines.torch, machines.torch),
                )
                if there != here
            ]
        if differs:
            raise ClusterMismatchError(
                f"{source} ({self.name}) does not describe this job: {'; '.join(differs)}. Measure these machines with "
                "`ds-osdp calibrate`, or leave osdp.cluster out to have it done at start"
            )

    @classmethod
    def shipped_names(cls) -> list[str]:
        """Names of the cluster files that come with the package."""
        folder = resources.files("ds_osdp") / "clusters"
        return sorted(file.name.removesuffix(".json") for file in folder.iterdir() if file.name.endswith(".json"))

    @classmethod
    def shipped(cls, name: str) -> Cluster:
        """The cluster file of that name which comes with the package."""
        return cls.load(str(resources.files("ds_osdp") / "clusters" / f"{name}.json"))
