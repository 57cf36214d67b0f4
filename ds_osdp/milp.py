"""The model to solve, in Pyomo; docs/model.md is the same text in prose, with the same symbols and numbers.

Sets and data
    U           units 1..n in the order of one forward; K kinds of units that cost the same, n_k of each
    O_k         options of kind k, each with a price
    A           micro-steps per optimizer step

Variables
    x_uo        1 if unit u takes option o                                      binary
    F_u         when the computation of unit u ends, in forward
    G_u, C_u, R_u   when its gather, its computation and its reduction end, in backward; for each sort of micro-step
    S_u         bytes saved by the units before u; H_u, K_u, D_u the same for parameters gathered, kept, and gathered again

    minimise    A · F_n  +  (A - 1) · B  +  L  +  Σ_uo x_uo · update_uo                     (1)
    one option per unit                                                                  (2)
    memory within the budget at every moment                                             (3)
    forward: gathers in order on one channel, computation behind them                    (4)
    backward: gathers, computation, reductions on the same channel                       (5)
    the same for the last micro-step, with its own reductions                            (6)

:func:`exact` is that model.  :func:`relaxed` counts: y_ko units of group k (a kind, or a single unit at either end) take
option o, and of (3) to (6) it keeps what holds whichever units these are.  Its optimum bounds the exact one from below, and
its size does not grow with n.

Times are in microseconds and bytes in MiB, so that coefficients are near one another and HiGHS's absolute tolerances
mean a byte and a picosecond.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import pyomo.environ as pyo

from ds_osdp.step import Instance

__all__ = ["exact", "exact_leanest", "groups", "relaxed", "relaxed_leanest"]

_MIB = float(1 << 20)
_US = 1e3  # nanoseconds

ENDS = 3
"""Units at either end that :func:`relaxed` counts one by one: what a pass begins and ends with is not hidden."""
ROWS = 16
"""Groups whose last backward :func:`relaxed` checks against the budget."""


def exact(problem: Instance, budget_bytes: int) -> pyo.ConcreteModel:
    """The model of ``problem`` under ``budget_bytes`` per rank; its objective is the step in microseconds."""
    m = _choices(problem)
    A = problem.accumulation
    _memory(m, problem, budget_bytes / _MIB)
    m.first = _forward(m, problem, first=True)
    m.last = _backward(m, problem, last=True)
    step = m.first.F[m.U.last()] + m.last.end + pyo.quicksum(_chosen(m, problem, u, "update_ns", _US) for u in m.U)
    if A > 1:
        m.forward = _forward(m, problem, first=False)
        m.between = _backward(m, problem, last=False)
        step += (A - 1) * (m.forward.F[m.U.last()] + m.between.end)
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
    m.S = pyo.Var(ends, domain=pyo.NonNegativeReals, doc="activations saved before unit u")
    m.K = pyo.Var(ends, domain=pyo.NonNegativeReals, doc="gathered before unit u and kept for backward")
    m.H = pyo.Var(ends, domain=pyo.NonNegativeReals, doc="gathered before unit u, whether it stays or not")
    m.D = pyo.Var(ends, domain=pyo.NonNegativeReals, doc="gathered before unit u and freed after use")
    m.T = pyo.Var(ends, domain=pyo.NonNegativeReals, doc="scattered before unit u, as padded copies")
    m.resident = pyo.Var(domain=pyo.NonNegativeReals)
    m.whole = pyo.Var(domain=pyo.NonNegativeReals, doc="of it, what is freed while the optimizer updates")

    def gathered(u):
        return _chosen(m, problem, u, "gathered_bytes", _MIB)

    def kept(u):
        return problem.kinds[problem.kind_of[u]].kept

    def again(u):
        return problem.kinds[problem.kind_of[u]].gathered_again

    @m.Constraint(ends)
    def saved(m, u):
        return m.S[u] == (m.S[u - 1] + _chosen(m, problem, u - 1, "activation_bytes", _MIB) if u else 0)

    @m.Constraint(ends)
    def keeps(m, u):
        return m.K[u] == (m.K[u - 1] + (gathered(u - 1) if kept(u - 1) else 0) if u else 0)

    @m.Constraint(ends)
    def gathers(m, u):
        return m.H[u] == (m.H[u - 1] + gathered(u - 1) if u else 0)

    @m.Constraint(ends)
    def freed(m, u):
        return m.D[u] == (m.D[u - 1] + (gathered(u - 1) if again(u - 1) else 0) if u else 0)

    @m.Constraint(ends)
    def scattered(m, u):
        return m.T[u] == (m.T[u - 1] + _chosen(m, problem, u - 1, "scattered_bytes", _MIB) if u else 0)

    @m.Constraint()
    def residents(m):
        held = pyo.quicksum(_chosen(m, problem, u, "resident_bytes", _MIB) for u in m.U)
        return m.resident == held + problem.fixed_bytes / _MIB

    @m.Constraint()
    def wholes(m):
        return m.whole == pyo.quicksum(_chosen(m, problem, u, "whole_bytes", _MIB) for u in m.U)

    def within(window, sums, u):
        return sums[int(window.end[u])] - sums[int(window.begin[u])] + float(window.bytes[u]) / _MIB

    flat = problem.flat_elements[0] / problem.flat_elements[1]

    def forward(u, live):
        wholes = problem.regathered
        beside = within(problem.live_forward.ahead, m.H, u) + flat * m.H[n]
        beside += float(wholes.bytes[u]) / _MIB + (m.whole if wholes.end[u] else 0)
        return m.resident + m.S[u + 1] + live + _chosen(m, problem, u, "forward_bytes", _MIB) + beside <= budget

    def backward(u, live):
        beside = within(problem.live_backward.ahead, m.D, u) + flat * m.H[n] + within(problem.staging, m.T, u)
        if u < m.U.last():
            beside += _chosen(m, problem, u + 1, "waiting_bytes", _MIB)
        return m.resident + m.S[u + 1] + live + _chosen(m, problem, u, "backward_bytes", _MIB) + beside <= budget

    @m.Constraint(m.U, doc="(3) memory in the forward of unit u")
    def memory_forward(m, u):
        return forward(u, m.K[u] + gathered(u))

    @m.Constraint(m.U, doc="(3) memory in the backward of unit u")
    def memory_backward(m, u):
        return backward(u, m.K[u] + (gathered(u) if kept(u) or again(u) else 0))

    @m.Constraint(m.U, doc="(3) the same in forward, where the prefetcher fills what it may")
    def memory_forward_full(m, u):
        least = float(problem.live_forward.least[u]) / _MIB
        return forward(u, least) if least else pyo.Constraint.Skip

    @m.Constraint(m.U, doc="(3) the same in backward, where the prefetcher fills what it may")
    def memory_backward_full(m, u):
        least = float(problem.live_backward.least[u]) / _MIB
        return backward(u, least) if least else pyo.Constraint.Skip

    @m.Constraint(m.U, doc="(3) memory while DeepSpeed takes the norm of the gradient of unit u")
    def memory_norm(m, u):
        return m.resident - m.whole + _chosen(m, problem, u, "norm_bytes", _MIB) <= budget

    def updated(u, o):
        return m.x[u, o], problem.prices(u)[o].update_bytes / _MIB, problem.options(u)[o].degree

    _memory_update(m, problem, m.resident - m.whole, [updated(u, o) for u, o in m.UO], budget)


def _memory_update(m, problem: Instance, held, updated, budget) -> None:
    """(3), the updates: what is spread over d ranks needs the sum of its working memory, or that of a sub-group if it is less.

    ``updated`` lists, for every option, how many units take it, what each adds, and its degree.
    """
    degrees = _degrees(problem)
    limits = {d: problem.update_limits[d] / _MIB for d in degrees}
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
        return _chosen(m, problem, u, "forward_ns", _US)

    @block.Constraint(m.U, doc="(4) gathers in order on one channel")
    def gathers(block, u):
        return block.G[u] == (block.G[u - 1] if u > 0 else 0) + _chosen(m, problem, u, gather, _US)

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
        return _chosen(m, problem, u, "last_backward_ns" if last else "backward_ns", _US)

    def gather(u):
        return _chosen(m, problem, u, "gather_backward_ns", _US)

    def waited(u):
        return _chosen(m, problem, u, "waited_ns", _US)

    def reduction(u):
        return _chosen(m, problem, u, "last_reduce_ns" if last else "reduce_ns", _US)

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


def relaxed(problem: Instance, budget_bytes: int) -> pyo.ConcreteModel:
    """A relaxation of :func:`exact` that counts units by group; its objective bounds the step from below (microseconds)."""
    m = _counts(problem)
    A = problem.accumulation
    _relaxed_memory(m, problem, budget_bytes / _MIB)
    passes = [
        ("first", 1, ("gather_first_ns", "forward_ns"), m.slots),
        ("last", 1, ("gather_backward_ns", "last_backward_ns", "last_reduce_ns"), m.slots[::-1]),
        ("forward", A - 1, ("gather_forward_ns", "forward_ns"), m.slots),
        ("between", A - 1, ("gather_backward_ns", "backward_ns", "reduce_ns"), m.slots[::-1]),
    ]
    step = _total(m, problem, "update_ns", _US)
    for name, times, machines, slots in passes:
        if times:
            block = _relaxed_pass(m, problem, machines, slots)
            m.add_component(name, block)
            step += times * block.end
    m.step = pyo.Objective(expr=step, sense=pyo.minimize, doc="(1) a lower bound of one optimizer step")
    return m


def _relaxed_pass(m, problem: Instance, machines, slots) -> pyo.Block:
    """(4), (5) or (6) over slots: every unit at either end is one, and all groups between are one together.

    Each machine takes its slots in order, and a unit waits for the machine before.  Within the slot of all groups nobody
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
        return pyo.quicksum(_group_total(m, problem, k, machines[i], _US) for k in slots[s])

    def waited(i, s):
        """What the units of slot s wait for holds up the gathers of the slots behind it."""
        if not backward or machines[i] != "gather_backward_ns":
            return 0
        return pyo.quicksum(_group_total(m, problem, k, "waited_ns", _US) for k in slots[s])

    @block.Constraint(block.M, block.S, doc="in order")
    def in_order(block, i, s):
        return block.E[i, s] >= (block.E[i, s - 1] + waited(i, s - 1) if s else 0) + takes(i, s)

    @block.Constraint(block.M, block.S, doc="behind the machine before")
    def behind(block, i, s):
        if i == 0 or sum(len(m.members[k]) for k in slots[s]) > 1:
            return pyo.Constraint.Skip
        return block.E[i, s] >= block.E[i - 1, s] + takes(i, s)

    @block.Constraint(block.M)
    def ends(block, i):
        return block.end >= block.E[i, len(slots) - 1]

    if backward:
        sent = pyo.quicksum(_total(m, problem, name, _US) for name in channel)
        block.channel = pyo.Constraint(expr=block.end >= sent, doc="gathers and reductions share the channel")
    return block


