"""A plan never leaks into files, copies stay equal, and one that does not is found."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from launch import on_ranks

pytestmark = pytest.mark.ranks

PLANS = ("stock", "some", "all")
PAIRS = [(saver, loader) for saver in PLANS for loader in PLANS]


@pytest.fixture(scope="session")
def trips(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return on_ranks(2, "checkpoints:round_trips", str(tmp_path_factory.mktemp("checkpoints")), list(PLANS))


@pytest.mark.parametrize(("saver", "loader"), PAIRS)
def test_loads_what_any_plan_saved(trips: dict[str, Any], saver: str, loader: str) -> None:
    assert trips["equal"][saver, loader] == []


@pytest.mark.parametrize(("saver", "loader"), PAIRS)
def test_continues_as_if_never_stopped(trips: dict[str, Any], saver: str, loader: str) -> None:
    assert trips["losses"][saver, loader] == pytest.approx(trips["uninterrupted"][saver], rel=2**-7)


@pytest.mark.parametrize("saver", PLANS)
def test_zero_to_fp32_reads_it(trips: dict[str, Any], saver: str) -> None:
    assert trips["zero_to_fp32"][saver] == 0.0


@pytest.mark.parametrize("plan", PLANS)
def test_equal_state_gives_equal_files(trips: dict[str, Any], plan: str) -> None:
    assert trips["same_files"][plan] == []


@functools.cache
def modified() -> dict[str, list[float]]:
    return on_ranks(2, "checkpoints:gathered_modifier", 1)


def test_a_modified_parameter_reaches_all_copies() -> None:
    for name, values in modified().items():
        assert values == pytest.approx([values[0]] * len(values), abs=0.0), name


def test_a_copy_that_differs_is_named() -> None:
    message = on_ranks(2, "checkpoints:a_copy_that_drifts")
    assert message.startswith("RankMismatchError")
    assert "h.1.fc1.weight" in message
