"""The launches that tests of saved and moved state share: starting ranks takes longer than most of what they run."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from cases import Case
from launch import on_ranks

LAUNCHES = {"two": 2, "two, slices": 2, "two, long": 2, "four": 4, "two again": 2}
"""How many ranks; all but the first are slow."""
PLANS = {
    "two": ("stock", "all", "mixed"),
    "two, slices": ("slices", "other slices"),
    "four": ("stock", "all", "mixed", "everything", "slices"),
}
"""What saves and loads."""
UNIVERSAL = {
    ("four", "from two"): (("stock", "mixed", "slices"), ("mixed", "everything", "slices")),
    ("two again", "from four"): (("stock", "everything", "slices"), ("all", "mixed", "slices")),
}
"""What saves on one number of ranks, and loads that on another."""

FP32 = Case(name="fp32", config={"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 8}}})
BF16 = Case(name="bf16", bf16=True, accumulation=2, groups=True, frozen="h.2.", zero={"sub_group_size": 9_000})
JOURNEYS = {
    "two": [(FP32, ["none", "all", "mixed", "one", "none"])],
    "two, long": [
        (BF16, ["mixed", "none", "one", "all"]),
        (Case(name="exact", zero_init=True, seed_by_rank=True), ["none", "two", "none"]),
    ],
    "four": [(Case(name="nodes"), ["node", "everything", "none", "all", "node"])],
}
MEMORY = Case(name="memory", model={"hidden": 64})
# DeepSpeed's sub-groups no larger than the largest unit, the fourfold hidden layer.
MEMORY_BF16 = replace(MEMORY, bf16=True, zero={"sub_group_size": 4 * 64 * 64})
FAILURES = [("forward", 0), ("forward", 1), ("backward", 0), ("step", 1)]
TOUR = ["none", "all", "mixed", "two", "one", "none"]


def marked(rows: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Rows of a table of tests, which begin with their launch."""
    return [pytest.param(*row, marks=() if row[0] == "two" else pytest.mark.slow) for row in rows]


@functools.cache
def folder() -> str:
    path = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, path)
    return path


@functools.cache
def _launched(launch: str) -> dict[str, Any] | AssertionError:
    # What was not saved first cannot be loaded here.
    before = {"two, slices": "two", "four": "two, slices", "two again": "four"}.get(launch)
    calls = _calls(launch)
    try:
        if before is not None:
            found(before)
        results = on_ranks(LAUNCHES[launch], "launch:each", [call for _, call in calls], timeout=600)
    except AssertionError as error:
        return error
    return {name: result for (name, _), result in zip(calls, results, strict=True)}


def _calls(launch: str) -> list[tuple[str, Any]]:
    on_two, on_four = f"{folder()}/on 2", f"{folder()}/on 4"
    if launch == "two":
        return [
            ("matrix", ("checkpoints:matrix", (on_two, PLANS[launch], "here"))),
            ("universal", ("checkpoints:to_universal", (on_two, ["stock", "mixed"], "here"))),
            ("modifier", ("checkpoints:gathered_modifier", ("mixed", 1))),
            ("engines", ("checkpoints:one_engine_after_another", (["two", "two", "two"],))),
            ("other engines", ("checkpoints:one_engine_after_another", (["mixed", "one", "two"],))),
            ("drift, all", ("checkpoints:a_copy_that_drifts", ("all",))),
            ("drift, one", ("checkpoints:a_copy_that_drifts", ("one",))),
            ("journeys", ("moves:journeys", (JOURNEYS[launch], folder()))),
            ("refused", ("moves:refused_moves", ())),
            ("bare", ("replans:bare_section", (30, folder()))),
        ]
    if launch == "two, slices":
        return [
            ("matrix", ("checkpoints:matrix", (on_two, PLANS[launch], "here", PLANS["two"]))),
            ("universal", ("checkpoints:to_universal", (on_two, ["slices"], "here"))),
        ]
    if launch == "two, long":
        return [
            ("journeys", ("moves:journeys", (JOURNEYS[launch], folder()))),
            ("bytes, fp32", ("moves:bytes_while_moving", (MEMORY, TOUR))),
            ("bytes, bf16", ("moves:bytes_while_moving", (MEMORY_BF16, TOUR))),
            ("changing", ("replans:changing_inputs", (40, 10))),
            *((f"{part} {i}", ("replans:failing_allocations", (part, i))) for part, i in FAILURES),
        ]
    if launch == "four":
        return [
            ("matrix", ("checkpoints:matrix", (on_four, PLANS[launch], "here"))),
            ("universal", ("checkpoints:to_universal", (on_four, UNIVERSAL["two again", "from four"][0], "here"))),
            ("from two", ("checkpoints:from_universal", (on_two, *UNIVERSAL[launch, "from two"], "here"))),
            ("modifier", ("checkpoints:gathered_modifier", ("everything", 1))),
            ("drift, node", ("checkpoints:a_copy_that_drifts", ("node",))),
            ("journeys", ("moves:journeys", (JOURNEYS[launch], folder()))),
        ]
    return [
        # First: no rank has imported this package yet.
        ("stock only", ("stock_only:loads", (on_two, [*PLANS["two"], "slices"], "here"))),
        ("from four", ("checkpoints:from_universal", (on_four, *UNIVERSAL[launch, "from four"], "here"))),
        ("interrupted", ("checkpoints:interrupted_save", (f"{folder()}/interrupted",))),
    ]


def found(launch: str) -> dict[str, Any]:
    """What the calls of a launch returned; an error is raised by every test that asks."""
    results = _launched(launch)
    if isinstance(results, AssertionError):
        raise results
    return results
