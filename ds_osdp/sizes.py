"""Communication sizes come with the plan where the user leaves them open: what the planner chooses among."""

from __future__ import annotations

from ds_osdp.cluster import Cluster
from ds_osdp.job import Job
from ds_osdp.prices import kept_until_backward, reduce_bucket_bytes
from ds_osdp.profile import DTYPE_BYTES, ModelProfile, Work

__all__ = ["jobs_by_sizes"]


def jobs_by_sizes(profile: ModelProfile, cluster: Cluster, job: Job) -> tuple[Job, ...]:
    """``job`` with each set of communication sizes worth solving for; itself, if the user gave them all.

    Two follow from a rule: the reduce bucket is as small as the latency of a reduce-scatter allows, for DeepSpeed holds
    it whole; gathers run ahead by the largest unit, so that one is always on its way.  Whether gathered parameters stay
    from forward to backward trades memory for a gather: both are solved, where it makes a difference.
    """
    elements = [unit.numel for unit in profile.units]
    works_backward = [unit.backward != Work() for unit in profile.units]
    wire = DTYPE_BYTES[job.communication_dtype]
    rules = {
        "reduce_bucket_size": min(job.reduce_bucket_size, reduce_bucket_bytes(cluster, job.world_size) // wire),
        "prefetch_bucket_size": min(job.prefetch_bucket_size, max(elements, default=0)),
    }
    ruled = job.model_copy(update={name: size for name, size in rules.items() if name in job.open_sizes})
    if "max_reuse_distance" not in job.open_sizes:
        return (ruled,)
    freed = ruled.model_copy(update={"max_reuse_distance": 0})
    if "max_live_parameters" in job.open_sizes:
        # Else the prefetcher looks past the backward use of all that fits, and keeps it.
        freed = freed.model_copy(update={"max_live_parameters": min(job.max_live_parameters, 2 * max(elements, default=0))})
    kept, kept_if_freed = (kept_until_backward(elements, works_backward, sized) for sized in (ruled, freed))
    return (ruled, freed) if kept != kept_if_freed else (ruled,)
