"""Small planning problems, random and by hand."""

from __future__ import annotations

from hypothesis import strategies as st

from ds_osdp.cluster import Cluster, Collectives, Device, Link
from ds_osdp.job import Job
from ds_osdp.profile import ModelProfile, ParameterProfile, UnitProfile, Work


def a_cluster(latency: float = 1e-5, bandwidth: float = 1e9, blocks: bool = False) -> Cluster:
    link = Link(latency_seconds=latency, bytes_per_second=bandwidth)
    return Cluster(
        name="test",
        ranks_per_node=4,
        device=Device(flops_per_second=1e12, bytes_per_second=1e11),
        world=Collectives(all_gather=link, reduce_scatter=link, all_reduce=link),
        reduce_scatter_blocks=blocks,
    )


def a_job(**changes: object) -> Job:
    values = {
        "world_size": 4,
        "micro_batch": 1,
        "accumulation": 1,
        "parameter_dtype": "bfloat16",
        "gradient_dtype": "bfloat16",
        "communication_dtype": "bfloat16",
        "optimizer_states": 2,
        "reduce_bucket_size": 10_000,
        "prefetch_bucket_size": 0,
        "max_live_parameters": 10**9,
        "max_reuse_distance": 0,
        "sub_group_size": 10**9,
    }
    return Job.model_validate({**values, **changes})


def a_unit(name: str, rows: int, columns: int = 100, *, trainable: bool = True, tokens: int = 64) -> UnitProfile:
    weight = ParameterProfile(name=f"{name}.weight", shape=(rows, columns), dtype="bfloat16", trainable=trainable)
    bias = ParameterProfile(name=f"{name}.bias", shape=(rows,), dtype="bfloat16", trainable=trainable)
    flops = 2 * tokens * rows * columns
    return UnitProfile(
        name=name,
        parameters=(weight, bias),
        forward=Work(flops=flops),
        backward=Work(flops=2 * flops, bytes_moved=tokens * rows),
        activation_bytes=2 * tokens * columns,
        transient_bytes=2 * tokens * rows,
    )


def a_profile(units: list[UnitProfile], micro_batch: int = 1) -> ModelProfile:
    return ModelProfile(model="Test", micro_batch=micro_batch, sample="x", units=tuple(units))


@st.composite
def profiles(draw: st.DrawFn, most_units: int = 7) -> ModelProfile:
    sizes = draw(st.lists(st.integers(1, 400), min_size=1, max_size=most_units))
    trainable = draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    trainable[0] = True
    return a_profile([a_unit(f"u{i}", rows, trainable=t) for i, (rows, t) in enumerate(zip(sizes, trainable, strict=True))])


clusters = st.builds(
    a_cluster,
    latency=st.sampled_from([0.0, 1e-6, 1e-4]),
    bandwidth=st.sampled_from([1e7, 1e9, 1e11]),
    blocks=st.booleans(),
)
jobs = st.builds(
    a_job,
    world_size=st.sampled_from([1, 2, 3, 8]),
    accumulation=st.sampled_from([1, 2, 4]),
    gradient_dtype=st.sampled_from(["bfloat16", "float32"]),
    prefetch_bucket_size=st.sampled_from([0, 10_000, 1_000_000]),
    max_reuse_distance=st.sampled_from([0, 40_000, 10**9]),
)
