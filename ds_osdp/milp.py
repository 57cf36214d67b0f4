"""The model to solve, in Pyomo; docs/model.md is the same text in prose, with the same symbols and numbers.

Sets and data
    U           units 1..n in the order of one forward; K kinds of units that cost the same, n_k of each
    O_k         options of kind k, each with a price
    A           micro-steps per optimizer step
    D           units whose gathers go before a reduction in backward

Variables
    x_uo        1 if unit u takes option o                                      binary
    F_u         when the computation of unit u ends, in forward
    G_u, C_u, R_u   when its gather, its computation and its reduction end, in backward; for each sort of micro-step
    S_u         bytes saved by the units before u; H_u the same for gathered parameters

    minimise    A · F_n  +  (A - 1) · B  +  L  +  Σ_uo x_uo · update_uo                     (1)
    one option per unit                                                                  (2)
    memory within the budget at every moment                                             (3)
    forward: gathers in order on one channel, computation behind them                    (4)
    backward: gathers, computation, reductions on the same channel                       (5)
    the same for the last micro-step, with its own reductions                            (6)

:func:`exact` is that model.  :func:`relaxed` counts: y_ko units of kind k take option o, and of (3) to (6) it keeps what
holds whichever units these are.  Its optimum bounds the exact one from below, and its size does not grow with n.

Times are in microseconds and bytes in MiB, so that coefficients are near one another and HiGHS's absolute tolerances
mean a byte and a picosecond.
"""

from __future__ import annotations

from collections import Counter

import pyomo.environ as pyo

from ds_osdp.step import Instance

__all__ = ["exact", "exact_leanest", "relaxed", "relaxed_leanest"]

_MIB = float(1 << 20)
_US = 1e3  # nanoseconds


def exact(problem: Instance, budget_bytes: int) -> pyo.ConcreteModel:
    """The model of ``problem`` under ``budget_bytes`` per rank; its objective is the step in microseconds."""
    m = _choices(problem)
    A = problem.accumulation
    _memory(m, problem, budget_bytes / _MIB)
    m.forward = _forward(m, problem)
    m.last = _backward(m, problem, last=True)
    step = A * m.forward.F[m.U.last()] + m.last.end + pyo.quicksum(_chosen(m, problem, u, "update_ns", _US) for u in m.U)
    if A > 1:
        m.between = _backward(m, problem, last=False)
        step += (A - 1) * m.between.end
    m.step = pyo.Objective(expr=step, sense=pyo.minimize, doc="(1) time of one optimizer step")
    return m


def exact_leanest(problem: Instance) -> pyo.ConcreteModel:
    """The leanest plan instead of the fastest: the same choices, with the peak (MiB) as the objective."""
    m = _choices(problem)
    m.peak = pyo.Var(domain=pyo.NonNegativeReals)
    _memory(m, problem, m.peak)
    m.least = pyo.Objective(expr=m.peak, sense=pyo.minimize)
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


def _chosen(m, problem: Instance, u: int, name: str, scale: float):
    """A price of the chosen option of unit u, linear in x."""
    values = [getattr(p, name) for p in problem.prices(u)]
    # What all options share stands outside: it needs no variable.
    least = min(values)
    return least / scale + pyo.quicksum((v - least) / scale * m.x[u, o] for o, v in enumerate(values) if v > least)


