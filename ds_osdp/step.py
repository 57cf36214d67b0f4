"""How the prices of units add up to one optimizer step: its seconds, and its memory from moment to moment.

Units that cost the same are one *kind*: everything here scales with the number of units in simple arithmetic, and the
solver's model with the number of kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ds_osdp.cluster import Cluster
from ds_osdp.errors import PlanMismatchError
from ds_osdp.job import Job
from ds_osdp.plan import Stage
from ds_osdp.prices import (
    Option,
    Price,
    Space,
    deferred_bucket_bytes,
    kept_until_backward,
    legal_options,
    price,
    working_bytes,
)
from ds_osdp.profile import DTYPE_BYTES, ModelProfile, Work

__all__ = [
    "Column",
    "Instance",
    "Kind",
    "Live",
    "Moment",
    "Totals",
    "Window",
    "backward_ends",
    "backward_ns",
    "columns",
    "evaluate",
    "forward_ends",
    "priced",
    "timeline",
]

_LEAST_GATHER = 0.1
"""Of what a rank holds at least between steps: units that are larger when gathered are offered in slices."""

Integers = npt.NDArray[np.int64]
Column = Callable[[str], Integers]


@dataclass(frozen=True, slots=True)
class Kind:
    """Units that cannot be told apart by what they cost."""

    options: tuple[Option, ...]
    prices: tuple[Price, ...]
    kept: bool
    """Whether its gathered parameters stay from forward to backward."""
    gathered_again: bool
    """Whether they are freed after forward and gathered again for backward."""


@dataclass(frozen=True, slots=True)
class Window:
    """What is there beside each unit at work because of others: a price of the units from ``begin`` to ``end``, and a constant.

    Which units they are depends on the plan; this bounds them from above and is linear in the plan.
    """

    begin: Integers
    end: Integers
    bytes: Integers


@dataclass(frozen=True, slots=True)
class Live:
    """Gathered parameters beside each unit at work: what is kept, what the prefetcher holds, and its own."""

    ahead: Window
    """What the prefetcher holds."""
    least: Integers
    """All together are no less than this where the prefetcher fills what ``stage3_max_live_parameters`` leaves free; else 0."""


@dataclass(frozen=True)
class Instance:
    """All that the solver's model needs: numbers only."""

    units: tuple[str, ...]
    """In the order of one forward."""
    kinds: tuple[Kind, ...]
    kind_of: tuple[int, ...]
    """Per unit."""
    live_forward: Live
    live_backward: Live
    """Its prefetcher holds what is not kept from forward."""
    regathered: Window
    """In forward, the flat tensors in which what is kept whole was gathered behind the step before."""
    flat_elements: tuple[int, int]
    """Of all elements, so many that are gathered together: the flat tensor they arrive in lives until the last is used."""
    staging: Window
    """In backward, the padded copy of the bucket that a reduce-scatter makes."""
    fixed_bytes: int
    """Held all the time whatever the plan: DeepSpeed's reduce bucket, allocated whole at start, and the model's buffers."""
    update_limits: dict[int, int]
    """By degree, the most that the optimizer needs for what is spread over so many ranks: a sub-group at a time."""
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
        flags = {
            flag: column([[int(getattr(kind, flag))] * len(kind.options) for kind in self.kinds])
            for flag in ("kept", "gathered_again")
        }
        return {**prices, **flags, "degree": degrees}

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
    works_backward = [units[first[sort]].backward != Work() for sort in sort_of]
    kept = kept_until_backward(elements.tolist(), works_backward, job)
    kinds: dict[tuple[int, bool, Stage | None], int] = {}
    pinned = pins if pins is not None else [None] * len(units)
    kind_of = [kinds.setdefault(key, len(kinds)) for key in zip(sort_of, kept, pinned, strict=True)]
    sharded = Option(Stage.FULLY_SHARDED, job.world_size)
    leanest = {sort: price(units[u], sharded, job, cluster, gathered_again=True) for sort, u in first.items()}
    # What is gathered without being felt is not offered in slices: the solver's time is for what can bind.
    splits_from = _LEAST_GATHER * sum(leanest[sort].resident_bytes for sort in sort_of)
    whole_only = replace(space, max_slices=1)
    made = []
    for sort, keep, pin in kinds:
        unit = units[first[sort]]
        splits = leanest[sort].gathered_bytes >= splits_from
        options = legal_options(unit, job, cluster, space if splits else whole_only, pin)
        again = not keep and unit.backward != Work()
        prices = tuple(price(unit, option, job, cluster, gathered_again=again) for option in options)
        made.append(Kind(options, prices, keep, again))
    trainable = np.array([sum(p.numel for p in units[first[s]].parameters if p.trainable) for s in range(sorts)])
    wire = DTYPE_BYTES[job.communication_dtype]
    largest = max((p.numel for u in first.values() for p in units[u].parameters), default=0)
    live_forward, live_backward = _live(elements, largest, job)
    regathered = _regathered(elements, deferred_bucket_bytes(cluster, job.world_size), job)
    return Instance(
        units=tuple(unit.name for unit in units),
        kinds=tuple(made),
        kind_of=tuple(kind_of),
        live_forward=live_forward,
        live_backward=live_backward,
        regathered=regathered,
        flat_elements=(min(job.prefetch_bucket_size, int(elements.sum())), max(1, int(elements.sum()))),
        staging=_staging(trainable[sort_of], job),
        fixed_bytes=job.reduce_bucket_size * wire + profile.buffer_bytes,
        update_limits=_update_limits(made, largest, job),
        accumulation=job.accumulation,
        samples_per_step=job.micro_batch * job.accumulation * job.world_size,
    )


