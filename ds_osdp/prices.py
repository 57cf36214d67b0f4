"""The legal options of every unit and what each costs: the only home of formulas for bytes and seconds.

Symbols (docs/model.md uses the same): N ranks, P elements of a unit's parameters, A micro-steps per optimizer step,
w bytes per parameter element, g bytes per accumulated gradient element, c bytes per gradient element on the wire.
Prices are integers: bytes and nanoseconds, so that a plan's totals can be recomputed exactly on any machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

from ds_osdp.cluster import Cluster, Device, Link
from ds_osdp.errors import PlanMismatchError
from ds_osdp.job import Job
from ds_osdp.plan import Stage
from ds_osdp.profile import DTYPE_BYTES, ModelProfile, ParameterProfile, UnitProfile, Work

__all__ = [
    "Instance",
    "Moment",
    "Operation",
    "Option",
    "Price",
    "Totals",
    "collective_seconds",
    "evaluate",
    "instance",
    "price",
    "replica_bucket_bytes",
    "ring_terms",
]

Operation = Literal["all_gather", "reduce_scatter", "all_reduce"]

MASTER_BYTES = 4
"""An fp32 optimizer state or master weight."""

# Torch DDP's bucket bounds: small enough that reducing starts early in backward, large enough to hide the latency.
_LEAST_REPLICA_BUCKET, _MOST_REPLICA_BUCKET = 1 << 20, 25 << 20
_LATENCY_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Option:
    """One legal way to place a unit."""

    stage: Stage
    degree: int
    """Ranks over which what the stage spreads is spread; 1 for stage 0."""


@dataclass(frozen=True, slots=True)
class Price:
    """What one option of one unit costs, per rank."""

    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    """Master weights and optimizer states."""
    gathered_bytes: int
    """While its parameters are gathered."""
    update_bytes: int
    """Working memory while the optimizer updates it."""
    gather_forward_ns: int
    gather_backward_ns: int
    forward_extra_ns: int
    """Copies around a gather: they stop the computation."""
    backward_extra_ns: int
    """Copies of gradients, and reductions that DeepSpeed waits for: they stop the computation."""
    reduce_ns: int
    """Channel time of the reduction after the unit's backward, in every micro-step but the last."""
    last_reduce_ns: int
    """Channel time of the reduction after the unit's backward in the last micro-step."""
    update_ns: int

    @property
    def resident_bytes(self) -> int:
        """Held between steps."""
        return self.parameter_bytes + self.gradient_bytes + self.state_bytes


@dataclass(frozen=True, slots=True)
class Moment:
    """One moment of the step at which memory can peak."""

    name: str
    activation_bytes: int
    other_bytes: int
    """Working tensors, the gradient just computed, and DeepSpeed's buckets."""
    gathered: tuple[int, ...]
    """Indices of the units whose gathered parameters are alive, if they are sharded."""
    updates: Stage | None = None
    """The optimizer is at work on the units of this stage."""

    @property
    def constant_bytes(self) -> int:
        """Bytes that no plan changes."""
        return self.activation_bytes + self.other_bytes

    def dominates(self, other: Moment) -> bool:
        """Whether no plan can need more memory at ``other`` than here."""
        return (
            self.constant_bytes >= other.constant_bytes
            and self.updates == other.updates
            and set(self.gathered) >= set(other.gathered)
        )


@dataclass(frozen=True, slots=True)
class Instance:
    """All that the solver's model needs: numbers only."""

    units: tuple[str, ...]
    """In the order of one forward."""
    options: tuple[tuple[Option, ...], ...]
    prices: tuple[tuple[Price, ...], ...]
    forward_ns: tuple[int, ...]
    backward_ns: tuple[int, ...]
    moments: tuple[Moment, ...]
    accumulation: int
    samples_per_step: int


@dataclass(frozen=True, slots=True)
class Totals:
    """A choice of one option per unit, added up."""

    step_ns: int
    resident_bytes: int
    peak_bytes: int
    peak_moment: str


def ring_terms(operation: Operation, ranks: int) -> tuple[int, float]:
    """Hops of a collective over ``ranks`` ranks, and the share of the tensor that each rank sends.

    A ring all-gather or reduce-scatter takes N - 1 hops and sends (N - 1)/N of the tensor; an all-reduce is one of each
    (Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH, 2005).
    """
    passes = 2 if operation == "all_reduce" else 1
    return passes * (ranks - 1), passes * (ranks - 1) / ranks


