"""A plan never leaks into files, copies stay equal, and one that does not is found."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import on_ranks
from state import PLANS, UNIVERSAL, found, marked

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(700)]

SAVERS = [(launch, saver) for launch, plans in PLANS.items() for saver in plans]
PAIRS = [(launch, saver, loader) for launch, saver in SAVERS for loader in PLANS[launch]]
PAIRS += [("two, slices", *pair) for a in PLANS["two"] for b in PLANS["two, slices"] for pair in ((a, b), (b, a))]
TRIPS = [(*where, saver, loader) for where, (savers, loaders) in UNIVERSAL.items() for saver in savers for loader in loaders]
BF16 = 2**-7


@pytest.mark.parametrize(("launch", "saver", "loader"), marked(PAIRS))
def test_loads_what_any_plan_saved(launch: str, saver: str, loader: str) -> None:
    assert found(launch)["matrix"]["equal"][saver, loader] == []


@pytest.mark.parametrize(("launch", "saver", "loader"), marked(PAIRS))
def test_continues_as_if_never_stopped(launch: str, saver: str, loader: str) -> None:
    trips = found(launch)["matrix"]
    assert trips["losses"][saver, loader] == pytest.approx(trips["uninterrupted"][saver], rel=BF16)
    if saver == loader:
        assert trips["losses"][saver, loader] == trips["uninterrupted"][saver]


@pytest.mark.parametrize(("launch", "saver"), marked(SAVERS))
def test_zero_to_fp32_reads_it(launch: str, saver: str) -> None:
    assert found(launch)["matrix"]["zero_to_fp32"][saver] == 0.0


@pytest.mark.parametrize(("launch", "plan"), marked(SAVERS))
def test_equal_state_gives_equal_files(launch: str, plan: str) -> None:
    assert found(launch)["matrix"]["same_files"][plan] == []


@pytest.mark.parametrize(("launch", "what", "saver", "loader"), marked(TRIPS))
def test_another_number_of_ranks_loads_it_made_universal(launch: str, what: str, saver: str, loader: str) -> None:
    trips = found(launch)[what]
    assert trips["equal"][saver, loader] == []
    assert trips["losses"][saver, loader] == pytest.approx(trips["uninterrupted"][saver], rel=BF16)


@pytest.mark.slow
def test_stock_loads_it_where_this_package_is_not_installed() -> None:
    assert found("two again")["stock only"] == {saver: [] for saver in (*PLANS["two"], "slices")}


@pytest.mark.slow
def test_a_save_that_fails_on_one_rank_leaves_the_checkpoint_before() -> None:
    row = found("two again")["interrupted"]
    assert "RankMismatchError: rank 1 fails: checkpoint 'second' cannot be written" in row["told"]
    assert "DocumentError: checkpoint 'second' cannot be written" in row["told"]
    assert row["latest"] == "first"
    assert row["left over"] == []
    assert row["different"] == []
    assert row["losses"][0] == row["losses"][1]


@pytest.mark.slow
def test_a_save_that_is_killed_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="killed_save failed"):
        on_ranks(2, "checkpoints:killed_save", str(tmp_path))
    half_written = [path.name for path in (tmp_path / "second").iterdir() if "rank_1_" in path.name and "optim" in path.name]
    assert [name.endswith(".part") for name in half_written] == [True]
    assert (tmp_path / "latest").read_text() == "first"
    row = on_ranks(2, "checkpoints:after_a_kill", str(tmp_path))
    assert "/first/" in row["path"]
    assert row["different"] == []
    assert row["losses"][0] == row["losses"][1]
    assert (tmp_path / "latest").read_text() == "second"
    assert not list((tmp_path / "second").glob("*.part"))


@pytest.mark.slow
@pytest.mark.parametrize(("what", "says"), [("truncated", "is incomplete"), ("missing", "there is no")])
def test_a_bad_file_is_named_on_all_ranks(what: str, says: str) -> None:
    row = found("two again")["interrupted"]
    for told in row[what].split(" | "):
        assert says in told
        assert row["file"] in told


@pytest.mark.slow
def test_a_bad_file_that_is_not_read_does_no_harm() -> None:
    assert found("two again")["interrupted"]["weights only"] == "nothing | nothing"


@pytest.mark.slow
def test_a_save_holds_no_more_than_one_unit_beside() -> None:
    row = found("two again")["interrupted"]
    assert row["beside"] <= row["unit"] < row["states"] / 2


@pytest.mark.parametrize("launch", marked([("two",), ("four",)]))
def test_a_modified_parameter_reaches_all_copies(launch: str) -> None:
    for name, values in found(launch)["modifier"].items():
        assert values == pytest.approx([1.0] * len(values), abs=1e-5), name


@pytest.mark.parametrize(("launch", "what"), marked([("two", "drift, all"), ("two", "drift, one"), ("four", "drift, node")]))
def test_a_copy_that_differs_is_named(launch: str, what: str) -> None:
    for told in found(launch)[what].split(" | "):
        assert told.startswith("RankMismatchError")
        assert "h.1.fc1.weight" in told


def test_a_model_can_go_from_engine_to_engine() -> None:
    assert found("two")["other engines"] == pytest.approx(found("two")["engines"], rel=1e-6)
