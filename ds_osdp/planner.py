"""Profile + cluster + budget -> plan."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from importlib.metadata import version

from ds_osdp.cluster import Cluster
from ds_osdp.config import Rule, SolverConfig
from ds_osdp.errors import ConfigError, InfeasiblePlanError
from ds_osdp.job import Job
from ds_osdp.plan import BUILT_STAGES, Plan, Provenance, Stage, UnitPlan, model_fingerprint
from ds_osdp.prices import evaluate, instance, replica_bucket_bytes
from ds_osdp.profile import ModelProfile, UnitProfile
from ds_osdp.solve import SOLVER, fastest, leanest

__all__ = ["make_plan"]

_EXACT = SolverConfig()


def make_plan(
    profile: ModelProfile,
    cluster: Cluster,
    job: Job,
    budget_bytes: int,
    *,
    stages: Sequence[Stage] = BUILT_STAGES,
    rules: Sequence[Rule] = (),
    solver: SolverConfig = _EXACT,
) -> Plan:
    """The fastest plan that fits.

    Args:
        profile: the model.
        cluster: the machines.
        job: the training job.
        budget_bytes: what a rank may use, everything counted.
        stages: the stages units may take where no rule pins them.
        rules: what the user pins.
        solver: time limit and gap.

    Raises:
        ConfigError: a rule matches nothing, or two rules pull one unit apart.
        InfeasiblePlanError: nothing fits; it says what would.
        SolverError: the search ended without a plan.
    """
    problem = instance(profile, cluster, job, allowed_stages(profile.units, stages, rules))
    solution = fastest(problem, budget_bytes, time_limit_seconds=solver.time_limit_s, gap=solver.gap)
    if solution is None:
        least = evaluate(problem, leanest(problem, time_limit_seconds=solver.time_limit_s))
        raise InfeasiblePlanError(budget_bytes, least.peak_bytes, least.peak_moment)
    totals = evaluate(problem, solution.choice)
    # The model's bound and the integer total differ by rounding; a bound above what was reached is that total.
    bound_ns = min(solution.bound_ns, totals.step_ns)
    chosen = [options[index] for options, index in zip(problem.options, solution.choice, strict=True)]
    return Plan(
        world_size=job.world_size,
        micro_batch=job.micro_batch,
        accumulation=job.accumulation,
        step_seconds=totals.step_ns / 1e9,
        bound_seconds=bound_ns / 1e9,
        gap=_gap(totals.step_ns, bound_ns),
        samples_per_second=problem.samples_per_step / (totals.step_ns / 1e9) if totals.step_ns else 0.0,
        budget_bytes=budget_bytes,
        resident_bytes=totals.resident_bytes,
        peak_bytes=totals.peak_bytes,
        peak_moment=totals.peak_moment,
        replica_bucket_bytes=replica_bucket_bytes(cluster, job.world_size),
        units=tuple(
            UnitPlan(
                name=unit.name,
                stage=option.stage,
                degree=option.degree,
                parameters=tuple(parameter.name for parameter in unit.parameters),
                elements=unit.numel,
            )
            for unit, option in zip(profile.units, chosen, strict=True)
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


def allowed_stages(units: Sequence[UnitProfile], stages: Sequence[Stage], rules: Sequence[Rule]) -> list[tuple[Stage, ...]]:
    """The stages each unit may take.  A rule that matches one parameter of a unit pins the unit.

    Raises:
        ConfigError: a rule matches no parameter, or two rules pin one unit to different stages.
    """
    unmatched = set(range(len(rules)))
    allowed = []
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
        allowed.append(tuple(pins) or tuple(sorted(set(stages))))
    if unmatched:
        names = [parameter.name for unit in units for parameter in unit.parameters]
        patterns = ", ".join(repr(rules[i].match) for i in sorted(unmatched))
        raise ConfigError(
            f"osdp.rules: no parameter matches {patterns}; parameters are named like {', '.join(map(repr, names[:3]))}"
        )
    return allowed


def _gap(step_ns: int, bound_ns: int) -> float:
    """Relative gap; what integer rounding alone explains (half a nanosecond per price) counts as none."""
    if step_ns - bound_ns <= 1000:
        return 0.0
    return (step_ns - bound_ns) / step_ns
