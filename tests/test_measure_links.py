from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ds_osdp.cluster import Cluster, Link
from ds_osdp.measure import free_bytes, links, measure_cluster, measure_device
from ds_osdp.prices import collective_seconds, ring_terms

RANKS, CPU = 2, torch.device("cpu")
SIZES = (4 << 10, 256 << 10, 4 << 20)


# --- the line through the measurements


@pytest.mark.parametrize("ranks", [2, 5, 64])
@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter", "all_reduce"])
def test_conversion_is_the_inverse_of_the_price(operation, ranks: int) -> None:
    true = Link(latency_seconds=2e-5, bytes_per_second=3e9)
    found = links._link(operation, ranks, SIZES, [collective_seconds(operation, true, ranks, size) for size in SIZES])
    assert found.latency_seconds == pytest.approx(true.latency_seconds)
    assert found.bytes_per_second == pytest.approx(true.bytes_per_second)


def relative_error(link: Link, seconds: Sequence[float]) -> float:
    priced = [collective_seconds("all_reduce", link, RANKS, size) for size in SIZES]
    return sum((p / s - 1) ** 2 for p, s in zip(priced, seconds, strict=True))


@pytest.mark.parametrize(
    ("seconds", "zero_latency"),
    [([1e-6, 1e-4, 4e-3], True), ([3e-4, 2e-4, 1e-4], False), ([1e-4, 3e-4, 1e-3], False)],
    ids=["faster than the size", "shrinking", "ordinary"],
)
def test_fit_is_the_best_link_with_no_negative_term(seconds: list[float], zero_latency: bool) -> None:
    link = links._link("all_reduce", RANKS, SIZES, seconds)
    assert (link.latency_seconds == 0.0) == zero_latency
    least = relative_error(link, seconds)
    for latency, bandwidth in ((1.01, 1.0), (0.99, 1.0), (1.0, 1.01), (1.0, 0.99)):
        nudged = Link(latency_seconds=link.latency_seconds * latency, bytes_per_second=link.bytes_per_second * bandwidth)
        assert relative_error(nudged, seconds) >= least * (1 - 1e-5)  # an endless bandwidth is only a large number
    assert relative_error(link.model_copy(update={"latency_seconds": link.latency_seconds + 1e-6}), seconds) > least


def test_time_that_does_not_grow_is_all_latency() -> None:
    link = links._link("all_reduce", RANKS, SIZES, [3e-4, 2e-4, 1e-4])
    hops, _ = ring_terms("all_reduce", RANKS)
    assert collective_seconds("all_reduce", link, RANKS, 1 << 30) == pytest.approx(hops * link.latency_seconds, rel=0.01)


# --- one process


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_world_of_one_sends_nothing() -> None:
    cluster = measure_cluster(ranks_per_node=1)
    for link in (cluster.world.all_gather, cluster.world.reduce_scatter, cluster.world.all_reduce):
        assert link.latency_seconds == 0.0
        assert (1 << 30) / link.bytes_per_second < 1e-5
    assert cluster.reduce_scatter_blocks
    assert "gloo, float32" in cluster.source


def test_device_rates_predict_its_own_time() -> None:
    rates = measure_device(torch.float32)
    side = 512
    a = torch.ones(side, side, device="cuda" if torch.cuda.is_available() else "cpu")
    seconds = links._median_seconds(lambda: torch.mm(a, a), a.device)
    # Other processes share this machine.
    assert 1 / 20 < 2 * side**3 / rates.flops_per_second / seconds < 20
    assert rates.bytes_per_second > 1e8


def test_ranks_of_a_node_share_its_memory() -> None:
    if torch.cuda.is_available():
        assert free_bytes(8) <= torch.cuda.get_device_properties(0).total_memory
    else:
        assert free_bytes(4) == pytest.approx(free_bytes(1) / 4, rel=0.1)


# --- two processes


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    started = time.perf_counter()
    cluster = measure_cluster(seconds=0.6, ranks_per_node=RANKS, dtype=torch.bfloat16)
    took = time.perf_counter() - started
    slow = links._slowest_seconds(lambda: time.sleep(0.05 * rank), 2, None, CPU)
    whole = torch.zeros(1 << 20)
    reduced = links._slowest_seconds(lambda: dist.all_reduce(whole), 5, None, CPU)
    found = {
        "cluster": cluster.to_dict(),
        "took": took,
        "slow": slow,
        "agreed": links._agreed(10 + rank, None, CPU),
        "all_reduce": float(np.median(reduced)),
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(_rank, (str(folder),), nprocs=RANKS)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def test_every_rank_gets_the_same_cluster(found: list[dict]) -> None:
    assert found[0]["cluster"] == found[1]["cluster"]
    cluster = Cluster.from_dict(found[0]["cluster"])
    assert cluster.ranks_per_node == RANKS
    assert cluster.reduce_scatter_blocks
    assert "bfloat16" in cluster.source


def test_measured_link_predicts_a_real_collective(found: list[dict]) -> None:
    link = Cluster.from_dict(found[0]["cluster"]).world.all_reduce
    # Other processes share this machine, and the link was measured in another dtype.
    assert 1 / 20 < collective_seconds("all_reduce", link, RANKS, 4 << 20) / found[0]["all_reduce"] < 20


def test_measuring_takes_about_the_time_it_was_given(found: list[dict]) -> None:
    assert found[0]["took"] < 10


def test_the_slowest_rank_counts_and_the_first_decides(found: list[dict]) -> None:
    for rank in found:
        assert min(rank["slow"]) >= 0.05
        assert rank["agreed"] == 10
    assert found[0]["slow"] == found[1]["slow"]
