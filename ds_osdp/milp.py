"""The model to solve, in Pyomo; docs/model.md is the same text in prose, with the same symbols and numbers.

Sets and data
    U           units 1..n in the order of one forward
    O_u         options of unit u, each with a price
    T           moments of the step at which memory can peak
    A           micro-steps per optimizer step
    f_u, b_u    computation of unit u in forward and backward

Variables
    x_uo        1 if unit u takes option o                                      binary
    F_u         when the computation of unit u ends, in forward
    G_u, C_u, R_u   when its gather, its computation and its reduction end, in backward; for every kind of micro-step

    minimise    A · F_n  +  (A - 1) · B  +  L  +  Σ_uo x_uo · update_uo                     (1)
    one option per unit                                                                  (2)
    memory within the budget at every moment                                             (3)
    forward: gathers in order on one channel, computation behind them                    (4)
    backward: gathers, computation, reductions on the same channel                       (5)
    the same for the last micro-step, with its own reductions                            (6)

Times are in microseconds and bytes in MiB, so that coefficients are near one another and HiGHS's absolute tolerances
mean a byte and a picosecond.
"""

from __future__ import annotations

import pyomo.environ as pyo

from ds_osdp.prices import Instance, Moment

__all__ = ["build", "minimise_memory"]

_MIB = float(1 << 20)


def build(problem: Instance, budget_bytes: int) -> pyo.ConcreteModel:
    """The model of ``problem`` under ``budget_bytes`` per rank; its objective is the step in microseconds."""
    m = _choices(problem)
    A = problem.accumulation

    @m.Constraint(m.T, doc="(3) memory within the budget at every moment")
    def memory(m, t):
        return _mib(m, problem, problem.moments[t]) <= budget_bytes / _MIB

    m.forward = _forward(m, problem)
    m.last = _backward(m, problem, last=True)
    update = _chosen(m, problem, lambda p: p.update_ns)
    step = A * m.forward.F[m.U.last()] + m.last.end + pyo.quicksum(update(u) for u in m.U)
    if A > 1:
        m.between = _backward(m, problem, last=False)
        step += (A - 1) * m.between.end
    m.step = pyo.Objective(expr=step, sense=pyo.minimize, doc="(1) seconds of one optimizer step")
    return m


def minimise_memory(problem: Instance) -> pyo.ConcreteModel:
    """The leanest plan instead of the fastest: the same choices, with the peak (MiB) as the objective."""
    m = _choices(problem)
    m.peak = pyo.Var(domain=pyo.NonNegativeReals)

    @m.Constraint(m.T, doc="the peak is at least the memory of every moment")
    def memory(m, t):
        return _mib(m, problem, problem.moments[t]) <= m.peak

    m.least = pyo.Objective(expr=m.peak, sense=pyo.minimize)
    return m


def _choices(problem: Instance) -> pyo.ConcreteModel:
    m = pyo.ConcreteModel()
    m.U = pyo.RangeSet(0, len(problem.units) - 1)
    m.T = pyo.RangeSet(0, len(problem.moments) - 1)
    m.UO = pyo.Set(initialize=[(u, o) for u in m.U for o in range(len(problem.options[u]))], ordered=True)
    m.x = pyo.Var(m.UO, domain=pyo.Binary)

    @m.Constraint(m.U, doc="(2) one option per unit")
    def one_option(m, u):
        return pyo.quicksum(m.x[u, o] for o in range(len(problem.options[u]))) == 1

    # What is resident stands in every memory row: added up once, in a variable of its own.
    m.resident = pyo.Var(domain=pyo.NonNegativeReals)
    resident = pyo.quicksum(problem.prices[u][o].resident_bytes / _MIB * m.x[u, o] for u, o in m.UO)
    m.residents = pyo.Constraint(expr=m.resident == resident)
    return m


def _mib(m, problem: Instance, moment: Moment):
    """Memory at one moment in MiB, linear in x: the left side of (3)."""
    gathered = (
        problem.prices[u][o].gathered_bytes / _MIB * m.x[u, o]
        for u in moment.gathered
        for o in range(len(problem.options[u]))
        if problem.prices[u][o].gathered_bytes
    )
    updated = (
        problem.prices[u][o].update_bytes / _MIB * m.x[u, o] for u, o in m.UO if problem.options[u][o].stage is moment.updates
    )
    return moment.constant_bytes / _MIB + m.resident + pyo.quicksum(gathered) + pyo.quicksum(updated)


