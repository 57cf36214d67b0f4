"""Profile + cluster + budget -> plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from importlib.metadata import version

from ds_osdp.cluster import Cluster
from ds_osdp.config import OsdpConfig, Rule, SolverConfig
from ds_osdp.errors import ConfigError, InfeasiblePlanError
from ds_osdp.job import Job
from ds_osdp.plan import Plan, Provenance, Stage, UnitPlan, model_fingerprint
from ds_osdp.prices import Space, deferred_bucket_bytes
from ds_osdp.profile import ModelProfile, UnitProfile
from ds_osdp.remedies import remedies
from ds_osdp.sizes import jobs_by_sizes
from ds_osdp.solve import SOLVER, Solution, fastest, leanest, relative_gap
from ds_osdp.step import Instance, Totals, evaluate, priced

__all__ = ["BUILT", "best_micro_batch", "make_plan", "pinned_stages"]

BUILT = Space(stages=tuple(Stage), max_slices=OsdpConfig().max_slices)
"""What this release can apply to an engine."""

_EXACT = SolverConfig()


def make_plan(
    profile: ModelProfile,
    cluster: Cluster,
    job: Job,
    budget_bytes: int,
    *,
    space: Space = BUILT,
    rules: Sequence[Rule] = (),
    solver: SolverConfig = _EXACT,
) -> Plan:
    """The fastest plan that fits.

    Args:
        profile: the model.
        cluster: the machines.
        job: the training job.
        budget_bytes: what a rank may use, everything counted.
        space: what units may take where no rule pins them.
        rules: what the user pins.
        solver: time limit and gap.

    Raises:
        ConfigError: a rule matches nothing, or two rules pull one unit apart.
        InfeasiblePlanError: nothing fits; it says what would.
        SolverError: the search ended without a plan.
    """
    pins = pinned_stages(profile.units, rules)
    solved: list[tuple[Job, Instance, Solution]] = []
    least: list[tuple[Job, Totals]] = []
    for sized in jobs_by_sizes(profile, cluster, job):
        problem = priced(profile, cluster, sized, space, pins)
        solution = fastest(problem, budget_bytes, time_limit_seconds=solver.time_limit_s, gap=solver.gap)
        if solution is not None:
            solved.append((sized, problem, solution))
        elif not solved:
            least.append((sized, evaluate(problem, leanest(problem, time_limit_seconds=solver.time_limit_s))))
    if not solved:
        leanest_job, totals = min(least, key=lambda candidate: candidate[1].peak_bytes)
        ways = remedies(profile, cluster, leanest_job, budget_bytes, space, pins, solver)
        raise InfeasiblePlanError(budget_bytes, totals.peak_bytes, totals.peak_moment, ways)
    chosen, problem, solution = min(solved, key=lambda candidate: evaluate(candidate[1], candidate[2].choice).step_ns)
    bound_ns = min(each.bound_ns for _, _, each in solved)
    return _plan(problem, profile, cluster, chosen, budget_bytes, solution.choice, bound_ns)


def best_micro_batch(
    candidates: Sequence[int],
    profile_of: Callable[[Job], ModelProfile],
    cluster: Cluster,
    job: Job,
    budget_bytes: int,
    *,
    space: Space = BUILT,
    rules: Sequence[Rule] = (),
    solver: SolverConfig = _EXACT,
) -> Plan:
    """The plan with the most samples per second for the global batch of ``job``, over several micro-batches.

    Args:
        candidates: micro-batches; one that does not divide the global batch is left out.
        profile_of: traces the model with a job's micro-batch.
        cluster: the machines.
        job: the training job; its micro-batch and accumulation are replaced.
        budget_bytes: what a rank may use.
        space: what units may take.
        rules: what the user pins.
        solver: time limit and gap of each solve.

    Raises:
        ConfigError: no micro-batch divides the global batch.
        InfeasiblePlanError: none fits; that of the smallest micro-batch.
    """
    jobs = [with_it for b in sorted(set(candidates)) if (with_it := job.with_micro_batch(b)) is not None]
    if not jobs:
        raise ConfigError(
            f"osdp.micro_batch: train_batch_size {job.train_batch_size} is no multiple of {job.world_size} ranks times any of "
            f"{sorted(candidates)}"
        )
    plans: list[Plan] = []
    least: InfeasiblePlanError | None = None
    for candidate in jobs:
        try:
            profile = profile_of(candidate)
            plans.append(make_plan(profile, cluster, candidate, budget_bytes, space=space, rules=rules, solver=solver))
        except InfeasiblePlanError as error:
            least = least or error
    if not plans:
        assert least is not None
        raise least
    return max(plans, key=lambda plan: (plan.samples_per_second, -plan.peak_bytes))


def pinned_stages(units: Sequence[UnitProfile], rules: Sequence[Rule]) -> list[Stage | None]:
    """The stage that the rules pin each unit to.  A rule that matches one parameter of a unit pins the unit.

    Raises:
        ConfigError: a rule matches no parameter, or two rules pin one unit to different stages.
    """
    unmatched = set(range(len(rules)))
    pinned: list[Stage | None] = []
    for unit in units:
        pins: dict[Stage, str] = {}
        for parameter in unit.parameters:
            hits = [i for i, rule in enumerate(rules) if fnmatchcase(parameter.name, rule.match)]
            unmatched -= set(hits)
            if hits:
                pins.setdefault(rules[hits[0]].stage, f"{rules[hits[0]].match!r} pins {parameter.name!r}")
        if len(pins) > 1:
            pulls = " and ".join(f"{reason} to stage {stage}" for stage, reason in sorted(pins.items()))
            raise ConfigError(f"osdp.rules pull the unit {unit.name!r} apart, and a unit is placed as a whole: {pulls}")
        pinned.append(next(iter(pins), None))
    if unmatched:
        names = [parameter.name for unit in units for parameter in unit.parameters]
        patterns = ", ".join(repr(rules[i].match) for i in sorted(unmatched))
        raise ConfigError(
            f"osdp.rules: no parameter matches {patterns}; parameters are named like {', '.join(map(repr, names[:3]))}"
        )
    return pinned


def _plan(
    problem: Instance,
    profile: ModelProfile,
    cluster: Cluster,
    job: Job,
    budget_bytes: int,
    choice: Sequence[int],
    bound_ns: int,
) -> Plan:
    totals = evaluate(problem, choice)
    return Plan(
        world_size=job.world_size,
        micro_batch=job.micro_batch,
        accumulation=job.accumulation,
        step_seconds=totals.step_ns / 1e9,
        bound_seconds=bound_ns / 1e9,
        gap=relative_gap(totals.step_ns, bound_ns),
        samples_per_second=problem.samples_per_step / (totals.step_ns / 1e9) if totals.step_ns else 0.0,
        budget_bytes=budget_bytes,
        resident_bytes=totals.resident_bytes,
        peak_bytes=totals.peak_bytes,
        peak_moment=totals.peak_moment,
        sizes=job.sizes,
        deferred_bucket_bytes=deferred_bucket_bytes(cluster, job.world_size),
        units=tuple(
            UnitPlan(
                name=unit.name,
                stage=option.stage,
                degree=option.degree,
                slices=option.slices,
                whole_slices=option.whole_slices,
                recompute=option.recompute,
                parameters=tuple(parameter.name for parameter in unit.parameters),
                elements=unit.numel,
                held_bytes=paid.resident_bytes,
                busy_seconds=paid.busy_ns(problem.accumulation) / 1e9,
            )
            for u, unit in enumerate(profile.units)
            for option, paid in ((problem.options(u)[choice[u]], problem.prices(u)[choice[u]]),)
        ),
        provenance=Provenance(
            model=profile.model,
            model_fingerprint=model_fingerprint({p.name: p.shape for p in profile.parameters}),
            cluster=cluster.name,
            sample=profile.sample,
            solver=f"{SOLVER} {version('highspy')}",
            ds_osdp_version=version("ds-osdp"),
        ),
    )
