from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import free_port, on_ranks

from ds_osdp.cli import main
from ds_osdp.cluster import Cluster, Line
from ds_osdp.measure import free_bytes, links, machines_of_this_job, measure_cluster, measure_device
from ds_osdp.measure.device import median_seconds
from ds_osdp.prices import collective_seconds, ring_terms

RANKS = 2
SIZES = (4 << 10, 256 << 10, 4 << 20)


# --- the line through the measurements


@pytest.mark.parametrize("ranks", [2, 5, 64])
@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter", "all_reduce"])
def test_conversion_is_the_inverse_of_the_price(operation, ranks: int) -> None:
    true = Line(latency_seconds=2e-5, bytes_per_second=3e9)
    found = links._line(operation, ranks, SIZES, [collective_seconds(operation, true, ranks, size) for size in SIZES])
    assert found.latency_seconds == pytest.approx(true.latency_seconds)
    assert found.bytes_per_second == pytest.approx(true.bytes_per_second)


def relative_error(line: Line, seconds: Sequence[float]) -> float:
    priced = [collective_seconds("all_reduce", line, RANKS, size) for size in SIZES]
    return sum(abs(p / s - 1) for p, s in zip(priced, seconds, strict=True))


@pytest.mark.parametrize(
    ("seconds", "zero_latency"),
    [([1e-6, 1e-4, 4e-3], True), ([3e-4, 2e-4, 1e-4], False), ([1e-4, 3e-4, 1e-3], False)],
    ids=["faster than the size", "shrinking", "ordinary"],
)
def test_fit_is_the_best_line_with_no_negative_term(seconds: list[float], zero_latency: bool) -> None:
    link = links._line("all_reduce", RANKS, SIZES, seconds)
    assert (link.latency_seconds == 0.0) == zero_latency
    least = relative_error(link, seconds)
    for latency, bandwidth in ((1.01, 1.0), (0.99, 1.0), (1.0, 1.01), (1.0, 0.99)):
        nudged = Line(latency_seconds=link.latency_seconds * latency, bytes_per_second=link.bytes_per_second * bandwidth)
        assert relative_error(nudged, seconds) >= least * (1 - 1e-5)  # an endless bandwidth is only a large number
    assert relative_error(link.model_copy(update={"latency_seconds": link.latency_seconds + 1e-6}), seconds) > least


def test_one_disturbed_size_does_not_bend_the_line() -> None:
    true = Line(latency_seconds=2e-5, bytes_per_second=3e9)
    sizes = [1 << k for k in range(10, 27, 2)]
    seconds = [collective_seconds("all_gather", true, 4, size) for size in sizes]
    seconds[5] *= 7
    found = links._line("all_gather", 4, sizes, seconds)
    assert found.latency_seconds == pytest.approx(true.latency_seconds)
    assert found.bytes_per_second == pytest.approx(true.bytes_per_second)
    assert found.residual_percent == pytest.approx(100 * (6 / 7) / 9), "one of nine is six sevenths off"


def test_time_that_does_not_grow_is_all_latency() -> None:
    link = links._line("all_reduce", RANKS, SIZES, [3e-4, 2e-4, 1e-4])
    hops, _ = ring_terms("all_reduce", RANKS)
    assert collective_seconds("all_reduce", link, RANKS, 1 << 30) == pytest.approx(hops * link.latency_seconds, rel=0.02)


# --- one process


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_world_of_one_sends_nothing() -> None:
    cluster = measure_cluster(machines_of_this_job(1))
    for link in (cluster.world.all_gather, cluster.world.reduce_scatter, cluster.world.all_reduce):
        assert link.latency_seconds == 0.0
        assert (1 << 30) / link.bytes_per_second < 1e-5
    assert cluster.reduce_scatter_blocks
    assert "gloo, float32" in cluster.source


def test_device_rates_predict_its_own_time() -> None:
    rates = measure_device(torch.float32)
    side = 512
    a = torch.ones(side, side, device="cuda" if torch.cuda.is_available() else "cpu")
    seconds = median_seconds(lambda: torch.mm(a, a), a.device)
    # Other processes share this machine.
    assert 1 / 20 < 2 * side**3 / rates.flops_per_second / seconds < 20
    assert rates.bytes_per_second > 1e8


def test_ranks_of_a_node_share_its_memory() -> None:
    if torch.cuda.is_available():
        assert free_bytes(8) <= torch.cuda.get_device_properties(0).total_memory
    else:
        assert free_bytes(4) == pytest.approx(free_bytes(1) / 4, rel=0.1)


# --- four processes, two "nodes"


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return on_ranks(4, "calibrating:calibrations", environment={"LOCAL_WORLD_SIZE": "2"})


@pytest.mark.ranks
def test_every_rank_gets_the_same_cluster(found: dict[str, Any]) -> None:
    assert len(set(found["clusters"])) == 1
    assert "bfloat16" in found["cluster"].source
    assert found["cluster"].machines.world_size == 4
    assert found["cluster"].reduce_scatter_blocks


@pytest.mark.ranks
def test_all_groups_are_measured_alone_and_beside_computation(found: dict[str, Any]) -> None:
    cluster = found["cluster"]
    assert cluster.ranks_per_node == 2
    assert cluster.node_differs
    for collectives in (cluster.world, cluster.node, cluster.across):
        for link in (collectives.all_gather, collectives.reduce_scatter, collectives.all_reduce):
            assert link.residual_percent is not None
            assert link.overlapped.residual_percent is not None


@pytest.mark.ranks
def test_measured_link_predicts_a_real_collective(found: dict[str, Any]) -> None:
    link = found["cluster"].world.all_reduce
    # Other processes share this machine, and the link was measured in another dtype.
    assert 1 / 20 < collective_seconds("all_reduce", link, 4, 4 << 20) / found["all_reduce"] < 20


@pytest.mark.ranks
def test_the_slowest_rank_counts_and_the_first_decides(found: dict[str, Any]) -> None:
    assert min(found["slow"]) >= 0.05
    assert found["agreed"] == [10, 10, 10, 10]


@pytest.mark.ranks
def test_a_job_measures_once_and_keeps_it(found: dict[str, Any]) -> None:
    first, again, broken, stale = found["lines"]
    assert "links measured; kept in" in first
    assert "links as measured on" in again
    assert "cannot be read" in broken
    assert "torch is 1.0" in stale
    assert len(set(found["kept"])) == 1


@pytest.mark.ranks
def test_a_rank_that_does_not_come_is_named(found: dict[str, Any]) -> None:
    assert "rank 3 did not take part in all_gather over the world within 1 s" in found["absent"][0]
    assert all("CalibrationError" in text for text in found["absent"][:3])


@pytest.mark.slow
@pytest.mark.ranks
def test_a_rank_that_does_not_start_is_named() -> None:
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "ds_osdp", "calibrate", "--timeout", "1"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2
    assert "rank 1, 2 did not start within 1 s" in done.stderr


@pytest.mark.slow
@pytest.mark.ranks
def test_calibrate_under_a_launcher(tmp_path: Path) -> None:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--module", "ds_osdp"]
    command = [*launcher, "--local_rank=0", "calibrate", "--seconds", "1", "--output", "cluster.json", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    cluster = Cluster.load(tmp_path / "cluster.json")
    assert json.loads(done.stdout) == cluster.to_dict(), "one rank prints, and nothing else"
    assert cluster.machines is not None
    assert cluster.machines.backend == "gloo"
    assert cluster.node is None, "one node has no other links than the world"


def test_calibrate_needs_a_launcher(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["calibrate"]) == 2
    assert "torchrun" in capsys.readouterr().err
