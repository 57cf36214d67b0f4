"""How the prices of units add up to one optimizer step: its seconds, and its memory from moment to moment.

Units that cost the same are one *kind*: everything here scales with the number of units in simple arithmetic, and the
solver's model with the number of kinds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ds_osdp.cluster import Cluster
from ds_osdp.errors import PlanMismatchError
from ds_osdp.job import Job
from ds_osdp.plan import Stage
from ds_osdp.prices import Option, Price, Space, kept_until_backward, legal_options, price
from ds_osdp.profile import DTYPE_BYTES, ModelProfile, UnitProfile

__all__ = ["Ahead", "Instance", "Kind", "Totals", "evaluate", "memory", "priced"]

Bytes = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Kind:
    """Units that cannot be told apart by what they cost."""

    options: tuple[Option, ...]
    prices: tuple[Price, ...]
    kept: bool
    """Whether its gathered parameters stay from forward to backward."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """What the prefetcher may hold beside the unit at work: the gathered units of a range, or a bound in bytes.

    Which units it holds depends on the plan; either bounds it from above and is linear in the plan.
    """

    begin: int
    end: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Instance:
    """All that the solver's model needs: numbers only."""

    units: tuple[str, ...]
    """In the order of one forward."""
    kinds: tuple[Kind, ...]
    kind_of: tuple[int, ...]
    """Per unit."""
    ahead_forward: tuple[Ahead, ...]
    ahead_backward: tuple[Ahead, ...]
    bucket_bytes: int
    """DeepSpeed's reduce bucket, allocated whole at start."""
    staging_bytes: int
    """The padded copy of the bucket that a reduce-scatter makes."""
    look_ahead: int
    """How many units' gathers go before a reduction on the channel in backward: what the prefetcher has asked for."""
    accumulation: int
    samples_per_step: int

    def options(self, unit: int) -> tuple[Option, ...]:
        """Of the unit with that index."""
        return self.kinds[self.kind_of[unit]].options

    def prices(self, unit: int) -> tuple[Price, ...]:
        """Of the unit with that index."""
        return self.kinds[self.kind_of[unit]].prices

    def chosen(self, choice: Sequence[int]) -> list[Price]:
        """The price each unit pays."""
        return [self.kinds[kind].prices[index] for kind, index in zip(self.kind_of, choice, strict=True)]


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
    kinds: dict[object, int] = {}
    made: list[Kind] = []
    kind_of = []
    kept = kept_until_backward(units, job)
    for u, unit in enumerate(units):
        pin = pins[u] if pins is not None else None
        key = (_anonymous(unit), kept[u], pin)
        if key not in kinds:
            kinds[key] = len(made)
            options = legal_options(unit, job, cluster, space, pin)
            prices = tuple(price(unit, option, job, cluster, kept=kept[u]) for option in options)
            made.append(Kind(options, prices, kept[u]))
        kind_of.append(kinds[key])
    shards = any(option.stage >= Stage.GRADIENTS for kind in made for option in kind.options)
    trainable = sum(p.numel for unit in units for p in unit.parameters if p.trainable)
    wire = DTYPE_BYTES[job.communication_dtype]
    ahead_forward, ahead_backward = _ahead(units, job)
    return Instance(
        units=tuple(unit.name for unit in units),
        kinds=tuple(made),
        kind_of=tuple(kind_of),
        ahead_forward=ahead_forward,
        ahead_backward=ahead_backward,
        bucket_bytes=job.reduce_bucket_size * wire,
        staging_bytes=min(job.reduce_bucket_size, trainable) * wire if shards else 0,
        look_ahead=_look_ahead(units, job),
        accumulation=job.accumulation,
        samples_per_step=job.micro_batch * job.accumulation * job.world_size,
    )


def evaluate(problem: Instance, choice: Sequence[int]) -> Totals:
    """Add up one choice of an option index per unit, in exact integers: equations (1) to (6) of docs/model.md."""
    chosen = problem.chosen(choice)
    forward = _forward_ns(chosen)
    last = _backward_ns(chosen, problem.look_ahead, last=True)
    between = _backward_ns(chosen, problem.look_ahead, last=False) if problem.accumulation > 1 else 0
    update = sum(p.update_ns for p in chosen)
    moments = memory(problem, choice)
    peak_moment = max(moments, key=lambda name: moments[name])
    return Totals(
        step_ns=problem.accumulation * forward + (problem.accumulation - 1) * between + last + update,
        resident_bytes=sum(p.resident_bytes for p in chosen),
        peak_bytes=moments[peak_moment],
        peak_moment=peak_moment,
    )


