"""How the prices of units add up to one optimizer step: its seconds, and its memory from moment to moment.

Units that cost the same are one *kind*: everything here scales with the number of units in simple arithmetic, and the
solver's model with the number of kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ds_osdp.cluster import Cluster
from ds_osdp.errors import PlanMismatchError
from ds_osdp.job import Job
from ds_osdp.plan import Stage
from ds_osdp.prices import Option, Price, Space, kept_until_backward, legal_options, price
from ds_osdp.profile import DTYPE_BYTES, ModelProfile

__all__ = [
    "Ahead",
    "Column",
    "Instance",
    "Kind",
    "Totals",
    "backward_ends",
    "backward_ns",
    "columns",
    "evaluate",
    "forward_ends",
    "memory",
    "priced",
]

Integers = npt.NDArray[np.int64]
Column = Callable[[str], Integers]


@dataclass(frozen=True, slots=True)
class Kind:
    """Units that cannot be told apart by what they cost."""

    options: tuple[Option, ...]
    prices: tuple[Price, ...]
    kept: bool
    """Whether its gathered parameters stay from forward to backward."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """What the prefetcher may hold beside each unit at work: the gathered units from ``begin`` to ``end``, or a bound.

    Which units it holds depends on the plan; either bounds it from above and is linear in the plan.
    """

    begin: Integers
    end: Integers
    bytes: Integers


@dataclass(frozen=True)
class Instance:
    """All that the solver's model needs: numbers only."""

    units: tuple[str, ...]
    """In the order of one forward."""
    kinds: tuple[Kind, ...]
    kind_of: tuple[int, ...]
    """Per unit."""
    ahead_forward: Ahead
    ahead_backward: Ahead
    bucket_bytes: int
    """DeepSpeed's reduce bucket, allocated whole at start."""
    staging_bytes: int
    """The padded copy of the bucket that a reduce-scatter makes."""
    accumulation: int
    samples_per_step: int

    @cached_property
    def widest(self) -> int:
        """The most options a kind has."""
        return max(len(kind.options) for kind in self.kinds)

    @cached_property
    def kind_index(self) -> Integers:
        """``kind_of``, to index arrays with."""
        return np.array(self.kind_of, dtype=np.int64)

    @cached_property
    def columns(self) -> dict[str, Integers]:
        """Every price and degree, and whether it is kept, of every option of every kind, padded to the widest."""

        def column(values: list[list[int]]) -> Integers:
            rows = np.zeros((len(self.kinds), self.widest), dtype=np.int64)
            for row, own in zip(rows, values, strict=True):
                row[: len(own)] = own
            return rows.reshape(-1)

        names = [*Price.__dataclass_fields__, "resident_bytes"]
        prices = {name: column([[getattr(p, name) for p in kind.prices] for kind in self.kinds]) for name in names}
        degrees = column([[option.degree for option in kind.options] for kind in self.kinds])
        return {**prices, "degree": degrees, "kept": column([[int(kind.kept)] * len(kind.options) for kind in self.kinds])}

    def options(self, unit: int) -> tuple[Option, ...]:
        """Of the unit with that index."""
        return self.kinds[self.kind_of[unit]].options

    def prices(self, unit: int) -> tuple[Price, ...]:
        """Of the unit with that index."""
        return self.kinds[self.kind_of[unit]].prices

    def chosen(self, choice: Sequence[int]) -> list[Price]:
        """The price each unit pays."""
        return [self.prices(u)[index] for u, index in enumerate(choice)]


@dataclass(frozen=True, slots=True)
class Totals:
    """A choice of one option per unit, added up."""

    step_ns: int
    resident_bytes: int
    peak_bytes: int
    peak_moment: str