def _memory(m, problem: Instance, budget) -> None:
    """(3), with running sums: what is saved before a unit, and what is gathered before it."""
    n = len(problem.units)
    ends = pyo.RangeSet(0, n)
    m.ends = ends
    m.S = pyo.Var(ends, domain=pyo.NonNegativeReals, doc="saved before unit u: activations, and gathered parameters that stay")
    m.H = pyo.Var(ends, domain=pyo.NonNegativeReals, doc="gathered before unit u, whether it stays or not")
    m.D = pyo.Var(ends, domain=pyo.NonNegativeReals, doc="gathered before unit u and freed after use")
    m.resident = pyo.Var(domain=pyo.NonNegativeReals)

    def gathered(u):
        return _chosen(m, problem, u, "gathered_bytes", _MIB)

    def kept(u):
        return problem.kinds[problem.kind_of[u]].kept

    @m.Constraint(ends)
    def saved(m, u):
        if u == 0:
            return m.S[0] == 0
        stays = gathered(u - 1) if kept(u - 1) else 0
        return m.S[u] == m.S[u - 1] + _chosen(m, problem, u - 1, "activation_bytes", _MIB) + stays

    @m.Constraint(ends)
    def gathers(m, u):
        return m.H[u] == (m.H[u - 1] + gathered(u - 1) if u else 0)

    @m.Constraint(ends)
    def freed(m, u):
        return m.D[u] == (m.D[u - 1] + (0 if kept(u - 1) else gathered(u - 1)) if u else 0)

    @m.Constraint()
    def residents(m):
        held = pyo.quicksum(_chosen(m, problem, u, "resident_bytes", _MIB) for u in m.U)
        return m.resident == held + problem.bucket_bytes / _MIB

    @m.Constraint(m.U, doc="(3) memory in the forward of unit u")
    def memory_forward(m, u):
        a = problem.ahead_forward[u]
        ahead = m.H[a.end] - m.H[a.begin] + a.bytes / _MIB
        return m.resident + m.S[u] + gathered(u) + _chosen(m, problem, u, "forward_bytes", _MIB) + ahead <= budget

    @m.Constraint(m.U, doc="(3) memory in the backward of unit u")
    def memory_backward(m, u):
        a = problem.ahead_backward[u]
        ahead = m.D[a.end] - m.D[a.begin] + a.bytes / _MIB
        own = _chosen(m, problem, u, "activation_bytes", _MIB) + gathered(u)
        working = _chosen(m, problem, u, "backward_bytes", _MIB)
        return m.resident + problem.staging_bytes / _MIB + m.S[u] + own + working + ahead <= budget

    m.degrees = pyo.Set(initialize=_degrees(problem), ordered=True)

    @m.Constraint(m.degrees, doc="(3) memory while the optimizer updates what is spread over d ranks")
    def memory_update(m, d):
        updated = (problem.prices(u)[o].update_bytes / _MIB * m.x[u, o] for u, o in m.UO if problem.options(u)[o].degree == d)
        return m.resident + pyo.quicksum(updated) <= budget


def _forward(m, problem: Instance) -> pyo.Block:
    block = pyo.Block(concrete=True)
    block.G = pyo.Var(m.U, domain=pyo.NonNegativeReals, doc="end of the gather of unit u")
    block.F = pyo.Var(m.U, domain=pyo.NonNegativeReals, doc="end of the computation of unit u")

    def compute(u):
        return _chosen(m, problem, u, "forward_ns", _US)

    @block.Constraint(m.U, doc="(4) gathers in order on one channel")
    def gathers(block, u):
        return block.G[u] == (block.G[u - 1] if u > 0 else 0) + _chosen(m, problem, u, "gather_forward_ns", _US)

    @block.Constraint(m.U, doc="(4) computation follows the gather")
    def follows_gather(block, u):
        return block.F[u] >= block.G[u] + compute(u)

    @block.Constraint(m.U, doc="(4) computation in order")
    def in_order(block, u):
        return block.F[u] >= block.F[u - 1] + compute(u) if u > 0 else pyo.Constraint.Skip

    return block


