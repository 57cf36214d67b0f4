"""The plan is the best one: against brute force, against an independent replay, and by hand."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import a_cluster, a_job, a_profile, a_unit, clusters, jobs, profiles
from replay import replay_step_ns

from ds_osdp.cluster import Cluster
from ds_osdp.config import Rule, SolverConfig
from ds_osdp.errors import ConfigError, InfeasiblePlanError, PlanMismatchError
from ds_osdp.job import Job
from ds_osdp.plan import Stage
from ds_osdp.planner import make_plan
from ds_osdp.prices import Instance, evaluate, instance
from ds_osdp.profile import ModelProfile

BOTH = (Stage.REPLICATED, Stage.FULLY_SHARDED)
THOROUGH = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def problem_of(profile: ModelProfile, cluster: Cluster, job: Job) -> Instance:
    return instance(profile, cluster, job, [BOTH] * len(profile.units))


@THOROUGH
@given(profiles(), clusters, jobs, st.floats(-0.05, 1.05))
def test_equals_brute_force(profile: ModelProfile, cluster: Cluster, job: Job, share: float) -> None:
    problem = problem_of(profile, cluster, job)
    everything = [evaluate(problem, choice) for choice in itertools.product(range(2), repeat=len(profile.units))]
    least = min(totals.peak_bytes for totals in everything)
    most = max(totals.peak_bytes for totals in everything)
    budget = max(1, int(least + share * (most - least + 1)))
    fitting = [totals.step_ns for totals in everything if totals.peak_bytes <= budget]
    if not fitting:
        with pytest.raises(InfeasiblePlanError) as caught:
            make_plan(profile, cluster, job, budget)
        assert caught.value.least_bytes == least
        return
    plan = make_plan(profile, cluster, job, budget)
    assert plan.peak_bytes <= budget
    # A plan may differ from the best by less than the solver's tolerance: a microsecond-scale coefficient's rounding.
    assert plan.step_seconds * 1e9 <= min(fitting) + 2
    assert plan.gap == 0
    assert plan.bound_seconds <= plan.step_seconds


@THOROUGH
@given(profiles(), clusters, jobs, st.data())
def test_the_price_of_a_plan_is_its_replay(profile: ModelProfile, cluster: Cluster, job: Job, data: st.DataObject) -> None:
    problem = problem_of(profile, cluster, job)
    choice = data.draw(st.lists(st.integers(0, 1), min_size=len(profile.units), max_size=len(profile.units)))
    assert evaluate(problem, choice).step_ns == replay_step_ns(problem, choice)


@THOROUGH
@given(profiles(), clusters, jobs)
def test_no_stock_configuration_is_better(profile: ModelProfile, cluster: Cluster, job: Job) -> None:
    problem = problem_of(profile, cluster, job)
    for stage in (0, 1):
        stock = evaluate(problem, [stage] * len(profile.units))
        plan = make_plan(profile, cluster, job, stock.peak_bytes)
        assert plan.step_seconds * 1e9 <= stock.step_ns + 2


def test_a_hidden_gather_costs_nothing() -> None:
    """Compute dwarfs communication: sharding all but the first unit is as fast, so nothing is worth memory."""
    profile = a_profile([a_unit(f"u{i}", 100, tokens=100_000) for i in range(6)])
    problem = problem_of(profile, a_cluster(latency=0.0, bandwidth=1e12), a_job())
    sharded, replicated = (evaluate(problem, [i] * 6) for i in (1, 0))
    first_only = evaluate(problem, [0, 1, 1, 1, 1, 1])
    assert first_only.step_ns - replicated.step_ns < 0.02 * replicated.step_ns
    assert sharded.peak_bytes < replicated.peak_bytes


def test_accumulation_makes_replicating_worth_more() -> None:
    profile = a_profile([a_unit(f"u{i}", 300) for i in range(4)])
    gain = {}
    for accumulation in (1, 4):
        problem = problem_of(profile, a_cluster(), a_job(accumulation=accumulation))
        sharded, replicated = (evaluate(problem, [i] * 4).step_ns for i in (1, 0))
        gain[accumulation] = sharded / replicated
    assert gain[4] > gain[1] > 1


def test_resident_bytes_follow_the_table_of_stages() -> None:
    """bf16 with AdamW: 16 bytes a parameter whole, a rank's part of them sharded (2 weight, 4 master, 8 states, 2 gradient)."""
    profile = a_profile([a_unit("u", 400, 100)])
    problem = problem_of(profile, a_cluster(), a_job(world_size=8))
    replicated, sharded = problem.prices[0]
    assert replicated.resident_bytes == 16 * (40_000 + 400)
    assert sharded.resident_bytes == 16 * (5_000 + 50)
    assert sharded.gathered_bytes == 2 * (40_000 + 400)
    assert replicated.gathered_bytes == replicated.gather_forward_ns == replicated.reduce_ns == 0