def relaxed_leanest(problem: Instance) -> pyo.ConcreteModel:
    """The leanest counts: the objective (MiB) bounds the peak of every plan from below."""
    m = _counts(problem)
    m.peak = pyo.Var(domain=pyo.NonNegativeReals)
    _relaxed_memory(m, problem, m.peak)
    m.least = pyo.Objective(expr=m.peak, sense=pyo.minimize)
    return m


def groups(problem: Instance) -> list[list[int]]:
    """Units counted together: those of one kind, but each of the first and the last few by itself.

    What a pass begins and ends with is not hidden behind anything, so it matters which units these are.
    """
    n = len(problem.units)
    between = problem.kind_index[ENDS : max(ENDS, n - ENDS)]
    by_kind = [(np.flatnonzero(between == kind) + ENDS).tolist() for kind in dict.fromkeys(between.tolist())]
    return [[u] for u in _ends(n)] + by_kind


def _ends(n: int) -> list[int]:
    """The first and the last few of n units."""
    return [u for u in range(n) if u < ENDS or u >= n - ENDS]


def _slots(members: list[list[int]], n: int) -> list[list[int]]:
    """Groups in the order of one forward, those between the two ends together."""
    group_of = {units[0]: k for k, units in enumerate(members)}
    between = [k for k, units in enumerate(members) if ENDS <= units[0] < n - ENDS]
    slots = [[group_of[u]] for u in _ends(n)]
    return [*slots[:ENDS], between, *slots[ENDS:]] if between else slots


