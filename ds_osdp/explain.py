"""Why a plan is what it is: what binds, what each unit buys, what more or less memory would do, and how far stock is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_osdp.cluster import Cluster
from ds_osdp.config import Rule, SolverConfig
from ds_osdp.errors import InfeasiblePlanError
from ds_osdp.job import Job
from ds_osdp.plan import Plan, Stage
from ds_osdp.planner import BUILT, make_plan, pinned_stages
from ds_osdp.prices import Option, Space
from ds_osdp.profile import ModelProfile
from ds_osdp.schedule import Pass, schedule
from ds_osdp.step import Instance, Moment, evaluate, priced, timeline

__all__ = [
    "Alternative",
    "BudgetPoint",
    "Explanation",
    "RuleCost",
    "StockPoint",
    "UnitReason",
    "alternatives",
    "explain",
    "stock_points",
]

GIB = 1 << 30
CURVE_POINTS = 7


@dataclass(frozen=True, slots=True)
class UnitReason:
    """What one unit's option buys: seconds per step that its leanest option would cost more, and bytes it would save."""

    name: str
    stage: Stage
    seconds_saved: float
    bytes_spent: int

    @property
    def seconds_per_gib(self) -> float:
        """Seconds per step bought with a gibibyte spent here."""
        return self.seconds_saved / self.bytes_spent * GIB if self.bytes_spent > 0 else 0.0


@dataclass(frozen=True, slots=True)
class BudgetPoint:
    """The best plan under one budget; ``step_seconds`` is None where nothing fits."""

    budget_bytes: int
    step_seconds: float | None
    peak_bytes: int | None


@dataclass(frozen=True, slots=True)
class StockPoint:
    """One uniform configuration, priced as the plan is."""

    name: str
    step_seconds: float
    peak_bytes: int
    fits: bool


@dataclass(frozen=True, slots=True)
class Alternative:
    """One other option of one unit, everything else as the plan has it."""

    unit: str
    option: Option
    chosen: bool
    step_seconds: float
    peak_bytes: int
    fits: bool


@dataclass(frozen=True, slots=True)
class RuleCost:
    """What the best plan without one user rule would save."""

    match: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """The reasons for one plan."""

    binding_moment: str
    slack_bytes: int
    timeline: tuple[Moment, ...]
    """Bytes per rank by kind at every moment of the step, in order."""
    schedule: tuple[Pass, ...]
    units: tuple[UnitReason, ...]
    more: BudgetPoint
    """The best plan with ``delta_bytes`` more."""
    less: BudgetPoint
    curve: tuple[BudgetPoint, ...]
    """Budget to step time, from the leanest budget to all that helps: the Pareto front."""
    stock: tuple[StockPoint, ...]
    rules: tuple[RuleCost, ...]

    @property
    def best_stock(self) -> StockPoint | None:
        """The fastest uniform configuration that fits; None where none does."""
        return min((point for point in self.stock if point.fits), key=lambda point: point.step_seconds, default=None)


