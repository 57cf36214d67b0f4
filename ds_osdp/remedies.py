"""What would make a job fit that does not: the smallest single changes, each with its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ds_osdp.cluster import Cluster
from ds_osdp.config import SolverConfig
from ds_osdp.job import Job
from ds_osdp.plan import Stage
from ds_osdp.prices import Space
from ds_osdp.profile import DTYPE_BYTES, ModelProfile, UnitProfile, Work
from ds_osdp.quantities import format_bytes
from ds_osdp.solve import leanest
from ds_osdp.step import evaluate, priced

__all__ = ["remedies", "with_micro_batch"]

_MOST_RANKS_FACTOR = 64


@dataclass(frozen=True, slots=True)
class _Change:
    """One thing done differently."""

    sort: str
    text: str
    profile: ModelProfile
    job: Job
    space: Space
    pins: Sequence[Stage | None]


def remedies(
    profile: ModelProfile,
    cluster: Cluster,
    job: Job,
    budget_bytes: int,
    space: Space,
    pins: Sequence[Stage | None],
    solver: SolverConfig,
) -> tuple[str, ...]:
    """Sentences, each naming one change after which the leanest plan fits ``budget_bytes``, and what it then needs."""

    def least(change: _Change) -> int:
        problem = priced(change.profile, cluster, change.job, change.space, change.pins)
        return evaluate(problem, leanest(problem, time_limit_seconds=solver.time_limit_s)).peak_bytes

    def changes() -> Iterator[_Change]:
        """The smallest change of each sort first; the next of a sort is for when that does not fit."""
        now = _Change("", "", profile, job, space, pins)
        batch = job.micro_batch
        while (batch := batch // 2) >= 1:
            text = f"lower train_micro_batch_size_per_gpu to {batch}"
            smaller = job.model_copy(update={"micro_batch": batch})
            yield replace(now, sort="batch", text=text, profile=with_micro_batch(profile, batch), job=smaller)
        factor = 1
        while (factor := 2 * factor) <= _MOST_RANKS_FACTOR:
            wider = job.model_copy(update={"world_size": factor * job.world_size})
            yield replace(now, sort="ranks", text=f"use {wider.world_size} ranks", job=wider)
        if any(pin is not None for pin in pins):
            yield replace(now, sort="rules", text="drop osdp.rules", pins=[None] * len(pins))
        if job.reduce_bucket_size > 1_000_000:
            smaller = job.model_copy(update={"reduce_bucket_size": 1_000_000})
            yield replace(now, sort="bucket", text="lower zero_optimization.reduce_bucket_size to 1000000", job=smaller)
        if any(unit.recomputable for unit in profile.units) and not space.recompute:
            yield replace(now, sort="recompute", text="recompute activations", space=replace(space, recompute=True))
        if any(unit.split_rows > 1 for unit in profile.units) and space.max_slices == 1:
            yield replace(now, sort="split", text="split large units into 4 slices", space=replace(space, max_slices=4))

    found: dict[str, str] = {}
    for change in changes():
        if change.sort in found:
            continue
        needed = least(change)
        if needed <= budget_bytes:
            found[change.sort] = f"{change.text} (needs {format_bytes(needed)})"
    return tuple(found.values())


def with_micro_batch(profile: ModelProfile, micro_batch: int) -> ModelProfile:
    """``profile`` as if traced with another micro-batch: activations and working tensors in proportion."""

    def scaled(size: int) -> int:
        return -(-size * micro_batch // profile.micro_batch)

    def scaled_beside_gradients(unit: UnitProfile) -> int:
        gradients = sum(p.numel * DTYPE_BYTES[p.dtype] for p in unit.parameters if p.trainable)
        return gradients + scaled(max(0, unit.backward_transient_bytes - gradients))

    def work(work: Work) -> Work:
        seconds = None if work.seconds is None else work.seconds * micro_batch / profile.micro_batch
        return Work(flops=scaled(work.flops), bytes_moved=scaled(work.bytes_moved), seconds=seconds)

    units = tuple(
        unit.model_copy(
            update={
                "activation_bytes": scaled(unit.activation_bytes),
                "transient_bytes": scaled(unit.transient_bytes),
                "backward_transient_bytes": scaled_beside_gradients(unit),
                "output_bytes": scaled(unit.output_bytes),
                "forward": work(unit.forward),
                "backward": work(unit.backward),
            }
        )
        for unit in profile.units
    )
    return profile.model_copy(update={"micro_batch": micro_batch, "units": units})