def _chosen(m, problem: Instance, of):
    """The price ``of`` of the chosen option of a unit, in microseconds, linear in x."""

    def value(u):
        return pyo.quicksum(of(p) / 1e3 * m.x[u, o] for o, p in enumerate(problem.prices[u]))

    return value


def _forward(m, problem: Instance) -> pyo.Block:
    gather = _chosen(m, problem, lambda p: p.gather_forward_ns)
    extra = _chosen(m, problem, lambda p: p.forward_extra_ns)
    block = pyo.Block(concrete=True)
    block.G = pyo.Var(m.U, domain=pyo.NonNegativeReals, doc="end of the gather of unit u")
    block.F = pyo.Var(m.U, domain=pyo.NonNegativeReals, doc="end of the computation of unit u")

    @block.Constraint(m.U, doc="(4) gathers in order on one channel")
    def gathers(block, u):
        return block.G[u] == (block.G[u - 1] if u > 0 else 0) + gather(u)

    @block.Constraint(m.U, doc="(4) computation follows the gather")
    def follows_gather(block, u):
        return block.F[u] >= block.G[u] + problem.forward_ns[u] / 1e3 + extra(u)

    @block.Constraint(m.U, doc="(4) computation in order")
    def in_order(block, u):
        if u == 0:
            return pyo.Constraint.Skip
        return block.F[u] >= block.F[u - 1] + problem.forward_ns[u] / 1e3 + extra(u)

    return block


def _backward(m, problem: Instance, *, last: bool) -> pyo.Block:
    gather = _chosen(m, problem, lambda p: p.gather_backward_ns)
    extra = _chosen(m, problem, lambda p: p.backward_extra_ns)
    reduce = _chosen(m, problem, lambda p: p.last_reduce_ns if last else p.reduce_ns)
    n = len(problem.units)
    block = pyo.Block(concrete=True)
    block.G = pyo.Var(m.U, domain=pyo.NonNegativeReals, doc="end of the gather of unit u")
    block.C = pyo.Var(m.U, domain=pyo.NonNegativeReals, doc="end of the computation of unit u")
    block.R = pyo.Var(m.U, domain=pyo.NonNegativeReals, doc="end of the reduction of unit u")
    block.end = pyo.Var(domain=pyo.NonNegativeReals, doc="end of the pass")
    number = "(6)" if last else "(5)"

    @block.Constraint(m.U, doc=f"{number} gathers in order; the reduction of the unit before last goes first")
    def gathers(block, u):
        if u + 2 < n:
            return block.G[u] >= block.R[u + 2] + gather(u)
        return block.G[u] >= (block.G[u + 1] if u + 1 < n else 0) + gather(u)

    @block.Constraint(m.U, doc=f"{number} computation follows the gather")
    def follows_gather(block, u):
        return block.C[u] >= block.G[u] + problem.backward_ns[u] / 1e3 + extra(u)

    @block.Constraint(m.U, doc=f"{number} computation in order")
    def in_order(block, u):
        if u + 1 == n:
            return pyo.Constraint.Skip
        return block.C[u] >= block.C[u + 1] + problem.backward_ns[u] / 1e3 + extra(u)

    @block.Constraint(m.U, doc=f"{number} a reduction follows its computation")
    def follows_computation(block, u):
        return block.R[u] >= block.C[u] + reduce(u)

    @block.Constraint(m.U, doc=f"{number} a reduction goes behind the next gather on the channel")
    def behind_gather(block, u):
        if u > 0:
            return block.R[u] >= block.G[u - 1] + reduce(u)
        return block.R[0] >= (block.R[1] if n > 1 else block.G[0]) + reduce(0)

    @block.Constraint(doc=f"{number} the pass ends with the last computation")
    def ends_with_computation(block):
        return block.end >= block.C[0]

    @block.Constraint(doc=f"{number} the pass ends with the last reduction")
    def ends_with_reduction(block):
        return block.end >= block.R[0]

    return block