def evaluate(problem: Instance, choice: Sequence[int]) -> Totals:
    """Add up one choice of an option index per unit, in exact integers: equations (1) to (6) of docs/model.md."""
    column = columns(problem, choice)
    first = int(forward_ends(column, "gather_first_ns")[1][-1])
    forward = int(forward_ends(column, "gather_forward_ns")[1][-1])
    last = backward_ns(column, "last_backward_ns", "last_reduce_ns")
    between = backward_ns(column, "backward_ns", "reduce_ns")
    more = problem.accumulation - 1
    moments = _moments(problem, column)
    sizes = np.sum(list(moments.kinds.values()), axis=0)
    peak = int(np.argmax(sizes))
    return Totals(
        step_ns=first + more * (forward + between) + last + int(column("update_ns").sum()),
        resident_bytes=int(column("resident_bytes").sum()),
        peak_bytes=int(sizes[peak]),
        peak_moment=_moment_name(problem, moments.degrees, peak),
    )


@dataclass(frozen=True, slots=True)
class Moment:
    """One moment of a step."""

    name: str
    """Such as ``backward of 'lm_head'``."""
    bytes: dict[str, int]
    """By kind: parameters, gradients, optimizer_states, activations, gathered, buckets, other."""

    @property
    def total_bytes(self) -> int:
        """All kinds."""
        return sum(self.bytes.values())


def timeline(problem: Instance, choice: Sequence[int]) -> tuple[Moment, ...]:
    """Bytes per rank by kind at every moment of the step, in order: the left sides of equation (3)."""
    moments = _moments(problem, columns(problem, choice))
    rows = zip(*(sizes.tolist() for sizes in moments.kinds.values()), strict=True)
    return tuple(
        Moment(_moment_name(problem, moments.degrees, i), dict(zip(moments.kinds, row, strict=True)))
        for i, row in enumerate(rows)
    )


def columns(problem: Instance, choice: Sequence[int]) -> Column:
    """One price of every unit, by its name, as an array."""
    place = problem.kind_index * problem.widest + np.asarray(choice)

    def column(name: str) -> Integers:
        taken: Integers = problem.columns[name][place]
        return taken

    return column


@dataclass(frozen=True, slots=True)
class _Moments:
    """The forward of each unit, the backward of each in reverse, the update of each degree."""

    kinds: dict[str, Integers]
    degrees: list[int]


