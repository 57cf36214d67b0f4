"""The legal options of a unit and what each costs: the only home of formulas for bytes and seconds of one unit.

Symbols (docs/model.md uses the same): N ranks, d ranks over which an option spreads, P elements of a unit's parameters,
A micro-steps per optimizer step, w bytes per parameter element, g bytes per accumulated gradient element, c bytes per
gradient element on the wire.  Prices are integers: bytes and nanoseconds, so that a plan's totals can be recomputed
exactly on any machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from ds_osdp.cluster import Cluster, Collectives, Device, Link
from ds_osdp.job import Job
from ds_osdp.plan import Stage
from ds_osdp.profile import DTYPE_BYTES, ParameterProfile, UnitProfile, Work

__all__ = [
    "Operation",
    "Option",
    "Price",
    "Space",
    "collective_seconds",
    "deferred_bucket_bytes",
    "kept_until_backward",
    "legal_options",
    "nanoseconds",
    "price",
    "reduce_bucket_bytes",
    "ring_terms",
    "work_seconds",
    "working_bytes",
]

Operation = Literal["all_gather", "reduce_scatter", "all_reduce"]

MASTER_BYTES = 4
"""An fp32 optimizer state or master weight."""

NORM_BYTES = 8
"""DeepSpeed takes norms in double precision."""

# Torch DDP's bucket bounds: small enough that reducing starts early in backward, large enough to hide the latency.
_LEAST_BUCKET, _MOST_DEFERRED_BUCKET = 1 << 20, 25 << 20
_LATENCY_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Option:
    """One legal way to place a unit."""

    stage: Stage
    degree: int
    """Ranks over which what the stage spreads is spread; 1 for stage 0."""
    slices: int = 1
    """Pieces that are gathered, used and freed in turn."""
    whole_slices: int = 0
    """How many of them are replicated, whatever the stage of the rest."""
    recompute: bool = False
    """Whether its activations are computed again in backward instead of kept."""


@dataclass(frozen=True, slots=True)
class Space:
    """The options a plan may use, where no rule pins a unit."""

    stages: tuple[Stage, ...]
    node_degree: bool = False
    """Whether a unit may be spread over the ranks of a node only."""
    max_slices: int = 1
    recompute: bool = False


@dataclass(frozen=True, slots=True)
class Price:
    """What one option of one unit costs, per rank."""

    parameter_bytes: int
    whole_bytes: int
    """Of these, what is whole beside the rank's part, and freed while the optimizer updates it."""
    gradient_bytes: int
    state_bytes: int
    """Master weights and optimizer states."""
    gathered_bytes: int
    """While its parameters are gathered."""
    activation_bytes: int
    """From its forward to its backward."""
    viewed_bytes: int
    """From its forward to its backward as well: what was gathered, and freed by DeepSpeed, but views of it are saved."""
    forward_bytes: int
    backward_bytes: int
    """Working tensors while it is computed; in backward also its gradient, and activations computed again."""
    scattered_bytes: int
    """Its share of the padded copy of a bucket that a reduce-scatter makes."""
    waiting_bytes: int
    """Gradients larger than a bucket: they wait for the next gradient, made by the unit before."""
    norm_bytes: int
    """The double-precision copy of its largest gradient, of which DeepSpeed takes the norm."""
    update_bytes: int
    """Working memory while the optimizer updates it."""
    gather_first_ns: int
    """Channel time of the gather before the forward of the first micro-step: in stages 1 and 2 of what was updated."""
    gather_forward_ns: int
    """Of the gather before the forward of any other micro-step."""
    gather_backward_ns: int
    forward_ns: int
    """Computation, with the copies around a gather, and by how much the gather holds it up."""
    backward_ns: int
    """Computation, with copies of gradients, forward computed again, and reductions that DeepSpeed waits for."""
    last_backward_ns: int
    """The same in the last micro-step, held up by reductions of its own."""
    waited_ns: int
    """Channel time of the reductions within the two above."""
    reduce_ns: int
    """Channel time of the reduction after the unit's backward, in every micro-step but the last."""
    last_reduce_ns: int
    """Channel time of the reduction after the unit's backward in the last micro-step."""
    update_ns: int
    """The optimizer's work, and the copies around the gather behind it."""

    @property
    def resident_bytes(self) -> int:
        """Held between steps."""
        return self.parameter_bytes + self.gradient_bytes + self.state_bytes

    def busy_ns(self, accumulation: int) -> int:
        """All its computation and communication in a step of ``accumulation`` micro-steps, hidden or not."""
        once = self.gather_first_ns + self.last_backward_ns + self.last_reduce_ns + self.update_ns
        again = self.gather_forward_ns + self.backward_ns + self.reduce_ns
        return once + (accumulation - 1) * again + accumulation * (self.gather_backward_ns + self.forward_ns)


