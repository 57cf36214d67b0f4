"""Run HiGHS on the model and translate what came out: why it stopped, and what it holds, are two questions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pyomo.common.collections import ComponentMap
from pyomo.contrib.solver.common.factory import SolverFactory
from pyomo.contrib.solver.common.results import SolutionStatus, TerminationCondition

from ds_osdp import milp
from ds_osdp.errors import SolverError
from ds_osdp.prices import Instance, evaluate

__all__ = ["SOLVER", "Solution", "Stop", "fastest", "leanest"]

SOLVER = "HiGHS"


class Stop(Enum):
    """Why the search ended."""

    PROVEN = "proven"
    """No better plan exists, within the gap that was asked for."""
    TIME_LIMIT = "time limit"


@dataclass(frozen=True, slots=True)
class Solution:
    """A choice of one option index per unit."""

    choice: tuple[int, ...]
    stop: Stop
    bound_ns: int
    """No choice takes less."""


def fastest(problem: Instance, budget_bytes: int, *, time_limit_seconds: float, gap: float) -> Solution | None:
    """The fastest choice within the budget; None when none fits.

    Args:
        problem: the priced options.
        budget_bytes: per rank.
        time_limit_seconds: when to stop with the best found.
        gap: relative gap at which to stop; 0 asks for proof.

    Raises:
        SolverError: the time ended before any choice was found, or HiGHS failed.
    """
    allowed = budget_bytes
    while True:
        outcome = _run(milp.build(problem, allowed), time_limit_seconds, gap)
        if outcome is None:
            return None
        choice, stop, bound = outcome
        excess = evaluate(problem, choice).peak_bytes - budget_bytes
        if excess <= 0:
            return Solution(choice, stop, bound_ns=max(0, int(bound * 1e3)))
        # HiGHS accepts a row that is violated by its tolerance, about a byte; a plan must not exceed by any.
        allowed -= excess


def leanest(problem: Instance, *, time_limit_seconds: float) -> tuple[int, ...]:
    """The choice with the least peak memory.

    Raises:
        SolverError: the time ended before any choice was found, or HiGHS failed.
    """
    outcome = _run(milp.minimise_memory(problem), time_limit_seconds, 0.0)
    assert outcome is not None, "the leanest plan always exists: every unit has an option"
    return outcome[0]


def _run(model: Any, time_limit_seconds: float, gap: float) -> tuple[tuple[int, ...], Stop, float] | None:
    solver = SolverFactory("highs")
    results = solver.solve(
        model,
        load_solutions=False,
        raise_exception_on_nonoptimal_result=False,
        time_limit=time_limit_seconds,
        rel_gap=gap,
        abs_gap=0.0,
        # One thread: the same input must give the same plan on every machine.
        threads=1,
        solver_options={"random_seed": 0},
    )
    condition = results.termination_condition
    if condition is TerminationCondition.provenInfeasible:
        return None
    stops = {
        TerminationCondition.convergenceCriteriaSatisfied: Stop.PROVEN,
        TerminationCondition.maxTimeLimit: Stop.TIME_LIMIT,
    }
    if condition not in stops or results.solution_status not in (SolutionStatus.optimal, SolutionStatus.feasible):
        raise SolverError(
            f"{SOLVER} stopped ({condition.name}) without a plan after {time_limit_seconds:g} s: raise "
            "osdp.solver.time_limit_s, or pin more parameters with osdp.rules"
        )
    values = results.solution_loader.get_vars()
    return _choice(model, values), stops[condition], results.objective_bound


def _choice(model: Any, values: ComponentMap[Any, float]) -> tuple[int, ...]:
    value: Callable[[Any], float] = values.__getitem__
    taken: dict[int, int] = {}
    for u, o in model.UO:
        if value(model.x[u, o]) > 0.5:
            taken[u] = o
    return tuple(taken[u] for u in model.U)