def memory(problem: Instance, choice: Sequence[int]) -> dict[str, int]:
    """Bytes per rank at every moment of the step, in order: the left sides of equation (3)."""
    chosen = problem.chosen(choice)
    kept = np.array([problem.kinds[kind].kept for kind in problem.kind_of])
    gathered, saved = _column(chosen, "gathered_bytes"), _column(chosen, "activation_bytes")
    held = sum(p.resident_bytes for p in chosen) + problem.bucket_bytes
    alive = np.concatenate([[0], np.cumsum(saved + kept * gathered)])[:-1]
    every, freed = _sums(gathered), _sums(~kept * gathered)
    ahead_forward = [every[a.end] - every[a.begin] + a.bytes for a in problem.ahead_forward]
    ahead_backward = [freed[a.end] - freed[a.begin] + a.bytes for a in problem.ahead_backward]
    forward = held + alive + gathered + _column(chosen, "forward_bytes") + np.array(ahead_forward)
    backward = held + problem.staging_bytes + alive + saved + gathered + _column(chosen, "backward_bytes")
    backward += np.array(ahead_backward)
    moments = {f"forward of {name!r}": int(size) for name, size in zip(problem.units, forward, strict=True)}
    order = range(len(chosen) - 1, -1, -1)
    moments |= {f"backward of {problem.units[u]!r}": int(backward[u]) for u in order}
    updated: dict[int, int] = {}
    for kind, index, p in zip(problem.kind_of, choice, chosen, strict=True):
        degree = problem.kinds[kind].options[index].degree
        updated[degree] = updated.get(degree, 0) + p.update_bytes
    # DeepSpeed updates one partition group after the other.
    return moments | {f"optimizer step of units spread over {d}": held + size for d, size in sorted(updated.items())}


def _forward_ns(chosen: Sequence[Price]) -> int:
    """Equation (4): gathers run on one channel in order, computation follows: a two-machine flow shop."""
    gathered = computed = 0
    for p in chosen:
        gathered += p.gather_forward_ns
        computed = max(computed, gathered) + p.forward_ns
    return computed


def _backward_ns(chosen: Sequence[Price], look_ahead: int, *, last: bool) -> int:
    """Equations (5) and (6): one channel for the gathers of backward and, ``look_ahead`` units later, the reductions."""
    gathered = computed = reduced = 0
    # Reductions that wait for the channel: when the gradient was there, and how long it takes.
    waiting: deque[tuple[int, int]] = deque()
    for p in reversed(chosen):
        gathered = max(gathered, reduced) + p.gather_backward_ns
        if len(waiting) == look_ahead:
            ready, takes = waiting.popleft()
            reduced = max(gathered, ready) + takes
        computed = max(computed, gathered) + p.backward_ns
        waiting.append((computed, p.last_reduce_ns if last else p.reduce_ns))
    reduced = max(gathered, reduced)
    for ready, takes in waiting:
        reduced = max(reduced, ready) + takes
    return max(computed, reduced)


def _look_ahead(units: Sequence[UnitProfile], job: Job) -> int:
    """Units of average size that fit the prefetch bucket; the next one is asked for in any case."""
    elements = sum(unit.numel for unit in units)
    return max(1, min(len(units), job.prefetch_bucket_size * len(units) // elements)) if elements else 1


def _ahead(units: Sequence[UnitProfile], job: Job) -> tuple[tuple[Ahead, ...], tuple[Ahead, ...]]:
    """What the prefetcher may hold, per unit, in forward (the units behind it) and in backward (the units before it).

    It stops once it has asked for ``stage3_prefetch_bucket_size`` elements, the last parameter whole.
    """
    n, bucket = len(units), job.prefetch_bucket_size
    elements = [unit.numel for unit in units]
    before = np.concatenate([[0], np.cumsum(elements)])
    largest = max((p.numel for unit in units for p in unit.parameters), default=0)
    bound = (bucket + largest) * DTYPE_BYTES[job.parameter_dtype]

    def ahead(begin: int, end: int) -> Ahead:
        if not bucket or begin == end:
            return Ahead(0, 0, 0)
        return Ahead(begin, end, 0) if before[end] - before[begin] <= bucket else Ahead(0, 0, bound)

    return tuple(ahead(u + 1, n) for u in range(n)), tuple(ahead(0, u) for u in range(n))


def _anonymous(unit: UnitProfile) -> object:
    """What a unit costs by, whatever it is called."""
    return (
        tuple((p.shape, p.dtype, p.trainable) for p in unit.parameters),
        *(unit.forward, unit.backward, unit.activation_bytes, unit.transient_bytes, unit.recomputable, unit.split_rows),
    )


def _column(chosen: Sequence[Price], name: str) -> Bytes:
    return np.fromiter((getattr(p, name) for p in chosen), dtype=np.int64, count=len(chosen))


def _sums(values: Bytes) -> Bytes:
    return np.concatenate([[0], np.cumsum(values)])