def ring_terms(operation: Operation, ranks: int) -> tuple[int, float]:
    """Hops of a collective over ``ranks`` ranks, and the share of the tensor that each rank sends.

    A ring all-gather or reduce-scatter takes N - 1 hops and sends (N - 1)/N of the tensor; an all-reduce is one of each
    (Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH, 2005).
    """
    passes = 2 if operation == "all_reduce" else 1
    return passes * (ranks - 1), passes * (ranks - 1) / ranks


def collective_seconds(operation: Operation, link: Link, ranks: int, size_bytes: int, calls: float = 1.0) -> float:
    """Seconds of ``calls`` collectives that together carry a tensor of ``size_bytes`` (all of it, not a rank's part)."""
    hops, share = ring_terms(operation, ranks)
    return calls * hops * link.latency_seconds + share * size_bytes / link.bytes_per_second


def deferred_bucket_bytes(cluster: Cluster, ranks: int) -> int:
    """How many bytes to send together of what is sent once per step."""
    return min(_MOST_DEFERRED_BUCKET, _bucket_bytes("all_reduce", cluster.collectives_over(ranks).all_reduce, ranks))


def reduce_bucket_bytes(cluster: Cluster, ranks: int) -> int:
    """How many bytes of gradients to scatter together: DeepSpeed's reduce bucket, where the user leaves it open."""
    return _bucket_bytes("reduce_scatter", cluster.collectives_over(ranks).reduce_scatter, ranks)


def _bucket_bytes(operation: Operation, link: Link, ranks: int) -> int:
    """So many that the latency is a twentieth of the time, and no fewer than torch DDP's first bucket."""
    if ranks == 1:
        return _LEAST_BUCKET
    hops, share = ring_terms(operation, ranks)
    wanted = hops * link.latency_seconds / _LATENCY_SHARE * link.bytes_per_second / share
    return max(_LEAST_BUCKET, int(wanted))


def legal_options(
    unit: UnitProfile, job: Job, cluster: Cluster, space: Space, pinned: Stage | None = None
) -> tuple[Option, ...]:
    """The options of ``unit``, in a fixed order.

    Args:
        unit: the unit.
        job: the training job.
        cluster: the machines: how many ranks a node has.
        space: what a plan may use.
        pinned: the stage that a rule pins it to; the rest is still chosen.
    """
    node = cluster.ranks_per_node
    degrees = [job.world_size]
    if space.node_degree and 1 < node < job.world_size and job.world_size % node == 0:
        degrees.append(node)
    stages = sorted(set(space.stages)) if pinned is None else [pinned]
    finest = min(space.max_slices, unit.split_rows)
    # Powers of two are enough to choose from; some slices whole are for the last bytes of a budget.
    counts = [*(1 << i for i in range(finest.bit_length()) if 1 << i < finest), finest]
    may_mix = pinned is None and Stage.REPLICATED in space.stages
    slices = [(k, whole) for k in counts for whole in range(k if may_mix else 1)]
    recomputes = (False, True) if space.recompute and unit.recomputable else (False,)
    return tuple(
        Option(stage, degree, k, whole, recompute)
        for stage in stages
        for degree in ([1] if stage is Stage.REPLICATED else degrees)
        for k, whole in (slices if stage is Stage.FULLY_SHARDED else [(1, 0)])
        for recompute in recomputes
    )