def _counts(problem: Instance) -> pyo.ConcreteModel:
    m = pyo.ConcreteModel()
    m.members = groups(problem)
    m.kind = [problem.kind_of[units[0]] for units in m.members]
    m.slots = _slots(m.members, len(problem.units))
    m.K = pyo.RangeSet(0, len(m.members) - 1)
    m.KO = pyo.Set(initialize=[(k, o) for k in m.K for o in range(len(problem.kinds[m.kind[k]].options))], ordered=True)
    m.y = pyo.Var(m.KO, domain=pyo.NonNegativeIntegers, bounds=lambda m, k, o: (0, len(m.members[k])))

    @m.Constraint(m.K, doc="(2) one option per unit")
    def one_option(m, k):
        return pyo.quicksum(m.y[k, o] for o in range(len(problem.kinds[m.kind[k]].options))) == len(m.members[k])

    return m


def _group_total(m, problem: Instance, k: int, name: str, scale: float):
    """A price added up over the units of a group, linear in y."""
    values = [getattr(p, name) for p in problem.kinds[m.kind[k]].prices]
    least = min(values)
    more = pyo.quicksum((v - least) / scale * m.y[k, o] for o, v in enumerate(values) if v > least)
    return least / scale * len(m.members[k]) + more


def _total(m, problem: Instance, name: str, scale: float):
    """A price added up over all units."""
    return pyo.quicksum(_group_total(m, problem, k, name, scale) for k in m.K)


