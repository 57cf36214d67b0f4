"""When every operation of a planned step begins and ends: the times behind the seconds that a plan predicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ds_osdp.step import Instance, Integers, backward_ends, backward_ns, columns, forward_ends

__all__ = ["Operation", "Pass", "exposed_seconds", "schedule"]

Machine = Literal["gather", "compute", "reduce"]


@dataclass(frozen=True, slots=True)
class Operation:
    """One unit's work on one machine, in nanoseconds from the begin of its pass."""

    machine: Machine
    unit: str
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Pass:
    """A part of the step in which every unit has its turn once."""

    name: str
    times: int
    """How often the step runs it."""
    duration_ns: int
    """At least the end of its last operation: gathers and reductions also share one channel."""
    operations: tuple[Operation, ...]
    """What takes time, machine by machine."""


def schedule(problem: Instance, choice: Sequence[int]) -> tuple[Pass, ...]:
    """The passes of one optimizer step: forwards, backwards, and the update; the first and the last differ from the others.

    Their durations, each as often as it runs, add up to the step's: equation (1) of docs/model.md.
    """
    column = columns(problem, choice)
    units = problem.units
    more = problem.accumulation - 1

    def forward(name: str, times: int, gather: str) -> Pass:
        gathered, computed = forward_ends(column, gather)
        operations = (
            *_operations("gather", units, gathered, column(gather)),
            *_operations("compute", units, computed, column("forward_ns")),
        )
        return Pass(name, times, int(computed[-1]), operations)

    def backward(name: str, times: int, computation: str, reduction: str) -> Pass:
        gathered, computed, reduced = backward_ends(column, computation, reduction)
        operations = (
            *_operations("gather", units[::-1], gathered, column("gather_backward_ns")[::-1]),
            *_operations("compute", units[::-1], computed, column(computation)[::-1]),
            *_operations("reduce", units[::-1], reduced, column(reduction)[::-1]),
        )
        return Pass(name, times, backward_ns(column, computation, reduction), operations)

    updates = column("update_ns")
    others = (forward("forward", more, "gather_forward_ns"), backward("backward", more, "backward_ns", "reduce_ns"))
    return (
        forward("first forward", 1, "gather_first_ns"),
        *(others if more else ()),
        backward("last backward", 1, "last_backward_ns", "last_reduce_ns"),
        Pass("update", 1, int(updates.sum()), tuple(_operations("compute", units, updates.cumsum(), updates))),
    )


def exposed_seconds(passes: Sequence[Pass]) -> float:
    """Seconds of a step in which nothing is computed because communication is waited for."""
    idle = 0
    for part in passes:
        computing = sum(o.end_ns - o.begin_ns for o in part.operations if o.machine == "compute")
        idle += part.times * (part.duration_ns - computing)
    return idle / 1e9


def _operations(machine: Machine, units: Sequence[str], ends: Integers, takes: Integers) -> list[Operation]:
    rows = zip(units, (ends - takes).tolist(), ends.tolist(), strict=True)
    return [Operation(machine, unit, begin, end) for unit, begin, end in rows if end > begin]