def price(unit: UnitProfile, option: Option, job: Job, cluster: Cluster, *, gathered_again: bool) -> Price:
    """What ``option`` costs for ``unit``.

    Args:
        unit: the unit.
        option: where it is placed.
        job: batch sizes, precision, optimizer, communication sizes.
        cluster: device rates and links.
        gathered_again: whether DeepSpeed frees gathered parameters after forward and gathers them again in backward (see
            :func:`kept_until_backward`).
    """
    priced = _price if option.slices == 1 else _split_price
    return priced(unit, option, job, cluster, gathered_again=gathered_again)


def _split_price(unit: UnitProfile, option: Option, job: Job, cluster: Cluster, *, gathered_again: bool) -> Price:
    """A unit in slices: parameters of their own in all that is held and reduced, but gathered and used in turn.

    No gather of a slice is hidden behind computation, and none is kept from forward to backward.
    """
    weights = [p for p in unit.parameters if p.split_rows > 1]
    rest = [p for p in unit.parameters if p.split_rows == 1]
    slices = list(zip(*(_slices(weight, option.slices) for weight in weights), strict=True))
    whole = [p for of_slice in slices[: option.whole_slices] for p in of_slice]
    spread = [p for of_slice in slices[option.whole_slices :] for p in of_slice]
    of_spread = unit.model_copy(update={"parameters": (*rest, *spread)})
    of_whole = UnitProfile(name=unit.name, parameters=tuple(whole))
    in_turn = replace(option, slices=len(spread), whole_slices=0)
    gathered = _price(of_spread, in_turn, job, cluster, gathered_again=gathered_again)
    held = _price(of_whole, Option(Stage.REPLICATED, 1), job, cluster, gathered_again=False)
    both = {field.name: getattr(gathered, field.name) + getattr(held, field.name) for field in fields(Price)}
    largest = slices[option.whole_slices]
    whole_option = replace(option, slices=1, whole_slices=0)
    at_once = unit.model_copy(update={"parameters": (*rest, *largest)})
    alone = _price(at_once, whole_option, job, cluster, gathered_again=gathered_again)
    # Every slice but one reads the input again, and adds to its gradient.
    again = nanoseconds((option.slices - 1) * unit.activation_bytes / cluster.device.bytes_per_second)
    # The trace saw the gradient of one whole weight at a time.  Those of a slice are made together, and slices in turn.
    saw, made = ([p.numel * p.trainable for p in parameters] for parameters in (weights, largest))
    apart = DTYPE_BYTES[job.parameter_dtype] * (max(saw) - sum(made))
    # Meanwhile the last gradient of the slice before waits for its turn.
    last = unit.model_copy(update={"parameters": largest[-1:]})
    waiting_bytes = _price(last, whole_option, job, cluster, gathered_again=gathered_again).waiting_bytes
    # Several weights are those of fused experts, whose slices keep nothing for backward and run again there.
    runs_again = len(weights) > 1
    computed_bytes = unit.activation_bytes * (runs_again or option.recompute)
    forward = nanoseconds(work_seconds(unit.forward, cluster.device)) if runs_again and not option.recompute else 0
    in_backward = both["gather_backward_ns"] + 3 * again + forward
    return Price(
        **both
        | {
            "gathered_bytes": alone.gathered_bytes,
            "activation_bytes": unit.activation_bytes - computed_bytes,
            "viewed_bytes": 0,
            "forward_bytes": unit.transient_bytes + computed_bytes,
            "waiting_bytes": waiting_bytes,
            "backward_bytes": max(0, unit.backward_transient_bytes - apart) + waiting_bytes + computed_bytes,
            "norm_bytes": max(gathered.norm_bytes, held.norm_bytes),
            "gather_first_ns": 0,
            "gather_forward_ns": 0,
            "gather_backward_ns": 0,
            "forward_ns": both["forward_ns"] + both["gather_forward_ns"] + again,
            "backward_ns": both["backward_ns"] + in_backward,
            "last_backward_ns": both["last_backward_ns"] + in_backward,
        }
    )