def _backward(m, problem: Instance, *, last: bool) -> pyo.Block:
    n, D = len(problem.units), problem.look_ahead
    number = "(6)" if last else "(5)"
    block = pyo.Block(concrete=True)
    block.G = pyo.Var(m.U, domain=pyo.NonNegativeReals, doc="end of the gather of unit u")
    block.C = pyo.Var(m.U, domain=pyo.NonNegativeReals, doc="end of the computation of unit u")
    block.R = pyo.Var(m.U, domain=pyo.NonNegativeReals, doc="end of the reduction of unit u")
    block.end = pyo.Var(domain=pyo.NonNegativeReals, doc="end of the pass")

    def compute(u):
        return _chosen(m, problem, u, "backward_ns", _US)

    def reduction(u):
        return _chosen(m, problem, u, "last_reduce_ns" if last else "reduce_ns", _US)

    @block.Constraint(m.U, doc=f"{number} gathers in order")
    def gathers(block, u):
        return block.G[u] >= (block.G[u + 1] if u + 1 < n else 0) + _chosen(m, problem, u, "gather_backward_ns", _US)

    @block.Constraint(m.U, doc=f"{number} a gather goes behind the reduction of the unit D + 1 before it")
    def behind_reduction(block, u):
        if u + D + 1 >= n:
            return pyo.Constraint.Skip
        return block.G[u] >= block.R[u + D + 1] + _chosen(m, problem, u, "gather_backward_ns", _US)

    @block.Constraint(m.U, doc=f"{number} computation follows the gather")
    def follows_gather(block, u):
        return block.C[u] >= block.G[u] + compute(u)

    @block.Constraint(m.U, doc=f"{number} computation in order")
    def in_order(block, u):
        return block.C[u] >= block.C[u + 1] + compute(u) if u + 1 < n else pyo.Constraint.Skip

    @block.Constraint(m.U, doc=f"{number} a reduction follows its computation")
    def follows_computation(block, u):
        return block.R[u] >= block.C[u] + reduction(u)

    @block.Constraint(m.U, doc=f"{number} a reduction goes behind the gather of the unit D after it")
    def behind_gather(block, u):
        return block.R[u] >= block.G[max(u - D, 0)] + reduction(u)

    @block.Constraint(m.U, doc=f"{number} reductions in order")
    def reductions(block, u):
        return block.R[u] >= block.R[u + 1] + reduction(u) if u + 1 < n else pyo.Constraint.Skip

    @block.Constraint([0, 1], doc=f"{number} the pass ends with the last computation and the last reduction")
    def ends(block, i):
        return block.end >= (block.C[0] if i == 0 else block.R[0])

    return block


def relaxed(problem: Instance, budget_bytes: int) -> pyo.ConcreteModel:
    """A relaxation of :func:`exact` that counts units by kind; its objective bounds the step from below (microseconds)."""
    m = _counts(problem)
    A = problem.accumulation
    _relaxed_memory(m, problem, budget_bytes / _MIB)
    first, last = problem.kind_of[0], problem.kind_of[-1]

    def total(name):
        return _total(m, problem, name, _US)

    def least(kind, name):
        return min(getattr(p, name) for p in problem.kinds[kind].prices) / _US

    m.F = pyo.Var(domain=pyo.NonNegativeReals)
    m.forward_computes = pyo.Constraint(
        expr=total("forward_ns") + _single(m, problem, first, "gather_forward_ns") <= m.F,
        doc="(4) computation is one after the other",
    )
    m.forward_gathers = pyo.Constraint(
        expr=total("gather_forward_ns") + least(last, "forward_ns") <= m.F, doc="(4) so are gathers, and the last unit computes"
    )
    step = A * m.F + total("update_ns")
    for name, times in (("last_reduce_ns", 1), ("reduce_ns", A - 1)):
        if not times:
            continue
        B = pyo.Var(domain=pyo.NonNegativeReals)
        m.add_component(f"B_{name}", B)
        computes = (
            total("backward_ns") + _single(m, problem, last, "gather_backward_ns") + _single(m, problem, first, name)
        ) <= B
        channel = total("gather_backward_ns") + total(name) <= B
        m.add_component(f"computes_{name}", pyo.Constraint(expr=computes, doc="(5), (6) computation is one after the other"))
        m.add_component(f"channel_{name}", pyo.Constraint(expr=channel, doc="(5), (6) so is the channel"))
        step += times * B
    m.step = pyo.Objective(expr=step, sense=pyo.minimize, doc="(1) a lower bound of one optimizer step")
    return m