def priced(
    profile: ModelProfile,
    cluster: Cluster,
    job: Job,
    space: Space,
    pins: Sequence[Stage | None] | None = None,
) -> Instance:
    """Price every option of every unit.

    Args:
        profile: the model, traced with ``job.micro_batch`` samples.
        cluster: the machines.
        job: the training job.
        space: what a plan may use.
        pins: per unit of ``profile``, the stage a rule pins it to.

    Raises:
        PlanMismatchError: the profile was traced with another micro-batch than the job's.
    """
    if profile.micro_batch != job.micro_batch:
        raise PlanMismatchError(
            f"the profile was traced with micro-batch {profile.micro_batch} and the job's is {job.micro_batch}: profile again"
        )
    units = profile.units
    sort_of = list(profile.alike)
    sorts = max(sort_of, default=-1) + 1
    first = {sort: u for u, sort in reversed(list(enumerate(sort_of)))}
    elements = np.array([units[first[sort]].numel for sort in range(sorts)])[sort_of]
    kept = kept_until_backward(elements.tolist(), job)
    kinds: dict[tuple[int, bool, Stage | None], int] = {}
    pinned = pins if pins is not None else [None] * len(units)
    kind_of = [kinds.setdefault(key, len(kinds)) for key in zip(sort_of, kept, pinned, strict=True)]
    made = []
    for sort, keep, pin in kinds:
        unit = units[first[sort]]
        options = legal_options(unit, job, cluster, space, pin)
        made.append(Kind(options, tuple(price(unit, option, job, cluster, kept=keep) for option in options), keep))
    shards = any(option.stage >= Stage.GRADIENTS for kind in made for option in kind.options)
    trainable = np.array([sum(p.numel for p in units[first[s]].parameters if p.trainable) for s in range(sorts)])
    wire = DTYPE_BYTES[job.communication_dtype]
    largest = max((p.numel for u in first.values() for p in units[u].parameters), default=0)
    ahead_forward, ahead_backward = _ahead(elements, largest, job)
    return Instance(
        units=tuple(unit.name for unit in units),
        kinds=tuple(made),
        kind_of=tuple(kind_of),
        ahead_forward=ahead_forward,
        ahead_backward=ahead_backward,
        bucket_bytes=job.reduce_bucket_size * wire,
        staging_bytes=min(job.reduce_bucket_size, int(trainable[sort_of].sum())) * wire if shards else 0,
        accumulation=job.accumulation,
        samples_per_step=job.micro_batch * job.accumulation * job.world_size,
    )


def evaluate(problem: Instance, choice: Sequence[int]) -> Totals:
    """Add up one choice of an option index per unit, in exact integers: equations (1) to (6) of docs/model.md."""
    column = columns(problem, choice)
    n = len(problem.units)
    first = int(forward_ends(column, "gather_first_ns")[1][-1])
    forward = int(forward_ends(column, "gather_forward_ns")[1][-1])
    last = backward_ns(column, "last_backward_ns", "last_reduce_ns")
    between = backward_ns(column, "backward_ns", "reduce_ns")
    more = problem.accumulation - 1
    sizes, degrees = _moments(problem, column)
    peak = int(np.argmax(sizes))
    return Totals(
        step_ns=first + more * (forward + between) + last + int(column("update_ns").sum()),
        resident_bytes=int(column("resident_bytes").sum()),
        peak_bytes=int(sizes[peak]),
        peak_moment=_moment_name(problem, peak) if peak < 2 * n else _update_name(degrees[peak - 2 * n]),
    )


def memory(problem: Instance, choice: Sequence[int]) -> dict[str, int]:
    """Bytes per rank at every moment of the step, in order: the left sides of equation (3)."""
    sizes, degrees = _moments(problem, columns(problem, choice))
    names = [_moment_name(problem, i) for i in range(2 * len(problem.units))] + [_update_name(d) for d in degrees]
    return dict(zip(names, sizes.tolist(), strict=True))


def columns(problem: Instance, choice: Sequence[int]) -> Column:
    """One price of every unit, by its name, as an array."""
    place = problem.kind_index * problem.widest + np.asarray(choice)

    def column(name: str) -> Integers:
        taken: Integers = problem.columns[name][place]
        return taken

    return column


