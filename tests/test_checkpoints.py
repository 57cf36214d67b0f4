"""A plan never leaks into files, copies stay equal, and one that does not is found."""

from __future__ import annotations

from typing import Any

import pytest
from launch import on_ranks

pytestmark = pytest.mark.ranks

PLANS = {2: ("stock", "some", "mixed"), 4: ("stock", "everything")}
SAVERS = [(ranks, saver) for ranks, plans in PLANS.items() for saver in plans]
PAIRS = [(ranks, saver, loader) for ranks, saver in SAVERS for loader in PLANS[ranks]]

Trips = dict[int, dict[str, Any]]


@pytest.fixture(scope="session")
def trips(tmp_path_factory: pytest.TempPathFactory) -> Trips:
    return {
        ranks: on_ranks(ranks, "checkpoints:round_trips", str(tmp_path_factory.mktemp("checkpoints")), list(plans))
        for ranks, plans in PLANS.items()
    }


@pytest.mark.parametrize(("ranks", "saver", "loader"), PAIRS)
def test_loads_what_any_plan_saved(trips: Trips, ranks: int, saver: str, loader: str) -> None:
    assert trips[ranks]["equal"][saver, loader] == []


@pytest.mark.parametrize(("ranks", "saver", "loader"), PAIRS)
def test_continues_as_if_never_stopped(trips: Trips, ranks: int, saver: str, loader: str) -> None:
    assert trips[ranks]["losses"][saver, loader] == pytest.approx(trips[ranks]["uninterrupted"][saver], rel=2**-7)


@pytest.mark.parametrize(("ranks", "saver"), SAVERS)
def test_zero_to_fp32_reads_it(trips: Trips, ranks: int, saver: str) -> None:
    assert trips[ranks]["zero_to_fp32"][saver] == 0.0


@pytest.mark.parametrize(("ranks", "plan"), SAVERS)
def test_equal_state_gives_equal_files(trips: Trips, ranks: int, plan: str) -> None:
    assert trips[ranks]["same_files"][plan] == []


@pytest.mark.parametrize(("ranks", "plan"), [(2, "mixed"), pytest.param(4, "everything", marks=pytest.mark.slow)])
def test_a_modified_parameter_reaches_all_copies(ranks: int, plan: str) -> None:
    for name, values in on_ranks(ranks, "checkpoints:gathered_modifier", plan, 1).items():
        assert values == pytest.approx([1.0] * len(values), abs=1e-5), name


@pytest.mark.parametrize(("ranks", "plan"), [(2, "all"), (2, "one"), pytest.param(4, "node", marks=pytest.mark.slow)])
def test_a_copy_that_differs_is_named(ranks: int, plan: str) -> None:
    message = on_ranks(ranks, "checkpoints:a_copy_that_drifts", plan)
    assert message.startswith("RankMismatchError")
    assert "h.1.fc1.weight" in message


def test_a_model_can_go_from_engine_to_engine() -> None:
    losses = on_ranks(2, "checkpoints:one_engine_after_another", ["two", "two", "two"])
    assert on_ranks(2, "checkpoints:one_engine_after_another", ["mixed", "one", "two"]) == pytest.approx(losses, rel=1e-6)
