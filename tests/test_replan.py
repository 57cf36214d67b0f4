"""A job plans from what its steps show, moves, and trains as stock ZeRO-3 throughout."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from state import FAILURES, found

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(700)]


def test_a_bare_section_moves_once_and_trains_as_stock() -> None:
    row = found("two")["bare"]
    assert len(row["losses"]) == 30
    assert row["losses"] == [pytest.approx(losses, rel=1e-6) for losses in row["stock"]]
    hashes = [hashes[0] for hashes in row["hashes"]]
    assert all(len(set(everyone)) == 1 for everyone in row["hashes"])
    assert [step for step in range(1, 30) if hashes[step] != hashes[step - 1]] == [5]
    assert row["stages"][0] == [3]
    assert 3 not in row["stages"][-1], "with memory to spare nothing needs gathering"
    predicted = [line.partition(",")[2] for line in row["predicted"]]
    assert [step for step in range(1, 30) if predicted[step] != predicted[step - 1]] == [5], "metrics follow the plan"
    (line,) = (line for line in row["lines"] if "before" in line)
    assert line.startswith("osdp: planned after step 5: ")


@pytest.mark.slow
def test_plans_again_when_inputs_change_but_not_too_often() -> None:
    lines = [line for line in found("two, long")["changing"]["lines"] if "plans again" in line]
    steps = [int(line.partition("after step ")[2].partition(":")[0]) for line in lines]
    assert len(steps) >= 2
    assert all(later - earlier >= 10 for earlier, later in itertools.pairwise(steps))
    assert "a micro-step's input has 32 elements in place of 16" in lines[0]


@pytest.mark.slow
@pytest.mark.parametrize(("part", "micro_step"), FAILURES)
def test_an_allocation_that_fails_on_one_rank_moves_all_back(part: str, micro_step: int) -> None:
    row: dict[str, Any] = found("two, long")[f"{part} {micro_step}"]
    assert row["stages"] == [[3], [3]]
    assert row["skipped"] == int(row["lost"])
    assert row["losses"] == pytest.approx(row["expected"], rel=1e-6)
    assert sum("an allocation failed in step 4: all ranks go back" in line for line in row["lines"]) == 1