def _slices(weight: ParameterProfile, count: int) -> list[ParameterProfile]:
    """``weight`` cut into ``count`` pieces of whole rows; the first ones have a row more where they do not divide."""
    rows = weight.split_rows
    least, more = divmod(rows, count)
    return [weight.model_copy(update={"shape": (least + (i < more), weight.numel // rows)}) for i in range(count)]


def _price(unit: UnitProfile, option: Option, job: Job, cluster: Cluster, *, gathered_again: bool) -> Price:
    stage, degree = option.stage, option.degree
    links = cluster.collectives_over(degree)
    copy = cluster.device.bytes_per_second
    trainable = [p for p in unit.parameters if p.trainable]
    elements = sum(p.numel for p in trainable)
    held = sum(_part(p, degree) for p in trainable)
    gradient, wire = DTYPE_BYTES[job.gradient_dtype], DTYPE_BYTES[job.communication_dtype]
    part_bytes = sum(_part(p, degree) * DTYPE_BYTES[p.dtype] for p in unit.parameters)
    whole_bytes = sum(_part(p, degree) * degree * DTYPE_BYTES[p.dtype] for p in unit.parameters)

    sharded = stage is Stage.FULLY_SHARDED
    updated = stage in (Stage.OPTIMIZER_STATES, Stage.GRADIENTS)
    # DeepSpeed's prefetcher gathers what follows in buckets; what was updated is gathered in those of the deferred reductions.
    bucket = (
        job.prefetch_bucket_size * DTYPE_BYTES[job.parameter_dtype]
        if sharded
        else deferred_bucket_bytes(cluster, job.world_size)
    )
    # What the optimizer does not change need not be gathered behind it.
    changing_bytes = sum(_part(p, degree) * degree * DTYPE_BYTES[p.dtype] for p in trainable)
    gathered = whole_bytes if sharded else changing_bytes
    calls = option.slices * _calls(gathered // option.slices, bucket)
    gather = collective_seconds("all_gather", links.all_gather, degree, gathered, calls) if degree > 1 else 0.0
    # A gathered tensor is assembled from the ranks' parts: read once, written once; and it holds up what is computed beside.
    assemble = 2 * gathered / copy + _share(links.all_gather) * gather
    gathers_forward, gathers_backward = (1, 1 + option.recompute if gathered_again else 0) if sharded else (0, 0)
    waits, reduce, last_reduce, held_up = _reductions(option, job, cluster, links, elements * wire, held * wire)
    # A gradient is added to the accumulator (two reads, a write); a scattered one passes through two flat buffers first.
    scattered = stage in (Stage.GRADIENTS, Stage.FULLY_SHARDED)
    accumulate = (3 * gradient * (held if scattered else elements) + (4 * elements * wire if scattered else 0)) / copy
    forward, backward = work_seconds(unit.forward, cluster.device), work_seconds(unit.backward, cluster.device)
    update = held * _update_bytes_moved(job) / copy
    if updated:
        update += assemble
    backward += (forward if option.recompute else 0.0) + gathers_backward * assemble + accumulate + waits
    whole = not sharded and degree > 1
    gathered_bytes = -(-whole_bytes // option.slices) if sharded else 0
    # What is gathered together arrives in one flat tensor, from which each parameter is copied.
    copied_bytes = gathered_bytes if len(unit.parameters) > 1 and degree > 1 else 0
    viewed_bytes = unit.viewed_bytes if gathered_bytes and degree > 1 and gathered_again and not option.recompute else 0
    padded = [_part(p, degree) * degree for p in trainable]
    waiting = [p.numel for p in trainable if p.numel > job.reduce_bucket_size]
    # The first of several waits while the others are made.
    backward_transient = unit.backward_transient_bytes
    if scattered and waiting:
        backward_transient += DTYPE_BYTES[job.parameter_dtype] * (sum(waiting) - max(waiting))
    # The padded copy of one that fills a bucket by itself comes beside it; where there is nothing to pad, it is sent as it is.
    waiting_copies = [
        size for p, size in zip(trainable, padded, strict=True) if p.numel > job.reduce_bucket_size and size > p.numel
    ]
    return Price(
        parameter_bytes=part_bytes + (whole_bytes if whole else 0),
        whole_bytes=changing_bytes if whole else 0,
        # Stage 1 accumulates whole, and DeepSpeed's buffer of this rank's part is there all the same.
        gradient_bytes=gradient * (held + (sum(padded) if stage is Stage.OPTIMIZER_STATES and degree > 1 else 0)),
        # An fp32 parameter is its own master weight.
        state_bytes=MASTER_BYTES * (job.optimizer_states + (job.parameter_dtype != "float32")) * held,
        gathered_bytes=gathered_bytes,
        activation_bytes=0 if option.recompute else unit.activation_bytes,
        viewed_bytes=viewed_bytes,
        # What is viewed from now on is what is gathered now.
        forward_bytes=max(
            unit.transient_bytes + (unit.activation_bytes if option.recompute else 0) - viewed_bytes,
            copied_bytes - viewed_bytes,
            0,
        ),
        backward_bytes=max(backward_transient + (unit.activation_bytes if option.recompute else 0), copied_bytes),
        scattered_bytes=wire * sum(padded) if scattered else 0,
        waiting_bytes=DTYPE_BYTES[job.parameter_dtype] * sum(waiting) + wire * sum(waiting_copies) if scattered else 0,
        norm_bytes=NORM_BYTES * max((_part(p, degree) for p in trainable), default=0),
        update_bytes=working_bytes(job) * held,
        gather_first_ns=nanoseconds((updated or gathers_forward) * gather),
        gather_forward_ns=nanoseconds(gathers_forward * gather),
        gather_backward_ns=nanoseconds(gathers_backward * gather),
        forward_ns=nanoseconds(forward + gathers_forward * assemble),
        backward_ns=nanoseconds(backward),
        last_backward_ns=nanoseconds(backward + held_up),
        waited_ns=nanoseconds(waits),
        reduce_ns=nanoseconds(reduce),
        last_reduce_ns=nanoseconds(last_reduce),
        update_ns=nanoseconds(update),
    )


def nanoseconds(seconds: float) -> int:
    """``seconds`` as the integer that plans are added up in."""
    return round(seconds * 1e9)


def work_seconds(work: Work, device: Device) -> float:
    """Seconds of computation: what was measured, or arithmetic at one rate and memory traffic at another, in turn."""
    if work.seconds is not None:
        return work.seconds
    return work.flops / device.flops_per_second + work.bytes_moved / device.bytes_per_second


def _reductions(
    option: Option, job: Job, cluster: Cluster, links: Collectives, whole_bytes: int, part_bytes: int
) -> tuple[float, float, float, float]:
    """Seconds of a unit's reductions: waited for in every backward; on the channel in a micro-step, and in the last; and by
    how much those of the last hold up its computation.
    """
    if not whole_bytes or job.world_size == 1:
        return 0.0, 0.0, 0.0, 0.0
    wire = DTYPE_BYTES[job.communication_dtype]
    deferred_bucket = deferred_bucket_bytes(cluster, job.world_size)
    if option.stage is Stage.REPLICATED:
        everywhere = cluster.collectives_over(job.world_size).all_reduce
        calls = _calls(whole_bytes, deferred_bucket)
        everything = collective_seconds("all_reduce", everywhere, job.world_size, whole_bytes, calls)
        return 0.0, 0.0, everything, _share(everywhere) * everything
    copies = job.world_size // option.degree
    across, held_up = 0.0, 0.0
    if copies > 1:
        link = cluster.collectives_across_nodes().all_reduce
        across = collective_seconds("all_reduce", link, copies, part_bytes, _calls(part_bytes, deferred_bucket))
        held_up = _share(link) * across
    deferred = option.stage is Stage.OPTIMIZER_STATES
    bucket = deferred_bucket if deferred else job.reduce_bucket_size * wire
    calls = option.slices * _calls(whole_bytes // option.slices, bucket)
    scatter = collective_seconds("reduce_scatter", links.reduce_scatter, option.degree, whole_bytes, calls)
    if deferred:
        return 0.0, 0.0, scatter + across, held_up + _share(links.reduce_scatter) * scatter
    if cluster.reduce_scatter_blocks:
        return scatter, 0.0, across, held_up
    return 0.0, scatter, scatter + across, held_up + _share(links.reduce_scatter) * scatter


def _share(link: Link) -> float:
    """Seconds by which a collective that runs beside computation holds it up, per second."""
    return 0.0 if link.overlapped is None else link.overlapped.computation_share


def _calls(size_bytes: int, bucket_bytes: int) -> float:
    """Collectives that a tensor's share of a bucket amounts to: it pays for the part of a bucket it fills."""
    return min(1.0, size_bytes / bucket_bytes) if bucket_bytes else 1.0


def _part(parameter: ParameterProfile, degree: int) -> int:
    """Elements one rank holds of a parameter spread over ``degree`` ranks: DeepSpeed pads each to a multiple."""
    return -(-parameter.numel // degree)


def working_bytes(job: Job) -> int:
    """Working bytes per element of an update.

    The gradient of a sub-group is scaled in an fp32 copy, beside which the optimizer has its temporaries.
    """
    return MASTER_BYTES * (1 + job.optimizer_temporaries)


def _update_bytes_moved(job: Job) -> int:
    """Bytes read and written per element by DeepSpeed's step.

    Around the optimizer: gradients flattened to fp32 (8), their norm in double precision (20), clipping (8), and the
    weights copied back, if they are not their own masters (4 and their own size).  The optimizer, fused (that is without
    temporaries): gradient 4, weight 8, 8 per state.  Of single torch operators: each reads its operands from memory and
    writes its result (AdamW: decay 8, first moment 12, second moment 20, denominator 24, weight 16; momentum: 20 and the
    weight's 12).
    """
    around = 8 + 20 + 8
    if job.parameter_dtype != "float32":
        around += MASTER_BYTES + DTYPE_BYTES[job.parameter_dtype]
    fused = 12 + 8 * job.optimizer_states
    return around + (fused if job.optimizer_temporaries == 0 else (12, 32, 80)[min(job.optimizer_states, 2)])


def kept_until_backward(elements: Sequence[int], works_backward: Sequence[bool], job: Job) -> list[bool]:
    """Whether DeepSpeed keeps each gathered unit, of so many elements, from its forward to its backward, if it has one.

    It does when fewer than ``stage3_max_reuse_distance`` elements are used in between (each later unit twice:
    ``PartitionedParameterCoordinator.__params_to_release``), or when the prefetcher has by then looked past the backward use.
    The prefetcher asks for another bucket at every module that is entered, also at those without parameters, and so runs
    ahead until ``stage3_max_live_parameters`` are there.
    """
    later, kept = 0, []
    for own, works in zip(reversed(elements), reversed(works_backward), strict=True):
        looked_past = job.prefetch_bucket_size > 0 and later + own <= job.max_live_parameters
        kept.append(works and (2 * later < job.max_reuse_distance or looked_past))
        later += own
    return kept[::-1]
