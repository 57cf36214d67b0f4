"""Find the best choice: a bound from counting kinds, a choice spread over the units, and the exact model where it fits.

Why HiGHS stopped, and what it holds, are two questions; nothing is read from it before both are answered.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import Any

import highspy
from pyomo.contrib.solver.common.factory import SolverFactory
from pyomo.contrib.solver.common.results import SolutionStatus, TerminationCondition

from ds_osdp import counting, milp
from ds_osdp.errors import SolverError
from ds_osdp.step import Instance, evaluate

__all__ = ["EXACT_UNITS", "SOLVER", "Solution", "fastest", "leanest", "relative_gap"]

SOLVER = "HiGHS"
_NOTHING_FOUND = f"{SOLVER} found no plan in time: raise osdp.solver.time_limit_s, or pin more with osdp.rules"

EXACT_UNITS = 400
"""Models of up to this many units are solved unit by unit if counting kinds leaves a gap; larger ones keep the gap."""

_TIGHTENINGS = 12
_MARGIN = 16
"""Of the excess, one part in so many is taken off the budget beside it."""
_COUNTING_SHARE = 0.4
"""Of the time, at most, for the relaxation: the exact model needs the rest."""
_POLISHING_SHARE = 0.25
"""Of the time left to the exact model: HiGHS bounds well at once, and a plan close to the bound is quicker found by hand."""
_COUNTING_GAP = 1e-5
"""At which counting stops for models over :data:`EXACT_UNITS`: to close the rest takes HiGHS up to a hundred times as long."""
_PRICES_NS = (1e-9, 1e9)
_PRICE_HALVINGS = 40
"""Between these prices of a byte, in nanoseconds, one is looked for, in so many steps."""
_ROUNDING_NS, _ROUNDING_RELATIVE = 2, 1e-8
"""The model works in floating-point microseconds, to HiGHS's tolerances: this much is rounding and no gap."""