def _moments(problem: Instance, column: Column) -> _Moments:
    """Equation (3), by kind."""
    n = len(problem.units)
    kept, degree = column("kept"), column("degree")
    gathered, saved, whole = column("gathered_bytes"), column("activation_bytes"), column("whole_bytes")
    saved_before, kept_before = _sums(saved)[:-1], _sums(kept * gathered)[:-1]
    viewed = np.cumsum(column("viewed_bytes"))
    again = column("gathered_again") * gathered
    # Rounded up: what the solver's model takes for fitting must fit.
    flat = -(-int(gathered.sum()) * problem.flat_elements[0] // problem.flat_elements[1])
    # What waits for the next gradient was left by the unit behind.
    waiting = np.append(column("waiting_bytes")[1:], 0)
    degrees = sorted(set(degree.tolist()))
    updates = [_update_bytes(problem, column, degree == d, d) for d in degrees]

    def moments(forward: Integers, backward: Integers, update: Sequence[int] | int = 0) -> Integers:
        return np.concatenate([forward, backward[::-1], np.broadcast_to(update, len(degrees))])

    def always(size: int) -> Integers:
        return np.full(2 * n + len(degrees), size, dtype=np.int64)

    nothing = np.zeros(n, dtype=np.int64)
    in_forward = _alive(problem.live_forward, kept_before + gathered, gathered) + _within(problem.regathered, whole) + flat
    in_backward = _alive(problem.live_backward, kept_before + kept * gathered + again, again) + flat
    kinds = {
        "parameters": always(int(column("parameter_bytes").sum())) - moments(nothing, nothing, int(whole.sum())),
        "gradients": always(int(column("gradient_bytes").sum())),
        "optimizer_states": always(int(column("state_bytes").sum())),
        "activations": moments(saved_before + saved, saved_before + saved),
        "gathered": moments(in_forward + viewed, in_backward + viewed),
        "buckets": always(problem.fixed_bytes)
        + moments(nothing, _within(problem.staging, column("scattered_bytes")) + waiting),
        "other": moments(column("forward_bytes"), column("backward_bytes"), updates),
    }
    return _Moments(kinds, degrees)


def _update_bytes(problem: Instance, column: Column, members: npt.NDArray[np.bool_], degree: int) -> int:
    """DeepSpeed takes all norms, then updates one sub-group after the other, of one degree each."""
    together = min(int(column("update_bytes")[members].sum()), problem.update_limits[degree])
    return max(together, int(column("norm_bytes")[members].max()))


def _within(window: Window, sizes: Integers) -> Integers:
    before = _sums(sizes)
    within: Integers = before[window.end] - before[window.begin] + window.bytes
    return within


def _alive(live: Live, used: Integers, prefetched: Integers) -> Integers:
    return np.maximum(used, live.least) + _within(live.ahead, prefetched)


def _moment_name(problem: Instance, degrees: Sequence[int], index: int) -> str:
    n = len(problem.units)
    if index >= 2 * n:
        return f"optimizer step of units spread over {degrees[index - 2 * n]}"
    return f"forward of {problem.units[index]!r}" if index < n else f"backward of {problem.units[2 * n - 1 - index]!r}"


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


def _window(listed: npt.NDArray[np.bool_], begin: Integers, end: Integers, bound: int) -> Window:
    """The units from ``begin`` to ``end`` where ``listed``; elsewhere, where there are any, the bound."""
    return Window(begin * listed, end * listed, bound * ((begin < end) & ~listed))


def _live(elements: Integers, largest: int, job: Job) -> tuple[Live, Live]:
    """What the prefetcher adds, per unit, in forward (the units behind it) and in backward (the units before it).

    It stops once ``stage3_max_live_parameters`` elements are there, the last parameter whole.
    """
    n, limit = len(elements), job.max_live_parameters
    before, width = _sums(elements), DTYPE_BYTES[job.parameter_dtype]
    units, none = np.arange(n), np.zeros(n, dtype=np.int64)

    def live(all_fit: npt.NDArray[np.bool_], begin: Integers, end: Integers) -> Live:
        if job.prefetch_bucket_size == 0:
            return Live(Window(none, none, none), none)
        ahead = _window(all_fit, begin, end, largest * width)
        return Live(ahead, limit * width * (ahead.bytes > 0))

    in_forward = live(before[n] - before[units] <= limit, units + 1, np.full(n, n))
    return in_forward, live(before[units + 1] <= limit, none, units)


def _regathered(elements: Integers, bucket_bytes: int, job: Job) -> Window:
    """What the gathers behind a step hold in the next forward: of the buckets whose last parameter is still to be used, the
    flat tensors that the parameters were copied from.
    """
    n = len(elements)
    listed = np.full(n, int(elements.sum()) * DTYPE_BYTES[job.parameter_dtype] <= bucket_bytes)
    return _window(listed, np.zeros(n, dtype=np.int64), np.append(np.full(n - 1, n), 0), bucket_bytes)


def _staging(trainable: Integers, job: Job) -> Window:
    """A bucket is copied when it is full, or when all of backward is done: it holds gradients of units behind."""
    n, before = len(trainable), _sums(trainable)
    behind = before[n] - before[np.arange(n) + 1]
    bound = job.reduce_bucket_size * DTYPE_BYTES[job.communication_dtype]
    return _window(behind <= job.reduce_bucket_size, np.arange(n) + 1, np.full(n, n), bound)


def _update_limits(kinds: Sequence[Kind], largest: int, job: Job) -> dict[int, int]:
    """A sub-group ends with the parameter that fills it, ``sub_group_size`` elements of a rank's part."""
    degrees = {option.degree for kind in kinds for option in kind.options}
    return {d: (job.sub_group_size + -(-largest // d)) * working_bytes(job) for d in degrees}


def _sums(values: Integers) -> Integers:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(values)])