def explain(
    plan: Plan,
    profile: ModelProfile,
    cluster: Cluster,
    job: Job,
    *,
    space: Space = BUILT,
    rules: Sequence[Rule] = (),
    solver: SolverConfig | None = None,
    delta_bytes: int = GIB,
) -> Explanation:
    """The reasons for ``plan``, from the same input that made it; every point of the curve is solved anew.

    Args:
        plan: what :func:`ds_osdp.planner.make_plan` returned.
        profile: the model.
        cluster: the machines.
        job: the training job.
        space: what units might take.
        rules: what the user pinned.
        solver: time limit and gap of each solve.
        delta_bytes: how much more, and how much less, to look at beside the plan's own budget.
    """
    solver = solver or SolverConfig()
    problem, choice = _as_planned(plan, profile, cluster, job, space, rules)

    def best(budget: int, kept_rules: Sequence[Rule] = rules) -> BudgetPoint:
        if budget <= 0:
            return BudgetPoint(budget, None, None)
        try:
            found = make_plan(profile, cluster, job, budget, space=space, rules=kept_rules, solver=solver)
        except InfeasiblePlanError:
            return BudgetPoint(budget, None, None)
        return BudgetPoint(budget, found.step_seconds, found.peak_bytes)

    def cost_of(rule: Rule) -> RuleCost:
        without = best(plan.budget_bytes, [other for other in rules if other is not rule])
        assert without.step_seconds is not None, "what fits with a rule fits without it"
        return RuleCost(rule.match, plan.step_seconds - without.step_seconds)

    stock = stock_points(profile, cluster, job, plan.budget_bytes)
    peaks = [point.peak_bytes for point in stock]
    least, most = min(peaks), max(peaks)
    budgets = [least + (most - least) * i // (CURVE_POINTS - 1) for i in range(CURVE_POINTS)]
    return Explanation(
        binding_moment=plan.peak_moment,
        slack_bytes=plan.budget_bytes - plan.peak_bytes,
        timeline=timeline(problem, choice),
        schedule=schedule(problem, choice),
        units=_units(problem, choice),
        more=best(plan.budget_bytes + delta_bytes),
        less=best(plan.budget_bytes - delta_bytes),
        curve=tuple(best(budget) for budget in budgets),
        stock=stock,
        rules=tuple(cost_of(rule) for rule in rules),
    )


def alternatives(
    plan: Plan,
    profile: ModelProfile,
    cluster: Cluster,
    job: Job,
    unit: int,
    *,
    space: Space = BUILT,
    rules: Sequence[Rule] = (),
) -> tuple[Alternative, ...]:
    """Every option of the unit with that index: what the step would take and need if only this unit took it.

    The other arguments are those of :func:`explain`.
    """
    problem, choice = _as_planned(plan, profile, cluster, job, space, rules)
    found = []
    for i, option in enumerate(problem.options(unit)):
        totals = evaluate(problem, [*choice[:unit], i, *choice[unit + 1 :]])
        fits = totals.peak_bytes <= plan.budget_bytes
        seconds = totals.step_ns / 1e9
        found.append(Alternative(plan.units[unit].name, option, i == choice[unit], seconds, totals.peak_bytes, fits))
    return tuple(found)


def _as_planned(
    plan: Plan, profile: ModelProfile, cluster: Cluster, job: Job, space: Space, rules: Sequence[Rule]
) -> tuple[Instance, tuple[int, ...]]:
    """The problem with the sizes of communication that ``plan`` chose, and its choice in there."""
    sized = job.model_copy(update=plan.sizes.model_dump())
    problem = priced(profile, cluster, sized, space, pinned_stages(profile.units, rules))
    return problem, chosen_options(problem, plan)


def chosen_options(problem: Instance, plan: Plan) -> tuple[int, ...]:
    """The index of every unit's option in ``problem`` that ``plan`` chose."""
    return tuple(
        next(
            i
            for i, option in enumerate(problem.options(u))
            if (option.stage, option.degree, option.slices, option.whole_slices, option.recompute)
            == (unit.stage, unit.degree, unit.slices, unit.whole_slices, unit.recompute)
        )
        for u, unit in enumerate(plan.units)
    )


def _units(problem: Instance, choice: tuple[int, ...]) -> tuple[UnitReason, ...]:
    """Each unit against its own leanest option, the others as they are."""
    now = evaluate(problem, choice)
    reasons = []
    for u, name in enumerate(problem.units):
        prices = problem.prices(u)
        leanest = min(range(len(prices)), key=lambda i: prices[i].resident_bytes)
        other = evaluate(problem, [*choice[:u], leanest, *choice[u + 1 :]])
        spent = prices[choice[u]].resident_bytes - prices[leanest].resident_bytes
        seconds = (other.step_ns - now.step_ns) / 1e9
        reasons.append(UnitReason(name, problem.options(u)[choice[u]].stage, seconds, spent))
    return tuple(reasons)


def stock_points(profile: ModelProfile, cluster: Cluster, job: Job, budget_bytes: int) -> tuple[StockPoint, ...]:
    """DDP, ZeRO-1, 2 and 3, and ZeRO-3 with its best single persistence threshold: points of the space of stages."""
    problem = priced(profile, cluster, job, Space(tuple(Stage)))
    n = len(problem.units)
    names = {
        Stage.REPLICATED: "DDP",
        Stage.OPTIMIZER_STATES: "ZeRO-1",
        Stage.GRADIENTS: "ZeRO-2",
        Stage.FULLY_SHARDED: "ZeRO-3",
    }
    choices = {name: (int(stage),) * n for stage, name in names.items()}
    # A threshold keeps the parameters of units up to a size, and still spreads gradients and states: stage 2.
    sizes = sorted({unit.numel for unit in profile.units})
    thresholds = [tuple(2 if unit.numel <= size else 3 for unit in profile.units) for size in sizes]
    fitting = [c for c in thresholds if evaluate(problem, c).peak_bytes <= budget_bytes] or thresholds[:1]
    choices["ZeRO-3, best threshold"] = min(fitting, key=lambda c: evaluate(problem, c).step_ns)
    points = []
    for name, choice in choices.items():
        totals = evaluate(problem, choice)
        points.append(StockPoint(name, totals.step_ns / 1e9, totals.peak_bytes, totals.peak_bytes <= budget_bytes))
    return tuple(points)