def collective_seconds(operation: Operation, link: Link, ranks: int, size_bytes: int) -> float:
    """Seconds of one collective on a tensor of ``size_bytes`` (the whole of it, not one rank's part)."""
    hops, share = ring_terms(operation, ranks)
    return hops * link.latency_seconds + share * size_bytes / link.bytes_per_second


def replica_bucket_bytes(cluster: Cluster, ranks: int) -> int:
    """How many bytes of replicated gradients to reduce at once: the latency is at most a twentieth of the time."""
    link = cluster.collectives_over(ranks).all_reduce
    hops, share = ring_terms("all_reduce", ranks)
    if ranks == 1:
        return _MOST_REPLICA_BUCKET
    wanted = hops * link.latency_seconds / _LATENCY_SHARE * link.bytes_per_second / share
    return int(min(max(wanted, _LEAST_REPLICA_BUCKET), _MOST_REPLICA_BUCKET))


def price(unit: UnitProfile, option: Option, job: Job, cluster: Cluster, *, kept: bool) -> Price:
    """What ``option`` costs for ``unit``.

    Args:
        unit: the unit.
        option: stage and degree; stages 0 and 3.
        job: batch sizes, precision, optimizer, communication sizes.
        cluster: device rates and links.
        kept: whether DeepSpeed keeps the gathered parameters from forward to backward (``stage3_max_reuse_distance``
            and the prefetch bucket decide it): then it gathers once per micro-step, not twice.
    """
    ranks = job.world_size
    links = cluster.collectives_over(ranks)
    sharded = option.stage is Stage.FULLY_SHARDED
    trainable = [p for p in unit.parameters if p.trainable]
    whole = unit.numel
    held_trainable = sum(_part(p, option.degree) for p in trainable)
    gradient, wire = DTYPE_BYTES[job.gradient_dtype], DTYPE_BYTES[job.communication_dtype]
    parameter_bytes = sum(_part(p, option.degree) * DTYPE_BYTES[p.dtype] for p in unit.parameters)
    # Also in fp32, where they equal the parameters: DeepSpeed means to share them, but compares a device with its name.
    master = MASTER_BYTES * held_trainable
    gathered_bytes = sum(_padded(p, ranks) * DTYPE_BYTES[p.dtype] for p in unit.parameters) if sharded else 0

    gather = reduce = all_reduce = 0.0
    if sharded and whole:
        gather = collective_seconds("all_gather", links.all_gather, ranks, gathered_bytes)
    wire_bytes = sum(p.numel for p in trainable) * wire
    if sharded and wire_bytes:
        reduce = _bucketed("reduce_scatter", links.reduce_scatter, ranks, wire_bytes, job.reduce_bucket_size * wire)
    elif wire_bytes:
        bucket = replica_bucket_bytes(cluster, ranks)
        all_reduce = _bucketed("all_reduce", links.all_reduce, ranks, wire_bytes, bucket)

    copy = cluster.device.bytes_per_second
    # A gathered tensor is assembled from the ranks' parts: read once, written once.
    assemble = 2 * gathered_bytes / copy
    # A gradient is added to the accumulator (two reads, a write); a scattered one passes through two flat buffers first.
    accumulate = (3 * gradient * held_trainable + (4 * wire_bytes if sharded else 0)) / copy
    blocking = reduce if cluster.reduce_scatter_blocks else 0.0
    update = held_trainable * _update_bytes_moved(job) / copy
    return Price(
        parameter_bytes=parameter_bytes,
        gradient_bytes=gradient * held_trainable,
        state_bytes=master + MASTER_BYTES * job.optimizer_states * held_trainable,
        gathered_bytes=gathered_bytes,
        # The fp32 copy of the gradients; torch's optimizers need one temporary of the same size beside it.
        update_bytes=2 * MASTER_BYTES * held_trainable + (gradient if gradient < MASTER_BYTES else 0) * held_trainable,
        gather_forward_ns=_ns(gather),
        gather_backward_ns=0 if kept else _ns(gather),
        forward_extra_ns=_ns(assemble),
        backward_extra_ns=_ns((0.0 if kept else assemble) + accumulate + blocking),
        reduce_ns=0 if cluster.reduce_scatter_blocks else _ns(reduce),
        last_reduce_ns=_ns(all_reduce) + (0 if cluster.reduce_scatter_blocks else _ns(reduce)),
        update_ns=_ns(update),
    )