@dataclass(frozen=True, slots=True)
class Solution:
    """A choice of one option index per unit."""

    choice: tuple[int, ...]
    bound_ns: int
    """No choice takes less."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    values: dict[Any, int]
    bound: float
    proven: bool

    def found(self) -> dict[Any, int]:
        """The values, if there are any."""
        if not self.values:
            raise SolverError(_NOTHING_FOUND)
        return self.values


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
    began = time.monotonic()
    deadline = began + time_limit_seconds
    least = [min(p.resident_bytes for p in kind.prices) for kind in problem.kinds]
    if problem.fixed_bytes + sum(least[kind] for kind in problem.kind_of) > budget_bytes:
        return None  # nothing need be solved to see that
    if len(problem.units) > EXACT_UNITS:
        gap = max(gap, _COUNTING_GAP)
    if len(problem.units) <= EXACT_UNITS and len(counting.groups(problem)) > len(problem.units) // 2:
        return _unit_by_unit(problem, budget_bytes, deadline, gap)
    counts = _Search(counting.relaxed(problem, budget_bytes), "y")
    relaxation = counts.run(began + _COUNTING_SHARE * time_limit_seconds, gap)
    if relaxation is None:
        return None  # not even the relaxation fits: no plan does
    counted = _by_kinds(problem, budget_bytes, counts, relaxation, deadline, gap)
    enough = counted is not None and relative_gap(evaluate(problem, counted.choice).step_ns, counted.bound_ns) <= gap
    if enough or len(problem.units) > EXACT_UNITS:
        return counted
    if counted is None:
        return _unit_by_unit(problem, budget_bytes, deadline, gap)
    try:
        exact = _unit_by_unit(problem, budget_bytes, deadline, gap)
    except SolverError:
        return counted  # no better one was found in time
    assert exact is not None, "what was counted fits"
    best = min((exact, counted), key=lambda s: evaluate(problem, s.choice).step_ns)
    return Solution(best.choice, max(exact.bound_ns, counted.bound_ns))


def leanest(problem: Instance, *, time_limit_seconds: float) -> tuple[int, ...]:
    """The choice with the least peak memory (for models larger than :data:`EXACT_UNITS`, the leanest option of every unit
    by kinds).

    Raises:
        SolverError: the time ended before any choice was found, or HiGHS failed.
    """
    deadline = time.monotonic() + time_limit_seconds
    if len(problem.units) <= EXACT_UNITS:
        outcome = _Search(milp.exact_leanest(problem), "x").run(deadline, 0.0)
        assert outcome is not None, "every unit has an option"
        return _unit_choice(problem, outcome)
    outcome = _Search(counting.relaxed_leanest(problem), "y").run(deadline, 0.0)
    assert outcome is not None, "every unit has an option"
    return min(_arrangements(problem, outcome), key=lambda choice: evaluate(problem, choice).peak_bytes)


def relative_gap(step_ns: int, bound_ns: int) -> float:
    """How far a step may be from the best, relative to itself; 0 when only rounding is between it and the bound."""
    if step_ns - bound_ns <= max(_ROUNDING_NS, _ROUNDING_RELATIVE * step_ns):
        return 0.0
    return (step_ns - bound_ns) / step_ns


def _by_kinds(
    problem: Instance, budget_bytes: int, counts: _Search, relaxation: _Outcome, deadline: float, gap: float
) -> Solution | None:
    """Spread the counts over the units; if what was spread does not fit, count again with less.

    None when nothing that fits was found, which need not mean that there is nothing.
    """
    # The bound of the budget itself bounds every plan; those of the tighter budgets below do not.
    bound_ns = int(max(0.0, relaxation.bound) * 1e3)
    allowed, outcome = budget_bytes, relaxation
    for attempt in range(_TIGHTENINGS):
        totals = [(evaluate(problem, choice), choice) for choice in _arrangements(problem, outcome)]
        fitting = [(t.step_ns, choice) for t, choice in totals if t.peak_bytes <= budget_bytes]
        if fitting:
            step_ns, choice = min(fitting)
            return Solution(choice, min(bound_ns, step_ns))
        excess = min(t.peak_bytes for t, _ in totals) - budget_bytes
        # A little more, and twice as much at each attempt: counts that only just fit, spread, often exceed by as much again.
        allowed -= (excess + excess // _MARGIN) << attempt
        tighter = counts.run(deadline, gap, budget_bytes=allowed) if allowed > 0 else None
        if tighter is None or time.monotonic() > deadline:
            break
        outcome = tighter
    if len(problem.units) <= EXACT_UNITS:
        return None  # the exact model will tell
    choice = leanest(problem, time_limit_seconds=max(1.0, deadline - time.monotonic()))
    totals_of_leanest = evaluate(problem, choice)
    if totals_of_leanest.peak_bytes > budget_bytes:
        return None
    return Solution(choice, min(bound_ns, totals_of_leanest.step_ns))


def _unit_by_unit(problem: Instance, budget_bytes: int, deadline: float, gap: float) -> Solution | None:
    allowed = budget_bytes
    search = _Search(milp.exact(problem, budget_bytes), "x")
    while True:
        outcome = search.run(deadline - _POLISHING_SHARE * (deadline - time.monotonic()), gap, budget_bytes=allowed)
        if outcome is None:
            return None
        choice = _unit_choice(problem, outcome) if outcome.values else _at_one_price(problem, budget_bytes)
        excess = evaluate(problem, choice).peak_bytes - budget_bytes
        if excess <= 0:
            break
        # HiGHS accepts a row that is violated by its tolerance, about a byte; a plan must not exceed by any.
        allowed -= excess
    if not outcome.proven:
        choice = _polished(problem, choice, budget_bytes, deadline)
    bound_ns = min(int(max(0.0, outcome.bound) * 1e3), evaluate(problem, choice).step_ns)
    return Solution(choice, bound_ns)


def _at_one_price(problem: Instance, budget_bytes: int) -> tuple[int, ...]:
    """Every unit takes what costs it least at one price per byte held, the lowest found at which all fits (Lagrange's).

    Raises:
        SolverError: nothing that was tried fits.
    """
    prices = [
        [(float(p.busy_ns(problem.accumulation)), float(p.resident_bytes + p.gathered_bytes)) for p in kind.prices]
        for kind in problem.kinds
    ]
    fits: tuple[int, ...] | None = None
    low, high = _PRICES_NS
    for _ in range(_PRICE_HALVINGS):
        price = sqrt(low * high)
        cheapest = [min(range(len(own)), key=lambda o: own[o][0] + price * own[o][1]) for own in prices]
        choice = tuple(cheapest[kind] for kind in problem.kind_of)
        if evaluate(problem, choice).peak_bytes <= budget_bytes:
            fits, high = choice, price
        else:
            low = price
    if fits is None:
        raise SolverError(_NOTHING_FOUND)
    return fits


def _polished(problem: Instance, choice: tuple[int, ...], budget_bytes: int, deadline: float) -> tuple[int, ...]:
    """``choice`` with single units moved to faster options, as long as there is one and time."""
    best, step_ns = list(choice), evaluate(problem, choice).step_ns
    improved = True
    while improved:
        improved = False
        for u in range(len(best)):
            for option in range(len(problem.options(u))):
                if time.monotonic() > deadline:
                    return tuple(best)
                tried = evaluate(problem, [*best[:u], option, *best[u + 1 :]])
                if tried.step_ns < step_ns and tried.peak_bytes <= budget_bytes:
                    best[u], step_ns, improved = option, tried.step_ns, True
    return tuple(best)


def _unit_choice(problem: Instance, outcome: _Outcome) -> tuple[int, ...]:
    taken = {u: o for (u, o), value in outcome.found().items() if value}
    return tuple(taken[u] for u in range(len(problem.units)))


def _arrangements(problem: Instance, outcome: _Outcome) -> Iterator[tuple[int, ...]]:
    """The counts of every group spread over its units, in a few fixed ways: so equal input gives equal plans."""
    counts: dict[int, list[int]] = {}
    for (group, option), number in sorted(outcome.found().items()):
        counts.setdefault(group, []).extend([option] * number)
    members = counting.groups(problem)
    for order in (list, lambda options: options[::-1], _evenly):
        choice = [0] * len(problem.units)
        for group, options in counts.items():
            for u, option in zip(members[group], order(options), strict=True):
                choice[u] = option
        yield tuple(choice)


def _evenly(options: Sequence[int]) -> list[int]:
    """The same options, each spread as evenly as it can be."""
    number = Counter(options)
    places = [((i + 0.5) / count, option) for option, count in number.items() for i in range(count)]
    return [option for _, option in sorted(places)]


class _Search:
    """A model, and the solver that keeps it: under another budget only the bounds of rows change."""

    def __init__(self, model: Any, variable: str) -> None:
        self._model, self._variables = model, getattr(model, variable)
        self._solver = SolverFactory("highs")
        for checked in list(self._solver.config.auto_updates):
            self._solver.config.auto_updates[checked] = checked == "update_parameters"
        self._solver.set_instance(model)  # here, so that it is not taken for time to solve

    def run(self, deadline: float, gap: float, *, budget_bytes: int | None = None) -> _Outcome | None:
        """Solve; None when there is no solution, and one without values when the time ended before one was found.

        Raises:
            SolverError: HiGHS failed.
        """
        if budget_bytes is not None:
            self._model.budget = budget_bytes / milp.MIB
        seconds = max(0.5, deadline - time.monotonic())
        # HiGHS refuses a number of threads other than that of its first run in this process, whoever ran it.
        highspy.Highs.resetGlobalScheduler(True)
        results = self._solver.solve(
            self._model,
            load_solutions=False,
            raise_exception_on_nonoptimal_result=False,
            time_limit=seconds,
            rel_gap=gap,
            abs_gap=0.0,
            # One thread: the same input must give the same plan on every machine.
            threads=1,
            solver_options={"random_seed": 0},
        )
        condition = results.termination_condition
        if condition is TerminationCondition.provenInfeasible:
            return None
        proven = condition is TerminationCondition.convergenceCriteriaSatisfied
        if not proven and condition is not TerminationCondition.maxTimeLimit:
            raise SolverError(f"{SOLVER} failed: {condition.name}")
        bound = -inf if results.objective_bound is None else float(results.objective_bound)
        if results.solution_status not in (SolutionStatus.optimal, SolutionStatus.feasible):
            return _Outcome({}, bound, proven)
        values = results.solution_loader.get_vars()
        taken = {index: round(values[self._variables[index]]) for index in self._variables}
        return _Outcome(taken, bound, proven)
