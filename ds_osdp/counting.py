"""The counting relaxation of :mod:`ds_osdp.milp`: how many units of a group take an option, whichever units these are.

A group is a kind, or a single unit at either end; y_ko of its units take option o.  Of (3) to (6) it keeps what holds
whichever units these are, so that its optimum bounds the exact one from below, and its size does not grow with n.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyomo.environ as pyo

from ds_osdp.milp import MIB, SUMS, US, Of, linear, minimise_peak, nonzero, stay_within
from ds_osdp.step import Instance

__all__ = ["groups", "relaxed", "relaxed_leanest"]

ENDS = 3
"""Units at either end that are counted one by one: what a pass begins and ends with is not hidden."""
ROWS = 16
"""Groups at whose last unit memory is held against the budget."""


def relaxed(problem: Instance, budget_bytes: int) -> pyo.ConcreteModel:
    """:func:`ds_osdp.milp.exact` with units counted by group; its objective bounds the step from below (microseconds)."""
    m = _counts(problem)
    A = problem.accumulation
    stay_within(m, problem, _Counts(m, problem), budget_bytes)
    passes = [
        ("first", 1, ("gather_first_ns", "forward_ns"), m.slots),
        ("last", 1, ("gather_backward_ns", "last_backward_ns", "last_reduce_ns"), m.slots[::-1]),
        ("forward", A - 1, ("gather_forward_ns", "forward_ns"), m.slots),
        ("between", A - 1, ("gather_backward_ns", "backward_ns", "reduce_ns"), m.slots[::-1]),
    ]
    step = _total(m, problem, "update_ns")
    for name, times, machines, slots in passes:
        if times:
            block = _relaxed_pass(m, problem, machines, slots)
            m.add_component(name, block)
            step += times * block.end
    m.step = pyo.Objective(expr=step, sense=pyo.minimize, doc="(1) a lower bound of one optimizer step")
    return m


def _relaxed_pass(m, problem: Instance, machines, slots) -> pyo.Block:
    """(4), (5) or (6) over slots: a single unit, or groups whose units stand among one another.

    Each machine takes its slots in order, and a single unit waits for the machine before.  Within a slot of several nobody
    waits: where its units stand is not known.  A machine with no work for anyone lets every unit pass.
    """
    backward = len(machines) > 2
    channel = (machines[0], "waited_ns", machines[-1])
    machines = [name for name in machines if any(getattr(p, name) for kind in problem.kinds for p in kind.prices)]
    block = pyo.Block(concrete=True)
    block.end = pyo.Var(domain=pyo.NonNegativeReals)
    if not machines:
        return block
    block.S = pyo.RangeSet(0, len(slots) - 1)
    block.M = pyo.RangeSet(0, len(machines) - 1)
    block.E = pyo.Var(block.M, block.S, domain=pyo.NonNegativeReals, doc="when machine i ends slot s")

    def takes(i, s):
        return pyo.quicksum(_group_total(m, problem, k, machines[i]) for k in slots[s])

    def waited(i, s):
        """What the units of slot s wait for holds up the gathers of the slots behind it."""
        if not backward or machines[i] != "gather_backward_ns":
            return 0
        return pyo.quicksum(_group_total(m, problem, k, "waited_ns") for k in slots[s])

    @block.Constraint(block.M, block.S, doc="in order")
    def in_order(block, i, s):
        return block.E[i, s] >= (block.E[i, s - 1] + waited(i, s - 1) if s else 0) + takes(i, s)

    @block.Constraint(block.M, block.S, doc="behind the machine before: a single unit, or what begins behind the slot before")
    def behind(block, i, s):
        single = sum(len(m.members[k]) for k in slots[s]) == 1
        if i == 0 or (s == 0 and not single):
            return pyo.Constraint.Skip
        return block.E[i, s] >= block.E[i - 1, s if single else s - 1] + takes(i, s)

    @block.Constraint(block.M)
    def ends(block, i):
        return block.end >= block.E[i, len(slots) - 1]

    if backward:
        sent = pyo.quicksum(_total(m, problem, name) for name in channel)
        block.channel = pyo.Constraint(expr=block.end >= sent, doc="gathers and reductions share the channel")
    return block


def relaxed_leanest(problem: Instance) -> pyo.ConcreteModel:
    """The leanest counts: the objective (MiB) bounds the peak of every plan from below."""
    m = _counts(problem)
    minimise_peak(m, problem, _Counts(m, problem))
    return m


def groups(problem: Instance) -> list[list[int]]:
    """Units counted together: those of one kind, but each of the first and the last few by itself.

    What a pass begins and ends with is not hidden behind anything, so it matters which units these are.
    """
    n = len(problem.units)
    between = problem.kind_index[ENDS : max(ENDS, n - ENDS)]
    by_kind = [(np.flatnonzero(between == kind) + ENDS).tolist() for kind in dict.fromkeys(between.tolist())]
    return [[u] for u in range(n) if u < ENDS or u >= n - ENDS] + by_kind


def _slots(members: list[list[int]]) -> list[list[int]]:
    """Groups in the order of one forward; those whose units stand among one another are one slot."""
    slots: list[list[int]] = []
    end = -1
    for k in sorted(range(len(members)), key=lambda k: members[k][0]):
        if members[k][0] > end:
            slots.append([])
        slots[-1].append(k)
        end = max(end, members[k][-1])
    return slots


def _counts(problem: Instance) -> pyo.ConcreteModel:
    m = pyo.ConcreteModel()
    m.members = groups(problem)
    m.kind = [problem.kind_of[units[0]] for units in m.members]
    m.slots = _slots(m.members)
    m.K = pyo.RangeSet(0, len(m.members) - 1)
    m.KO = pyo.Set(initialize=[(k, o) for k in m.K for o in range(len(problem.kinds[m.kind[k]].options))], ordered=True)
    m.y = pyo.Var(m.KO, domain=pyo.NonNegativeIntegers, bounds=lambda m, k, o: (0, len(m.members[k])))

    @m.Constraint(m.K, doc="(2) one option per unit")
    def one_option(m, k):
        return pyo.quicksum(m.y[k, o] for o in range(len(problem.kinds[m.kind[k]].options))) == len(m.members[k])

    return m


def _total(m, problem: Instance, name: str):
    """Microseconds added up over all units."""
    return pyo.quicksum(_group_total(m, problem, k, name) for k in m.K)


def _group_total(m, problem: Instance, k: int, name: str):
    """Microseconds added up over the units of a group, linear in y."""
    return _taken(m, k, [getattr(p, name) / US for p in problem.kinds[m.kind[k]].prices])


def _taken(m, k: int, values: Sequence[float]):
    """``values``, one per option, added up over the units of group k."""
    return linear(values, [m.y[k, o] for o in range(len(values))], len(m.members[k]))


class _Counts:
    """What the memory rows of :mod:`ds_osdp.milp` add up, at least, whichever units of a group took which option."""

    def __init__(self, m, problem: Instance) -> None:
        self.m, self.problem = m, problem
        self.group_of = {u: k for k, members in enumerate(m.members) for u in members}
        # Some rows are enough for a bound: those of single units, and of the groups that need most to work.
        largest = sorted(m.K, key=lambda k: -max(p.backward_bytes + p.gathered_bytes for p in self._prices(k)))
        single = [k for k in m.K if len(m.members[k]) == 1]
        self.rows = sorted({m.members[k][-1] for k in [*largest[:ROWS], *single]})
        m.sums = pyo.Set(initialize=nonzero(problem), ordered=True)
        m.summed = pyo.Var(m.sums, m.K, domain=pyo.NonNegativeReals, doc="S, K, H, D and T of docs/model.md, by group")

        @m.Constraint(m.sums, m.K, doc="sums over the units of group k")
        def summing(m, name, k):
            return m.summed[name, k] == self._group(k, SUMS[name])

    def own(self, u: int, of: Of):
        """``of`` of the option that unit u takes, in MiB: exact at the ends, elsewhere that of the leanest option."""
        k = self.group_of[u]
        return self._group(k, of) if len(self.m.members[k]) == 1 else min(self._values(k, of))

    def all(self, of: Of):
        """``of``, added up over all units."""
        return pyo.quicksum(self._group(k, of) for k in self.m.K)

    def between(self, name: str, begin: int, end: int):
        """One of the sums, over the units from ``begin`` to ``end``, at least.

        Of a group of which most stand there, those elsewhere took the most; of one of which few do, these took the least.
        """
        least = 0.0
        if name not in self.m.sums:
            return least
        for k, members in enumerate(self.m.members):
            inside = bisect_left(members, end) - bisect_left(members, begin)
            if 2 * inside > len(members):
                elsewhere = (len(members) - inside) * max(self._values(k, SUMS[name]))
                least += self.m.summed[name, k] - elsewhere
            else:
                least += inside * min(self._values(k, SUMS[name]))
        return least

    def spread(self) -> list[tuple[Any, int, int]]:
        """Of every option: how many units take it, what the optimizer needs for each, and its degree."""
        m, kinds = self.m, self.problem.kinds
        return [(m.y[k, o], kinds[m.kind[k]].prices[o].update_bytes, kinds[m.kind[k]].options[o].degree) for k, o in m.KO]

    def _prices(self, k):
        return self.problem.kinds[self.m.kind[k]].prices

    def _values(self, k: int, of: Of) -> list[float]:
        return [of(self.problem.kinds[self.m.kind[k]], p) / MIB for p in self._prices(k)]

    def _group(self, k: int, of: Of):
        return _taken(self.m, k, self._values(k, of))