def _moments(problem: Instance, column: Column) -> tuple[Integers, list[int]]:
    """Bytes at every moment: the forward of each unit, the backward of each in reverse, the update of each degree."""
    kept = column("kept")
    gathered, saved = column("gathered_bytes"), column("activation_bytes")
    held = int(column("resident_bytes").sum()) + problem.bucket_bytes
    alive = _sums(saved + kept * gathered)[:-1]
    every, freed = _sums(gathered), _sums((1 - kept) * gathered)
    a, b = problem.ahead_forward, problem.ahead_backward
    forward = held + alive + gathered + column("forward_bytes") + every[a.end] - every[a.begin] + a.bytes
    backward = held + problem.staging_bytes + alive + saved + gathered + column("backward_bytes")
    backward += freed[b.end] - freed[b.begin] + b.bytes
    degree = column("degree")
    degrees = sorted(set(degree.tolist()))
    # DeepSpeed updates one partition group after the other.
    updates = [held + int(column("update_bytes")[degree == d].sum()) for d in degrees]
    return np.concatenate([forward, backward[::-1], updates]), degrees


def _moment_name(problem: Instance, index: int) -> str:
    n = len(problem.units)
    return f"forward of {problem.units[index]!r}" if index < n else f"backward of {problem.units[2 * n - 1 - index]!r}"


def _update_name(degree: int) -> str:
    return f"optimizer step of units spread over {degree}"


def forward_ends(column: Column, gather: str) -> tuple[Integers, Integers]:
    """Equation (4): when the gather and the computation of each unit end, in nanoseconds from the begin of a forward.

    Gathers run on one channel in order, computation follows: a two-machine flow shop.
    """
    gathered = np.cumsum(column(gather))
    return gathered, _behind(gathered, column("forward_ns"))


def backward_ends(column: Column, computation: str, reduction: str) -> tuple[Integers, Integers, Integers]:
    """Equations (5) and (6): when the gather, the computation and the reduction of each unit end, last unit first.

    Each machine takes its work in order, and each piece behind the one before it.
    """
    # What the units before have waited for was on the channel as well.
    gathered = np.cumsum(column("gather_backward_ns")[::-1]) + _sums(column("waited_ns")[::-1])[:-1]
    computed = _behind(gathered, column(computation)[::-1])
    return gathered, computed, _behind(computed, column(reduction)[::-1])


def backward_ns(column: Column, computation: str, reduction: str) -> int:
    """How long a backward takes: B of equation (5), or L of (6)."""
    _, computed, reduced = backward_ends(column, computation, reduction)
    # Everything sent goes over one channel: together it takes its sum, whatever is in between.
    sent = column("gather_backward_ns") + column("waited_ns") + column(reduction)
    return max(int(computed[-1]), int(reduced[-1]), int(sent.sum()))


def _behind(ready: Integers, takes: Integers) -> Integers:
    """When each task of a machine ends, that takes them in order and none before it is ready: e_i = max(e_{i-1}, r_i) + t_i."""
    done = np.cumsum(takes)
    return done + np.maximum.accumulate(ready - (done - takes))


def _ahead(elements: Integers, largest: int, job: Job) -> tuple[Ahead, Ahead]:
    """What the prefetcher may hold, per unit, in forward (the units behind it) and in backward (the units before it).

    It stops once it has asked for ``stage3_prefetch_bucket_size`` elements, the last parameter whole.
    """
    n, bucket = len(elements), job.prefetch_bucket_size
    before = _sums(elements)
    bound = (bucket + largest) * DTYPE_BYTES[job.parameter_dtype]

    def ahead(begin: Integers, end: Integers) -> Ahead:
        some = (begin < end) & (bucket > 0)
        listed = some & (before[end] - before[begin] <= bucket)
        return Ahead(begin * listed, end * listed, bound * (some & ~listed))

    units = np.arange(n)
    return ahead(units + 1, np.full(n, n)), ahead(np.zeros(n, dtype=np.int64), units)


def _sums(values: Integers) -> Integers:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(values)])
