"""The model to solve, in Pyomo; docs/model.md is the same text in prose, with the same symbols and numbers.

Sets and data
    U           units 1..n in the order of one forward; K kinds of units that cost the same, n_k of each
    O_k         options of kind k, each with a price
    A           micro-steps per optimizer step

Variables
    x_uo        1 if unit u takes option o                                      binary
    F_u         when the computation of unit u ends, in forward
    G_u, C_u, R_u   when its gather, its computation and its reduction end, in backward; for each sort of micro-step
    S_u         bytes saved by the units before u; H_u, K_u, D_u, T_u the same for parameters gathered, kept, gathered again,
                and gradients scattered

    minimise    A · F_n  +  (A - 1) · B  +  L  +  Σ_uo x_uo · update_uo                     (1)
    one option per unit                                                                  (2)
    memory within the budget at every moment                                             (3)
    forward: gathers in order on one channel, computation behind them                    (4)
    backward: gathers, computation, reductions on the same channel                       (5)
    the same for the last micro-step, with its own reductions                            (6)

:mod:`ds_osdp.counting` relaxes it to counts of units, for a bound whose size does not grow with n.

Times are in microseconds and bytes in MiB, so that coefficients are near one another and HiGHS's absolute tolerances
mean a byte and a picosecond.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyomo.environ as pyo

from ds_osdp.prices import Price
from ds_osdp.step import Instance, Kind, Window

__all__ = ["MIB", "SUMS", "US", "Of", "exact", "exact_leanest", "linear", "minimise_peak", "nonzero", "stay_within"]

MIB = float(1 << 20)
US = 1e3  # nanoseconds

Of = Callable[[Kind, Price], int]

SUMS: dict[str, Of] = {
    "S": lambda kind, p: p.activation_bytes + p.viewed_bytes,
    "K": lambda kind, p: p.gathered_bytes if kind.kept else 0,
    "H": lambda kind, p: p.gathered_bytes,
    "D": lambda kind, p: p.gathered_bytes if kind.gathered_again else 0,
    "T": lambda kind, p: p.scattered_bytes,
}
"""Bytes that (3) adds up over the units before u, or over some of them: saved, kept, gathered, gathered again, scattered."""


def exact(problem: Instance, budget_bytes: int) -> pyo.ConcreteModel:
    """The model of ``problem`` under ``budget_bytes`` per rank; its objective is the step in microseconds."""
    m = _choices(problem)
    A = problem.accumulation
    stay_within(m, problem, _Units(m, problem), budget_bytes)
    m.first = _forward(m, problem, first=True)
    m.last = _backward(m, problem, last=True)
    step = m.first.F[m.U.last()] + m.last.end + pyo.quicksum(_chosen(m, problem, u, "update_ns") for u in m.U)
    if A > 1:
        m.forward = _forward(m, problem, first=False)
        m.between = _backward(m, problem, last=False)
        step += (A - 1) * (m.forward.F[m.U.last()] + m.between.end)
    m.step = pyo.Objective(expr=step, sense=pyo.minimize, doc="(1) time of one optimizer step")
    return m


def exact_leanest(problem: Instance) -> pyo.ConcreteModel:
    """The leanest plan instead of the fastest: the same choices, with the peak (MiB) as the objective."""
    m = _choices(problem)
    minimise_peak(m, problem, _Units(m, problem))
    return m


def _choices(problem: Instance) -> pyo.ConcreteModel:
    m = pyo.ConcreteModel()
    m.U = pyo.RangeSet(0, len(problem.units) - 1)
    m.UO = pyo.Set(initialize=[(u, o) for u in m.U for o in range(len(problem.options(u)))], ordered=True)
    m.x = pyo.Var(m.UO, domain=pyo.Binary)

    @m.Constraint(m.U, doc="(2) one option per unit")
    def one_option(m, u):
        return pyo.quicksum(m.x[u, o] for o in range(len(problem.options(u)))) == 1

    return m


def _chosen(m, problem: Instance, u: int, name: str):
    """Microseconds of the option that unit u takes, linear in x."""
    return _taken(m, u, [getattr(p, name) / US for p in problem.prices(u)])


def _taken(m, u: int, values: Sequence[float]):
    """The one of ``values``, one per option, that unit u takes."""
    return linear(values, [m.x[u, o] for o in range(len(values))])


class _Units:
    """What :func:`_memory` adds up, unit by unit: in running sums, so that the row of any unit is short."""

    def __init__(self, m, problem: Instance) -> None:
        self.m, self.problem, self.rows = m, problem, m.U
        m.ends = pyo.RangeSet(0, len(problem.units))
        m.sums = pyo.Set(initialize=nonzero(problem), ordered=True)
        m.before = pyo.Var(m.sums, m.ends, domain=pyo.NonNegativeReals, doc="S, K, H, D and T of docs/model.md")

        @m.Constraint(m.sums, m.ends, doc="running sums over the units before u")
        def running(m, name, u):
            return m.before[name, u] == (m.before[name, u - 1] + self.own(u - 1, SUMS[name]) if u else 0)

    def own(self, u: int, of: Of):
        """``of`` of the option that unit u takes, in MiB."""
        kind = self.problem.kinds[self.problem.kind_of[u]]
        return _taken(self.m, u, [of(kind, p) / MIB for p in kind.prices])

    def all(self, of: Of):
        """``of``, added up over all units."""
        return pyo.quicksum(self.own(u, of) for u in self.m.U)

    def between(self, name: str, begin: int, end: int):
        """One of the sums, over the units from ``begin`` to ``end``."""
        return self.m.before[name, end] - self.m.before[name, begin] if name in self.m.sums else 0

    def spread(self) -> list[tuple[Any, int, int]]:
        """Of every option: how many units take it, what the optimizer needs for each, and its degree."""
        return [
            (self.m.x[u, o], self.problem.prices(u)[o].update_bytes, self.problem.options(u)[o].degree) for u, o in self.m.UO
        ]


def nonzero(problem: Instance) -> list[str]:
    """The sums that need variables."""
    return [name for name, of in SUMS.items() if any(of(kind, p) for kind in problem.kinds for p in kind.prices)]


def linear(values: Sequence[float], counts: Sequence[Any], number: int = 1):
    """Σ value · count, where the counts add up to ``number``."""
    # What all options share stands outside: it needs no variable.
    least = min(values)
    return least * number + pyo.quicksum((v - least) * count for v, count in zip(values, counts, strict=True) if v > least)


def stay_within(m, problem: Instance, terms: Any, budget_bytes: int) -> None:
    """(3) under a budget, ``m.budget``, that may be changed."""
    m.budget = pyo.Param(initialize=budget_bytes / MIB, mutable=True)
    _memory(m, problem, terms, m.budget)


def minimise_peak(m, problem: Instance, terms: Any) -> None:
    """(3) under a budget that is the objective, in MiB."""
    m.peak = pyo.Var(domain=pyo.NonNegativeReals)
    _memory(m, problem, terms, m.peak)
    m.least = pyo.Objective(expr=m.peak, sense=pyo.minimize)


def _memory(m, problem: Instance, terms: Any, budget) -> None:
    """(3), at the rows that ``terms`` names, of what it adds up."""
    n = len(problem.units)
    m.resident = pyo.Var(domain=pyo.NonNegativeReals)
    m.whole = pyo.Var(domain=pyo.NonNegativeReals, doc="of it, what is freed while the optimizer updates")
    m.flat = pyo.Var(domain=pyo.NonNegativeReals, doc="flat tensors in which parameters were gathered together")
    m.rows = pyo.Set(initialize=list(terms.rows), ordered=True)

    @m.Constraint()
    def residents(m):
        return m.resident == terms.all(lambda kind, p: p.resident_bytes) + problem.fixed_bytes / MIB

    @m.Constraint()
    def wholes(m):
        return m.whole == terms.all(lambda kind, p: p.whole_bytes)

    @m.Constraint()
    def flats(m):
        return m.flat == problem.flat_elements[0] / problem.flat_elements[1] * terms.between("H", 0, n)

    def within(window: Window, name: str, u: int):
        return terms.between(name, int(window.begin[u]), int(window.end[u])) + float(window.bytes[u]) / MIB

    def forward(u, live):
        beside = within(problem.live_forward.ahead, "H", u) + m.flat + float(problem.regathered.bytes[u]) / MIB
        beside += m.whole if problem.regathered.end[u] else 0
        own = terms.own(u, lambda kind, p: p.forward_bytes)
        return m.resident + terms.between("S", 0, u + 1) + live + own + beside <= budget

    def backward(u, live):
        beside = within(problem.live_backward.ahead, "D", u) + m.flat + within(problem.staging, "T", u)
        beside += terms.own(u + 1, lambda kind, p: p.waiting_bytes) if u + 1 < n else 0
        own = terms.own(u, lambda kind, p: p.backward_bytes)
        return m.resident + terms.between("S", 0, u + 1) + live + own + beside <= budget

    @m.Constraint(m.rows, doc="(3) memory in the forward of unit u")
    def memory_forward(m, u):
        return forward(u, terms.between("K", 0, u) + terms.own(u, SUMS["H"]))

    @m.Constraint(m.rows, doc="(3) memory in the backward of unit u")
    def memory_backward(m, u):
        return backward(u, terms.between("K", 0, u + 1) + terms.own(u, SUMS["D"]))

    @m.Constraint(m.rows, doc="(3) the same in forward, where the prefetcher fills what it may")
    def memory_forward_full(m, u):
        least = float(problem.live_forward.least[u]) / MIB
        return forward(u, least) if least else pyo.Constraint.Skip

    @m.Constraint(m.rows, doc="(3) the same in backward, where the prefetcher fills what it may")
    def memory_backward_full(m, u):
        least = float(problem.live_backward.least[u]) / MIB
        return backward(u, least) if least else pyo.Constraint.Skip

    @m.Constraint(m.rows, doc="(3) memory while DeepSpeed takes the norm of the gradient of unit u")
    def memory_norm(m, u):
        if not any(p.norm_bytes for p in problem.prices(u)):
            return pyo.Constraint.Skip
        return m.resident - m.whole + terms.own(u, lambda kind, p: p.norm_bytes) <= budget

    _memory_update(
        m, problem, m.resident - m.whole, [(count, size / MIB, d) for count, size, d in terms.spread() if size], budget
    )


def _memory_update(m, problem: Instance, held, updated, budget) -> None:
    """(3), the updates: what is spread over d ranks needs the sum of its working memory, or that of a sub-group if it is less.

    ``updated`` lists, for every option, how many units take it, what each adds, and its degree.
    """
    degrees = sorted(problem.update_limits)
    limits = {d: problem.update_limits[d] / MIB for d in degrees}
    most = {d: sum(size * count.ub for count, size, degree in updated if degree == d) for d in degrees}
    m.degrees = pyo.Set(initialize=degrees, ordered=True)
    m.divided = pyo.Set(initialize=[d for d in degrees if most[d] > limits[d]], ordered=True)
    m.cut = pyo.Var(m.divided, domain=pyo.Binary, doc="whether what is spread over d ranks fills more than a sub-group")

    @m.Constraint(m.degrees, doc="(3) memory while the optimizer updates all that is spread over d ranks")
    def memory_update(m, d):
        together = pyo.quicksum(size * count for count, size, degree in updated if degree == d)
        return held + together - ((most[d] - limits[d]) * m.cut[d] if d in m.divided else 0) <= budget

    @m.Constraint(m.divided, doc="(3) memory while the optimizer updates a sub-group")
    def memory_sub_group(m, d):
        return held + limits[d] * m.cut[d] <= budget


def _forward(m, problem: Instance, *, first: bool) -> pyo.Block:
    gather = "gather_first_ns" if first else "gather_forward_ns"
    block = pyo.Block(concrete=True)
    block.G = pyo.Var(m.U, domain=pyo.NonNegativeReals, doc="end of the gather of unit u")
    block.F = pyo.Var(m.U, domain=pyo.NonNegativeReals, doc="end of the computation of unit u")

    def compute(u):
        return _chosen(m, problem, u, "forward_ns")

    @block.Constraint(m.U, doc="(4) gathers in order on one channel")
    def gathers(block, u):
        return block.G[u] == (block.G[u - 1] if u > 0 else 0) + _chosen(m, problem, u, gather)

    @block.Constraint(m.U, doc="(4) computation follows the gather")
    def follows_gather(block, u):
        return block.F[u] >= block.G[u] + compute(u)

    @block.Constraint(m.U, doc="(4) computation in order")
    def in_order(block, u):
        return block.F[u] >= block.F[u - 1] + compute(u) if u > 0 else pyo.Constraint.Skip

    return block


def _backward(m, problem: Instance, *, last: bool) -> pyo.Block:
    n = len(problem.units)
    number = "(6)" if last else "(5)"
    block = pyo.Block(concrete=True)
    block.G = pyo.Var(m.U, domain=pyo.NonNegativeReals, doc="end of the gather of unit u")
    block.C = pyo.Var(m.U, domain=pyo.NonNegativeReals, doc="end of the computation of unit u")
    block.R = pyo.Var(m.U, domain=pyo.NonNegativeReals, doc="end of the reduction of unit u")
    block.end = pyo.Var(domain=pyo.NonNegativeReals, doc="end of the pass")

    def compute(u):
        return _chosen(m, problem, u, "last_backward_ns" if last else "backward_ns")

    def gather(u):
        return _chosen(m, problem, u, "gather_backward_ns")

    def waited(u):
        return _chosen(m, problem, u, "waited_ns")

    def reduction(u):
        return _chosen(m, problem, u, "last_reduce_ns" if last else "reduce_ns")

    @block.Constraint(m.U, doc=f"{number} gathers in order, and what the units before have waited for")
    def gathers(block, u):
        return block.G[u] == (block.G[u + 1] + waited(u + 1) if u + 1 < n else 0) + gather(u)

    @block.Constraint(m.U, doc=f"{number} computation follows the gather")
    def follows_gather(block, u):
        return block.C[u] >= block.G[u] + compute(u)

    @block.Constraint(m.U, doc=f"{number} computation in order")
    def in_order(block, u):
        return block.C[u] >= block.C[u + 1] + compute(u) if u + 1 < n else pyo.Constraint.Skip

    @block.Constraint(m.U, doc=f"{number} a reduction follows its computation")
    def follows_computation(block, u):
        return block.R[u] >= block.C[u] + reduction(u)

    @block.Constraint(m.U, doc=f"{number} reductions in order")
    def reductions(block, u):
        return block.R[u] >= block.R[u + 1] + reduction(u) if u + 1 < n else pyo.Constraint.Skip

    @block.Constraint(doc=f"{number} the pass ends with the last computation")
    def ends_with_computation(block):
        return block.end >= block.C[0]

    @block.Constraint(doc=f"{number} and with the last reduction")
    def ends_with_reduction(block):
        return block.end >= block.R[0]

    @block.Constraint(doc=f"{number} gathers and reductions share the channel")
    def channel(block):
        return block.end >= pyo.quicksum(gather(u) + waited(u) + reduction(u) for u in m.U)

    return block