def test_a_frozen_unit_has_neither_gradients_nor_states() -> None:
    profile = a_profile([a_unit("u", 400, 100, trainable=False)])
    for p in problem_of(profile, a_cluster(), a_job()).prices[0]:
        assert p.gradient_bytes == p.state_bytes == p.update_ns == p.last_reduce_ns == p.reduce_ns == 0
        assert p.parameter_bytes > 0


def test_padding_to_the_degree_is_counted() -> None:
    profile = a_profile([a_unit("u", 1, 1)])
    sharded = problem_of(profile, a_cluster(), a_job(world_size=8)).prices[0][1]
    assert sharded.parameter_bytes == 2 * 2
    assert sharded.gathered_bytes == 2 * 8 * 2


def test_rules_pin_units() -> None:
    profile = a_profile([a_unit("a", 100), a_unit("b.fc", 100), a_unit("c", 100)])
    rules = [Rule(match="b.*", stage=Stage.FULLY_SHARDED), Rule(match="*.bias", stage=Stage.REPLICATED)]
    plan = make_plan(profile, a_cluster(), a_job(), 1 << 30, rules=rules)
    assert [unit.stage for unit in plan.units] == [0, 3, 0]
    plan = make_plan(profile, a_cluster(), a_job(), 1 << 30, stages=[Stage.FULLY_SHARDED], rules=rules)
    assert [unit.stage for unit in plan.units] == [0, 3, 0]


def test_a_rule_that_matches_nothing_is_an_error() -> None:
    profile = a_profile([a_unit("a", 100)])
    with pytest.raises(ConfigError, match=r"'decoder\.\*'.*'a\.weight'"):
        make_plan(profile, a_cluster(), a_job(), 1 << 30, rules=[Rule(match="decoder.*", stage=Stage.REPLICATED)])


def test_rules_that_pull_a_unit_apart_are_an_error() -> None:
    profile = a_profile([a_unit("a", 100)])
    rules = [Rule(match="*.bias", stage=Stage.REPLICATED), Rule(match="*.weight", stage=Stage.FULLY_SHARDED)]
    with pytest.raises(ConfigError, match=r"'a'.*bias.*weight"):
        make_plan(profile, a_cluster(), a_job(), 1 << 30, rules=rules)


def test_a_shadowed_rule_counts_as_matched() -> None:
    profile = a_profile([a_unit("a", 100)])
    rules = [Rule(match="a.*", stage=Stage.REPLICATED), Rule(match="*", stage=Stage.FULLY_SHARDED)]
    assert make_plan(profile, a_cluster(), a_job(), 1 << 30, rules=rules).units[0].stage is Stage.REPLICATED


def test_infeasible_says_what_would_do() -> None:
    profile = a_profile([a_unit("a", 100), a_unit("big", 4000)])
    with pytest.raises(InfeasiblePlanError, match="big") as caught:
        make_plan(profile, a_cluster(), a_job(), 1000)
    plan = make_plan(profile, a_cluster(), a_job(), caught.value.least_bytes)
    assert plan.peak_bytes == caught.value.least_bytes
    with pytest.raises(InfeasiblePlanError):
        make_plan(profile, a_cluster(), a_job(), caught.value.least_bytes - 1)


def test_a_profile_of_another_micro_batch_is_refused() -> None:
    with pytest.raises(PlanMismatchError, match="micro-batch 2"):
        make_plan(a_profile([a_unit("a", 10)], micro_batch=2), a_cluster(), a_job(), 1 << 30)


def test_the_same_input_gives_the_same_plan() -> None:
    profile = a_profile([a_unit(f"u{i}", 100) for i in range(12)])
    problem = problem_of(profile, a_cluster(), a_job())
    budget = (evaluate(problem, [0] * 12).peak_bytes + evaluate(problem, [1] * 12).peak_bytes) // 2
    hashes = {make_plan(profile, a_cluster(), a_job(), budget).plan_hash for _ in range(3)}
    assert len(hashes) == 1


def test_a_time_limit_gives_an_honest_gap() -> None:
    profile = a_profile([a_unit(f"u{i}", 50 + 7 * i) for i in range(60)])
    job, cluster = a_job(accumulation=4), a_cluster()
    problem = problem_of(profile, cluster, job)
    budget = (evaluate(problem, [0] * 60).peak_bytes + evaluate(problem, [1] * 60).peak_bytes) // 2
    plan = make_plan(profile, cluster, job, budget, solver=SolverConfig(time_limit_s=0.5))
    assert plan.gap == pytest.approx((plan.step_seconds - plan.bound_seconds) / plan.step_seconds, abs=1e-5)
    assert plan.peak_bytes <= budget