def instance(
    profile: ModelProfile,
    cluster: Cluster,
    job: Job,
    stages: Sequence[Sequence[Stage]],
) -> Instance:
    """Price every option of every unit.

    Args:
        profile: the model, traced with ``job.micro_batch`` samples.
        cluster: the machines.
        job: the training job.
        stages: per unit of ``profile``, the stages it may take.

    Raises:
        PlanMismatchError: the profile was traced with another micro-batch than the job's.
    """
    if profile.micro_batch != job.micro_batch:
        raise PlanMismatchError(
            f"the profile was traced with micro-batch {profile.micro_batch} and the job's is {job.micro_batch}: profile again"
        )
    options = tuple(
        tuple(Option(stage, 1 if stage is Stage.REPLICATED else job.world_size) for stage in allowed) for allowed in stages
    )
    kept = _kept(profile.units, job)
    prices = tuple(
        tuple(price(unit, option, job, cluster, kept=keep) for option in choices)
        for unit, choices, keep in zip(profile.units, options, kept, strict=True)
    )
    return Instance(
        units=tuple(unit.name for unit in profile.units),
        options=options,
        prices=prices,
        forward_ns=tuple(_ns(_work_seconds(unit.forward, cluster.device)) for unit in profile.units),
        backward_ns=tuple(_ns(_work_seconds(unit.backward, cluster.device)) for unit in profile.units),
        moments=_moments(profile.units, kept, job, any(Stage.FULLY_SHARDED in allowed for allowed in stages)),
        accumulation=job.accumulation,
        samples_per_step=job.micro_batch * job.accumulation * job.world_size,
    )


def evaluate(problem: Instance, choice: Sequence[int]) -> Totals:
    """Add up one choice of an option index per unit, in exact integers: equations (1) to (6) of docs/model.md."""
    chosen = [prices[index] for prices, index in zip(problem.prices, choice, strict=True)]
    forward = _forward_ns(problem, chosen)
    last = _backward_ns(problem, chosen, last=True)
    between = _backward_ns(problem, chosen, last=False) if problem.accumulation > 1 else 0
    update = sum(p.update_ns for p in chosen)
    stage = [options[index].stage for options, index in zip(problem.options, choice, strict=True)]
    peak_bytes, peak_moment = max(
        ((moment_bytes(moment, chosen, stage), moment.name) for moment in problem.moments), key=lambda pair: pair[0]
    )
    step = problem.accumulation * forward + (problem.accumulation - 1) * between + last + update
    resident = sum(p.resident_bytes for p in chosen)
    return Totals(step_ns=step, resident_bytes=resident, peak_bytes=peak_bytes, peak_moment=peak_moment)


def moment_bytes(moment: Moment, chosen: Sequence[Price], stage: Sequence[Stage]) -> int:
    """Bytes per rank at ``moment`` when unit u pays ``chosen[u]``: the left side of equation (3)."""
    return (
        moment.constant_bytes
        + sum(p.resident_bytes for p in chosen)
        + sum(chosen[u].gathered_bytes for u in moment.gathered)
        + sum(p.update_bytes for p, s in zip(chosen, stage, strict=True) if s is moment.updates)
    )


def _forward_ns(problem: Instance, chosen: Sequence[Price]) -> int:
    """Equation (4): gathers run on one channel in order, computation follows: a two-machine flow shop."""
    gathered = computed = 0
    for compute, p in zip(problem.forward_ns, chosen, strict=True):
        gathered += p.gather_forward_ns
        computed = max(computed, gathered) + compute + p.forward_extra_ns
    return computed


def _backward_ns(problem: Instance, chosen: Sequence[Price], *, last: bool) -> int:
    """Equations (5) and (6): the channel carries the gathers of backward, and each reduction one gather later."""
    order = range(len(chosen) - 1, -1, -1)
    gathered = computed = reduced = 0
    pending: int | None = None  # the unit whose reduction waits for the channel
    ready = 0  # when the gradient of that unit was there
    for u in order:
        gathered = max(gathered, reduced) + chosen[u].gather_backward_ns
        if pending is not None:
            reduced = max(gathered, ready) + _reduce_ns(chosen[pending], last)
        computed = max(computed, gathered) + problem.backward_ns[u] + chosen[u].backward_extra_ns
        pending, ready = u, computed
    if pending is not None:
        reduced = max(reduced, gathered, ready) + _reduce_ns(chosen[pending], last)
    return max(computed, reduced)


def _reduce_ns(p: Price, last: bool) -> int:
    return p.last_reduce_ns if last else p.reduce_ns


def _part(parameter: ParameterProfile, degree: int) -> int:
    """Elements one rank holds of a parameter spread over ``degree`` ranks: DeepSpeed pads each to a multiple."""
    return ceil(parameter.numel / degree)


def _padded(parameter: ParameterProfile, ranks: int) -> int:
    return _part(parameter, ranks) * ranks


