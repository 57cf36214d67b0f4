"""A live engine moves to another plan, and trains on as if it had been started there."""

from __future__ import annotations

import pytest
from state import JOURNEYS, TOUR, found, marked

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(700)]

NAMES = marked((launch, case.name) for launch, rows in JOURNEYS.items() for case, _ in rows)


@pytest.mark.parametrize(("launch", "name"), NAMES)
def test_moves_every_state_bit_for_bit(launch: str, name: str) -> None:
    assert [what for what in found(launch)["journeys"][name]["different"] if what[-1] == "moved"] == []
    assert found(launch)["journeys"][name]["same objects"]


@pytest.mark.parametrize(("launch", "name"), NAMES)
def test_trains_on_as_a_job_started_there(launch: str, name: str) -> None:
    row = found(launch)["journeys"][name]
    assert row["losses"][1:] == row["started"]
    assert row["different"] == []


@pytest.mark.parametrize(("launch", "name"), NAMES)
def test_trains_as_stock_zero3_throughout(launch: str, name: str) -> None:
    row = found(launch)["journeys"][name]
    losses, stock = ([loss for stop in row[key] for loss in stop] for key in ("losses", "stock"))
    assert losses == pytest.approx(stock, rel=2**-7 if name == "bf16" else 1e-6)


@pytest.mark.slow
def test_stages_2_and_3_and_back_are_stock_again_bit_for_bit() -> None:
    row = found("two, long")["journeys"]["exact"]
    assert row["losses"] == row["stock"]
    assert all((row["parameters"][name] == values).all() for name, values in row["stock parameters"].items())


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_move_holds_no_more_than_the_larger_plan_and_one_unit(precision: str) -> None:
    rows = found("two, long")[f"bytes, {precision}"]
    held = [row["held"] for row in rows]
    for stop in range(1, len(rows)):
        assert rows[stop]["move"] <= max(held[stop - 1 : stop + 1]) + rows[stop]["unit"], TOUR[stop]
    # What moves is many units: the bound means something.
    assert max(held) > 6 * rows[0]["unit"]


def test_what_cannot_be_moved_is_refused_on_all_ranks_and_nothing_is_touched() -> None:
    told = found("two")["refused"]
    assert told["another plan on each rank"].count("RankMismatchError: the plan of rank 1 differs") == 2
    assert told["another model"].count("PlanMismatchError: the plan belongs to another") == 2
    assert told["between micro-steps"].count("UnsupportedError: gradients are being accumulated") == 2
    assert told["frozen since"].count("'head.weight'") == 2
    assert told["afterwards"] == "True"