def _relaxed_memory(m, problem: Instance, budget) -> None:
    """Of (3), the updates, and the backward of the last unit of every group."""
    resident = _total(m, problem, "resident_bytes", _MIB) + problem.fixed_bytes / _MIB
    held = resident - _total(m, problem, "whole_bytes", _MIB)

    def updated(k, o):
        kind = problem.kinds[m.kind[k]]
        return m.y[k, o], kind.prices[o].update_bytes / _MIB, kind.options[o].degree

    _memory_update(m, problem, held, [updated(k, o) for k, o in m.KO], budget)

    def saved(p, kept):
        return (p.activation_bytes + (p.gathered_bytes if kept else 0)) / _MIB

    # Some rows are enough for a bound: those of the ends, and of the groups that need most to work.
    largest = sorted(m.K, key=lambda k: -max(p.backward_bytes + p.gathered_bytes for p in problem.kinds[m.kind[k]].prices))
    ends = [slot[0] for slot in m.slots if len(slot) == 1]
    m.rows = pyo.Set(initialize=sorted({*largest[:ROWS], *ends}), ordered=True)

    @m.Constraint(m.rows, doc="(3) memory in the backward of the last unit of group k, whichever units took which option")
    def memory_backward(m, k):
        last = m.members[k][-1]
        alive = 0
        for j in m.K:
            kind = problem.kinds[m.kind[j]]
            before = bisect_left(m.members[j], last)
            if before:
                most = max(saved(p, kind.kept) for p in kind.prices)
                all_of_it = pyo.quicksum(saved(p, kind.kept) * m.y[j, o] for o, p in enumerate(kind.prices))
                alive += all_of_it - (len(m.members[j]) - before) * most
        own = problem.kinds[m.kind[k]].prices
        used = problem.kinds[m.kind[k]].kept or problem.kinds[m.kind[k]].gathered_again
        working = [p.backward_bytes + p.activation_bytes + (p.gathered_bytes if used else 0) for p in own]
        here = min(working) / _MIB
        if len(m.members[k]) == 1:
            here = pyo.quicksum(size / _MIB * m.y[k, o] for o, size in enumerate(working))
        beside = float(problem.live_backward.ahead.bytes[last] + problem.staging.bytes[last])
        return resident + alive + here + beside / _MIB <= budget


def _degrees(problem: Instance) -> list[int]:
    return sorted({option.degree for kind in problem.kinds for option in kind.options})
