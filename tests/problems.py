"""Small planning problems, random and by hand."""

from __future__ import annotations

from hypothesis import strategies as st

from ds_osdp.cluster import Cluster, Collectives, Device, Link, Overlapped
from ds_osdp.job import Job
from ds_osdp.plan import Stage
from ds_osdp.prices import Space
from ds_osdp.profile import ModelProfile, ParameterProfile, UnitProfile, Work


def a_cluster(latency: float = 1e-5, bandwidth: float = 1e9, blocks: bool = False, share: float = 0.0) -> Cluster:
    line = {"latency_seconds": latency, "bytes_per_second": bandwidth}
    link = Link(**line, overlapped=Overlapped(**line, computation_share=share))
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
        "optimizer_temporaries": 1,
        "reduce_bucket_size": 10_000,
        "prefetch_bucket_size": 0,
        "max_live_parameters": 10**9,
        "max_reuse_distance": 0,
        "sub_group_size": 10**9,
    }
    return Job.model_validate({**values, **changes})


def a_unit(
    name: str,
    rows: int,
    columns: int = 100,
    *,
    trainable: bool = True,
    tokens: int = 64,
    recomputable: bool = False,
    split_rows: int = 1,
) -> UnitProfile:
    weight = ParameterProfile(
        name=f"{name}.weight", shape=(rows, columns), dtype="bfloat16", trainable=trainable, split_rows=split_rows
    )
    bias = ParameterProfile(name=f"{name}.bias", shape=(rows,), dtype="bfloat16", trainable=trainable)
    flops = 2 * tokens * rows * columns
    return UnitProfile(
        name=name,
        parameters=(weight, bias),
        forward=Work(flops=flops),
        backward=Work(flops=2 * flops, bytes_moved=tokens * rows),
        activation_bytes=2 * tokens * columns,
        transient_bytes=2 * tokens * rows,
        backward_transient_bytes=2 * tokens * (rows + columns),
        recomputable=recomputable,
    )


def a_profile(units: list[UnitProfile], micro_batch: int = 1) -> ModelProfile:
    return ModelProfile(model="Test", micro_batch=micro_batch, sample="x", units=tuple(units))


@st.composite
def profiles(draw: st.DrawFn, most_units: int = 4) -> ModelProfile:
    """Few units, some of them equal: counting kinds and placing units must both be right."""
    variants = draw(
        st.lists(
            st.tuples(st.integers(1, 400), st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=3, unique=True
        )
    )
    picks = draw(st.lists(st.integers(0, len(variants) - 1), min_size=1, max_size=most_units))
    units = []
    for i, pick in enumerate(picks):
        rows, trainable, recomputable, splittable = variants[pick]
        split_rows = rows if splittable else 1
        units.append(a_unit(f"u{i}", rows, trainable=trainable, recomputable=recomputable, split_rows=split_rows))
    return a_profile(units)


spaces = st.sampled_from(
    [
        Space((Stage.REPLICATED, Stage.FULLY_SHARDED)),
        Space(tuple(Stage)),
        Space(tuple(Stage), node_degree=True),
        Space((Stage.REPLICATED, Stage.FULLY_SHARDED), max_slices=3, recompute=True),
        Space(tuple(Stage), node_degree=True, max_slices=2, recompute=True),
    ]
)
clusters = st.builds(
    a_cluster,
    latency=st.sampled_from([0.0, 1e-6, 1e-4]),
    bandwidth=st.sampled_from([1e7, 1e9, 1e11]),
    blocks=st.booleans(),
    share=st.sampled_from([0.0, 0.3]),
)
jobs = st.builds(
    a_job,
    world_size=st.sampled_from([1, 2, 3, 8, 16]),
    accumulation=st.sampled_from([1, 2, 4]),
    gradient_dtype=st.sampled_from(["bfloat16", "float32"]),
    prefetch_bucket_size=st.sampled_from([0, 10_000, 1_000_000]),
    max_reuse_distance=st.sampled_from([0, 40_000, 10**9]),
)