def _bucketed(operation: Operation, link: Link, ranks: int, size_bytes: int, bucket_bytes: int) -> float:
    """Seconds of a tensor's share of a bucketed collective: it pays latency for the part of the bucket it fills."""
    hops, share = ring_terms(operation, ranks)
    calls = min(1.0, size_bytes / bucket_bytes)
    return calls * hops * link.latency_seconds + share * size_bytes / link.bytes_per_second


def _update_bytes_moved(job: Job) -> int:
    """Bytes read and written per element by clipping and the optimizer: gradient 12, weight 8, 8 per state, copy back."""
    copy_back = 2 * DTYPE_BYTES[job.parameter_dtype] if job.parameter_dtype != "float32" else 0
    return 20 + 8 * job.optimizer_states + copy_back


def _work_seconds(work: Work, device: Device) -> float:
    return work.flops / device.flops_per_second + work.bytes_moved / device.bytes_per_second


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _kept(units: Sequence[UnitProfile], job: Job) -> list[bool]:
    """Whether DeepSpeed keeps a gathered unit from its forward to its backward.

    It does when fewer than ``stage3_max_reuse_distance`` elements are used in between (each later unit twice:
    ``PartitionedParameterCoordinator.__params_to_release``), or when the prefetcher has by then looked past the
    backward use, which it does when the later units fit the prefetch bucket.
    """
    later, kept = 0, []
    for unit in reversed(units):
        kept.append(2 * later < job.max_reuse_distance or later < job.prefetch_bucket_size)
        later += unit.numel
    return kept[::-1]


def _moments(units: Sequence[UnitProfile], kept: Sequence[bool], job: Job, shards: bool) -> tuple[Moment, ...]:
    """The moments of a step that can be its peak; those that another always exceeds are left out."""
    wire, gradient = DTYPE_BYTES[job.communication_dtype], DTYPE_BYTES[job.parameter_dtype]
    trainable = [sum(p.numel for p in unit.parameters if p.trainable) for unit in units]
    # DeepSpeed allocates the reduce bucket whole at start; a reduce-scatter copies what is in it into a padded one.
    buckets = job.reduce_bucket_size * wire
    staging = min(job.reduce_bucket_size, sum(trainable)) * wire if shards else 0
    moments = [
        Moment("optimizer step of replicated units", 0, buckets, (), Stage.REPLICATED),
        Moment("optimizer step of sharded units", 0, buckets, (), Stage.FULLY_SHARDED),
    ]
    alive = 0
    for u, unit in enumerate(units):
        earlier = [v for v in range(u) if kept[v]]
        ahead, ahead_bytes = _prefetched(units, range(u + 1, len(units)), job)
        moments.append(
            Moment(
                f"forward of {unit.name!r}",
                activation_bytes=alive,
                other_bytes=buckets + unit.transient_bytes + ahead_bytes,
                gathered=tuple(sorted({*earlier, u, *ahead})),
            )
        )
        alive += unit.activation_bytes
        ahead, ahead_bytes = _prefetched(units, range(u - 1, -1, -1), job)
        moments.append(
            Moment(
                f"backward of {unit.name!r}",
                activation_bytes=alive,
                other_bytes=buckets + staging + unit.transient_bytes + trainable[u] * gradient + ahead_bytes,
                gathered=tuple(sorted({*earlier, u, *ahead})),
            )
        )
    return _undominated(moments)


def _prefetched(units: Sequence[UnitProfile], following: range, job: Job) -> tuple[list[int], int]:
    """What the prefetcher may hold beside the unit at work: the units that follow, or a bound in bytes.

    The prefetcher stops once it has asked for ``stage3_prefetch_bucket_size`` elements, the last parameter whole; which
    units these are depends on the plan.  Either set bounds it from above and is linear in the plan.
    """
    if not job.prefetch_bucket_size or not following:
        return [], 0
    if sum(units[v].numel for v in following) <= job.prefetch_bucket_size:
        return list(following), 0
    largest = max((p.numel for v in following for p in units[v].parameters), default=0)
    return [], (job.prefetch_bucket_size + largest) * DTYPE_BYTES[job.parameter_dtype]


def _undominated(moments: Sequence[Moment]) -> tuple[Moment, ...]:
    keep: list[Moment] = []
    # Walking from the fullest moment down, a moment can only be dominated by one already kept.
    for moment in sorted(moments, key=lambda m: (-m.constant_bytes, -len(m.gathered))):
        if not any(other.dominates(moment) for other in keep):
            keep.append(moment)
    return tuple(sorted(keep, key=moments.index))
