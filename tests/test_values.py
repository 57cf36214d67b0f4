"""Sizes, documents and plans: what is read back is what was written, and nothing else is accepted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_osdp.cluster import DEFAULT_CLUSTER, Cluster, Machines
from ds_osdp.errors import ClusterMismatchError, DocumentError, PlanMismatchError
from ds_osdp.plan import Plan, Provenance, Stage, UnitPlan, model_fingerprint
from ds_osdp.quantities import format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [("14GiB", 14 << 30), ("1.5 GB", 1_500_000_000), ("512MiB", 512 << 20), (4096, 4096), ("7B", 7), ("2TB", 2 * 10**12)],
)
def test_sizes(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["3GB ", " 3GB", "-1", -1, 0, "0GiB", "3", "GiB", "3gb", "3 giga", "auto", "", True, 1.5, None]
)
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(ValueError, match=r"size|positive"):
        parse_bytes(text)  # type: ignore[arg-type]


@given(st.integers(1, 1 << 50))
def test_a_formatted_size_is_near(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.06)


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (4.56e-6, "4.56 µs"), (3e-9, "3 ns"), (0, "0 ns")]
)
def test_durations(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


SHAPES = {"a.weight": (3, 3), "a.bias": (3,), "b.weight": (9,)}


SIZES = {"reduce_bucket_size": 1000, "prefetch_bucket_size": 0, "max_live_parameters": 1000, "max_reuse_distance": 0}


def a_plan(**changes: object) -> Plan:
    values = {
        "world_size": 4,
        "micro_batch": 2,
        "accumulation": 1,
        "step_seconds": 0.5,
        "bound_seconds": 0.5,
        "gap": 0.0,
        "samples_per_second": 16.0,
        "budget_bytes": 1000,
        "resident_bytes": 800,
        "peak_bytes": 900,
        "peak_moment": "backward of 'head'",
        "sizes": SIZES,
        "deferred_bucket_bytes": 1 << 20,
        "units": (
            UnitPlan(name="a", stage=Stage.REPLICATED, degree=1, parameters=("a.weight", "a.bias"), elements=12),
            UnitPlan(name="b", stage=Stage.FULLY_SHARDED, degree=4, parameters=("b.weight",), elements=9),
        ),
        "provenance": Provenance(
            model="M", model_fingerprint=model_fingerprint(SHAPES), cluster="c", sample="x[2]", solver="s", ds_osdp_version="0"
        ),
    }
    return Plan.model_validate({**values, **changes})


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    plan = a_plan()
    plan.save(tmp_path / "deep" / "plan.json")
    assert Plan.load(tmp_path / "deep" / "plan.json") == plan
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["plan.json"]
    assert json.loads(plan.to_json())["plan_hash"] == plan.plan_hash


def test_the_hash_is_of_what_is_applied() -> None:
    plan = a_plan()
    assert a_plan(step_seconds=9.0, provenance=plan.provenance.model_copy(update={"solver": "t"})).plan_hash == plan.plan_hash
    assert a_plan(world_size=8).plan_hash != plan.plan_hash
    assert a_plan(units=plan.units[:1]).plan_hash != plan.plan_hash
    assert a_plan(sizes={**SIZES, "prefetch_bucket_size": 5}).plan_hash != plan.plan_hash


def test_a_changed_plan_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    a_plan().save(path)
    changed = json.loads(path.read_text())
    changed["units"][0]["stage"] = 3
    path.write_text(json.dumps(changed))
    with pytest.raises(DocumentError, match="plan_hash"):
        Plan.load(path)
    del changed["plan_hash"]
    path.write_text(json.dumps(changed))
    assert Plan.load(path).units[0].stage is Stage.FULLY_SHARDED


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "'format' is None"),
        ('{"format": "ds_osdp.profile", "version": 1}', "no ds_osdp.plan file"),
        ('{"format": "ds_osdp.plan", "version": 99}', "version 99"),
        ('{"format": "ds_osdp.plan", "version": 1, "surprise": 1}', "surprise"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(DocumentError, match=message):
        Plan.load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"nowhere\.json"):
        Plan.load(tmp_path / "nowhere.json")


def test_a_plan_of_another_model_or_world_is_refused() -> None:
    a_plan().check_belongs(SHAPES, 4)
    with pytest.raises(PlanMismatchError, match="4 ranks and the job has 2"):
        a_plan().check_belongs(SHAPES, 2)
    with pytest.raises(PlanMismatchError, match=r"'c\.weight'.*'b\.weight'"):
        a_plan().check_belongs({"a.weight": (3, 3), "a.bias": (3,), "c.weight": (9,)}, 4)
    with pytest.raises(PlanMismatchError, match="another size of M"):
        a_plan().check_belongs({**SHAPES, "b.weight": (10,)}, 4)


def test_shipped_clusters() -> None:
    assert DEFAULT_CLUSTER in Cluster.shipped_names()
    assert len(Cluster.shipped_names()) >= 3
    for name in Cluster.shipped_names():
        cluster = Cluster.shipped(name)
        assert cluster.node is not None
        assert cluster.across is not None
        assert cluster.collectives_over(cluster.ranks_per_node) is cluster.node
        assert cluster.collectives_over(cluster.ranks_per_node + 1) is cluster.world
        assert cluster.device.memory_bytes is not None
        assert 1 << 34 < cluster.device.memory_bytes < 1 << 40
        assert 1e13 < cluster.device.flops_per_second < 1e16
        assert 1e11 < cluster.device.bytes_per_second < 1e13
        for operation in ("all_gather", "reduce_scatter", "all_reduce"):
            node, world, across = (getattr(links, operation) for links in (cluster.node, cluster.world, cluster.across))
            assert cluster.device.bytes_per_second > node.bytes_per_second > world.bytes_per_second > across.bytes_per_second
            assert 1e-6 < node.latency_seconds <= world.latency_seconds <= across.latency_seconds < 1e-4
        # Every figure has its source, and every source says where it can be read.
        figures = {
            f"{group}.{figure}" for group in ("node", "world", "across") for figure in ("latency_seconds", "bytes_per_second")
        }
        figures |= {f"device.{figure}" for figure in ("flops_per_second", "bytes_per_second", "memory_bytes")}
        assert set(cluster.sources) == figures
        assert all("https://" in source or "RFC" in source for source in cluster.sources.values())


MACHINES = Machines(
    hosts=("a", "b"), world_size=8, ranks_per_node=4, device="cpu", backend="gloo", dtype="float32", torch="2.13"
)


@pytest.mark.parametrize(
    ("made_on", "message"),
    [
        ({}, None),
        ({"hosts": ("c",), "world_size": 64, "dtype": "bfloat16"}, None),
        ({"ranks_per_node": 8}, "it has 8 ranks per node, the job 4"),
        ({"backend": "nccl"}, "backend nccl, the job has gloo"),
        ({"device": "H100"}, "device H100, the job has cpu"),
        ({"torch": "2.6"}, "torch 2.6, the job has 2.13"),
    ],
)
def test_a_stale_or_foreign_cluster_is_refused(made_on: dict[str, Any], message: str | None) -> None:
    there = MACHINES.model_copy(update=made_on)
    cluster = Cluster.shipped(DEFAULT_CLUSTER).model_copy(update={"machines": there, "ranks_per_node": there.ranks_per_node})
    if message is None:
        cluster.check_describes(MACHINES, "osdp.cluster")
    else:
        with pytest.raises(ClusterMismatchError, match=message):
            cluster.check_describes(MACHINES, "osdp.cluster")


def test_a_job_on_one_node_takes_a_cluster_of_larger_nodes() -> None:
    Cluster.shipped(DEFAULT_CLUSTER).check_describes(MACHINES.model_copy(update={"world_size": 4}), "osdp.cluster")