def relaxed_leanest(problem: Instance) -> pyo.ConcreteModel:
    """The leanest counts: the objective (MiB) bounds the peak of every plan from below."""
    m = _counts(problem)
    m.peak = pyo.Var(domain=pyo.NonNegativeReals)
    _relaxed_memory(m, problem, m.peak)
    m.least = pyo.Objective(expr=m.peak, sense=pyo.minimize)
    return m


def _counts(problem: Instance) -> pyo.ConcreteModel:
    m = pyo.ConcreteModel()
    m.count = Counter(problem.kind_of)
    m.K = pyo.RangeSet(0, len(problem.kinds) - 1)
    m.KO = pyo.Set(initialize=[(k, o) for k in m.K for o in range(len(problem.kinds[k].options))], ordered=True)
    m.y = pyo.Var(m.KO, domain=pyo.NonNegativeIntegers, bounds=lambda m, k, o: (0, m.count[k]))

    @m.Constraint(m.K, doc="(2) one option per unit")
    def one_option(m, k):
        return pyo.quicksum(m.y[k, o] for o in range(len(problem.kinds[k].options))) == m.count[k]

    return m


def _total(m, problem: Instance, name: str, scale: float):
    """A price added up over all units, linear in y."""
    return pyo.quicksum(getattr(problem.kinds[k].prices[o], name) / scale * m.y[k, o] for k, o in m.KO)


def _single(m, problem: Instance, kind: int, name: str):
    """A price of one certain unit of a kind: exact if it is the only one, else the least of its options."""
    prices = problem.kinds[kind].prices
    if m.count[kind] == 1:
        return pyo.quicksum(getattr(p, name) / _US * m.y[kind, o] for o, p in enumerate(prices))
    return min(getattr(p, name) for p in prices) / _US


def _relaxed_memory(m, problem: Instance, budget) -> None:
    """Of (3), the updates, and the backward of the last unit of every kind."""
    resident = _total(m, problem, "resident_bytes", _MIB) + problem.bucket_bytes / _MIB
    m.degrees = pyo.Set(initialize=_degrees(problem), ordered=True)

    @m.Constraint(m.degrees, doc="(3) memory while the optimizer updates what is spread over d ranks")
    def memory_update(m, d):
        updated = (
            problem.kinds[k].prices[o].update_bytes / _MIB * m.y[k, o]
            for k, o in m.KO
            if problem.kinds[k].options[o].degree == d
        )
        return resident + pyo.quicksum(updated) <= budget

    last_of = {kind: u for u, kind in enumerate(problem.kind_of)}
    behind: Counter[int] = Counter()
    behind_last: dict[int, Counter[int]] = {}
    for u in range(len(problem.units) - 1, -1, -1):
        kind = problem.kind_of[u]
        behind[kind] += 1
        if last_of[kind] == u:
            behind_last[kind] = Counter(behind)
            behind_last[kind][kind] -= 1  # the unit itself counts

    def saved(p, kept):
        return p.activation_bytes + (p.gathered_bytes if kept else 0)

    @m.Constraint(m.K, doc="(3) memory in the backward of the last unit of kind k, whichever units took which option")
    def memory_backward(m, k):
        alive = 0
        for j in m.K:
            kind = problem.kinds[j]
            left_out = behind_last[k][j]
            if left_out == m.count[j]:
                continue
            most = max(saved(p, kind.kept) for p in kind.prices) / _MIB
            alive += pyo.quicksum(saved(p, kind.kept) / _MIB * m.y[j, o] for o, p in enumerate(kind.prices)) - left_out * most
        a = problem.ahead_backward[last_of[k]]
        working = min(p.backward_bytes + (0 if problem.kinds[k].kept else p.gathered_bytes) for p in problem.kinds[k].prices)
        return resident + alive + (problem.staging_bytes + working + a.bytes) / _MIB <= budget


def _degrees(problem: Instance) -> list[int]:
    return sorted({option.degree for kind in problem.kinds for option in kind.options})
