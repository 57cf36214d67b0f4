"""The plan is the best one: against brute force, against an independent replay, and by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import prod
from time import monotonic
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from problems import a_cluster, a_job, a_profile, a_unit, clusters, jobs, profiles, spaces
from replay import replay_step_ns

from ds_osdp import counting
from ds_osdp.cluster import Cluster
from ds_osdp.config import Rule, SolverConfig
from ds_osdp.errors import ConfigError, InfeasiblePlanError, PlanMismatchError
from ds_osdp.explain import explain
from ds_osdp.job import Job
from ds_osdp.plan import CommunicationSizes, Plan, Stage
from ds_osdp.planner import best_micro_batch, make_plan
from ds_osdp.prices import Option, Space, price, work_seconds
from ds_osdp.profile import ModelProfile, ParameterProfile, UnitProfile, Work
from ds_osdp.remedies import with_micro_batch
from ds_osdp.solve import _by_kinds, _Search, _unit_by_unit
from ds_osdp.step import Instance, evaluate, priced, timeline

BOTH = Space((Stage.REPLICATED, Stage.FULLY_SHARDED))
MANY = settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
SOME = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def problem_of(profile: ModelProfile, cluster: Cluster, job: Job, space: Space = BOTH) -> Instance:
    return priced(profile, cluster, job, space)


def every_choice(problem: Instance) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(len(problem.options(u))) for u in range(len(problem.units))))


@MANY
@given(profiles(), clusters, jobs, spaces, st.floats(-0.05, 1.05))
def test_equals_brute_force(profile: ModelProfile, cluster: Cluster, job: Job, space: Space, share: float) -> None:
    problem = problem_of(profile, cluster, job, space)
    assume(prod(len(problem.options(u)) for u in range(len(problem.units))) <= 3_000)
    everything = [evaluate(problem, choice) for choice in every_choice(problem)]
    least = min(totals.peak_bytes for totals in everything)
    most = max(totals.peak_bytes for totals in everything)
    budget = max(1, int(least + share * (most - least + 1)))
    fitting = [totals.step_ns for totals in everything if totals.peak_bytes <= budget]
    if not fitting:
        with pytest.raises(InfeasiblePlanError) as caught:
            make_plan(profile, cluster, job, budget, space=space)
        # HiGHS minimises MiB to 1e-6: a byte.
        assert abs(caught.value.least_bytes - least) <= 2
        return
    plan = make_plan(profile, cluster, job, budget, space=space)
    assert plan.peak_bytes <= budget
    # The model is in microseconds: its rounding is half a nanosecond a price.
    assert plan.step_seconds * 1e9 <= min(fitting) + 2
    assert plan.gap == 0
    assert plan.bound_seconds <= plan.step_seconds


@SOME
@given(profiles(most_units=9), clusters, jobs, spaces, st.data())
def test_the_price_of_a_plan_is_its_replay(
    profile: ModelProfile, cluster: Cluster, job: Job, space: Space, data: st.DataObject
) -> None:
    problem = problem_of(profile, cluster, job, space)
    choice = [data.draw(st.integers(0, len(problem.options(u)) - 1)) for u in range(len(problem.units))]
    assert evaluate(problem, choice).step_ns == replay_step_ns(problem, choice)


@SOME
@given(profiles(most_units=9), clusters, jobs, st.floats(0.0, 1.0))
def test_counting_kinds_never_promises_too_much(profile: ModelProfile, cluster: Cluster, job: Job, share: float) -> None:
    """Its bound is below the true optimum, and what it spreads over the units fits."""
    problem = problem_of(profile, cluster, job, Space(tuple(Stage)))
    extremes = [evaluate(problem, [i] * len(profile.units)).peak_bytes for i in (0, 3)]
    budget = int(min(extremes) + share * abs(extremes[0] - extremes[1]))
    deadline = monotonic() + 60
    exact = _unit_by_unit(problem, budget, deadline, 0.0)
    counts = _Search(counting.relaxed(problem, budget), "y")
    relaxation = counts.run(deadline, 0.0)
    if relaxation is None:
        assert exact is None
        return
    counted = _by_kinds(problem, budget, counts, relaxation, deadline, 0.0)
    if exact is None:
        assert counted is None
    elif counted is not None:
        optimum = evaluate(problem, exact.choice).step_ns
        assert counted.bound_ns <= optimum + 2
        totals = evaluate(problem, counted.choice)
        assert totals.peak_bytes <= budget
        assert totals.step_ns >= optimum - 2


@SOME
@given(profiles(), clusters, jobs)
def test_no_stock_configuration_is_better(profile: ModelProfile, cluster: Cluster, job: Job) -> None:
    """ZeRO-1, 2, 3 and DDP are one stage for all units: points of the space."""
    space = Space(tuple(Stage))
    problem = problem_of(profile, cluster, job, space)
    for option in range(4):
        stock = evaluate(problem, [option] * len(profile.units))
        plan = make_plan(profile, cluster, job, stock.peak_bytes, space=space)
        assert plan.step_seconds * 1e9 <= stock.step_ns + 2


def test_a_hidden_gather_costs_nothing() -> None:
    """Compute dwarfs communication: sharding all but the first unit is as fast, so nothing is worth memory."""
    profile = a_profile([a_unit(f"u{i}", 100, tokens=100_000) for i in range(6)])
    problem = problem_of(profile, a_cluster(latency=0.0, bandwidth=1e12), a_job())
    sharded, replicated = (evaluate(problem, [i] * 6) for i in (1, 0))
    first_only = evaluate(problem, [0, 1, 1, 1, 1, 1])
    assert first_only.step_ns - replicated.step_ns < 0.02 * replicated.step_ns
    assert sharded.peak_bytes < replicated.peak_bytes


def test_a_gather_behind_the_update_hides_behind_the_next_forward() -> None:
    profile = a_profile([a_unit(f"u{i}", 100, tokens=100_000) for i in range(6)])
    problem = problem_of(profile, a_cluster(latency=0.0, bandwidth=1e12), a_job(), Space(tuple(Stage)))
    replicated, spread = (evaluate(problem, [i] * 6).step_ns for i in (0, 1))
    assert problem.prices(0)[1].gather_first_ns > 0
    # The first unit's is not hidden; and a rank updates a quarter of what it would.
    assert spread - replicated < 2 * problem.prices(0)[1].gather_first_ns


def test_nothing_is_sent_while_deepspeed_waits() -> None:
    """A reduction that is waited for is on the channel: the gathers of backward cannot hide behind it."""
    profile = a_profile([a_unit(f"u{i}", 100, tokens=1) for i in range(6)])
    waits, beside = (problem_of(profile, a_cluster(blocks=blocks), a_job()) for blocks in (True, False))
    sent = sum(p.gather_backward_ns + p.waited_ns for p in waits.chosen([1] * 6))
    forward = sum(p.gather_forward_ns for p in waits.chosen([1] * 6))
    assert evaluate(waits, [1] * 6).step_ns >= forward + sent
    assert evaluate(waits, [1] * 6).step_ns >= evaluate(beside, [1] * 6).step_ns


def test_what_runs_beside_computation_holds_it_up() -> None:
    profile = a_profile([a_unit(f"u{i}", 100, tokens=100_000) for i in range(6)])
    free, held = (problem_of(profile, a_cluster(share=share), a_job()) for share in (0.0, 0.5))
    for choice in ([0] * 6, [1] * 6):
        assert evaluate(held, choice).step_ns > evaluate(free, choice).step_ns
    sent = free.prices(0)[1].gather_forward_ns
    assert held.prices(0)[1].forward_ns - free.prices(0)[1].forward_ns == pytest.approx(0.5 * sent, abs=2)


def test_torchs_optimizer_moves_more_bytes_than_a_fused_one() -> None:
    profile = a_profile([a_unit("u", 400, 100)])
    fused, unfused = (problem_of(profile, a_cluster(), a_job(optimizer_temporaries=n)).prices(0)[0] for n in (0, 2))
    # bf16: 42 bytes around the optimizer, and 28 or 80 in it.
    assert unfused.update_ns / fused.update_ns == pytest.approx((42 + 80) / (42 + 28), rel=1e-3)


def test_accumulation_makes_replicating_worth_more() -> None:
    profile = a_profile([a_unit(f"u{i}", 300) for i in range(4)])
    gain = {}
    for accumulation in (1, 4):
        problem = problem_of(profile, a_cluster(), a_job(accumulation=accumulation))
        sharded, replicated = (evaluate(problem, [i] * 4).step_ns for i in (1, 0))
        gain[accumulation] = sharded / replicated
    assert gain[4] > gain[1] > 1


def test_resident_bytes_follow_the_table_of_stages() -> None:
    """bf16 with AdamW: 16 bytes a parameter whole (2 weight, 4 master, 8 states, 2 gradient), a rank's part of them sharded."""
    profile = a_profile([a_unit("u", 400, 100)])
    problem = problem_of(profile, a_cluster(), a_job(world_size=8), Space(tuple(Stage)))
    elements = 40_000 + 400
    assert [p.resident_bytes for p in problem.prices(0)] == [
        16 * elements,
        (16 // 8 + 2 + 2) * elements,
        (16 // 8 + 2) * elements,
        2 * elements,
    ]
    assert [p.gathered_bytes for p in problem.prices(0)] == [0, 0, 0, 2 * elements]
    assert [bool(p.gather_forward_ns) for p in problem.prices(0)] == [False, False, False, True]
    assert [bool(p.gather_first_ns) for p in problem.prices(0)] == [False, True, True, True]
    assert [bool(p.reduce_ns) for p in problem.prices(0)] == [False, False, True, True]
    assert all(p.last_reduce_ns for p in problem.prices(0))


def test_a_frozen_unit_has_neither_gradients_nor_states() -> None:
    profile = a_profile([a_unit("u", 400, 100, trainable=False)])
    for p in problem_of(profile, a_cluster(), a_job()).prices(0):
        assert p.gradient_bytes == p.state_bytes == p.update_ns == p.last_reduce_ns == p.reduce_ns == 0
        assert p.parameter_bytes > 0


def test_padding_to_the_degree_is_counted() -> None:
    profile = a_profile([a_unit("u", 1, 1)])
    sharded = problem_of(profile, a_cluster(), a_job(world_size=8)).prices(0)[1]
    assert sharded.parameter_bytes == 2 * 2
    assert sharded.gathered_bytes == 2 * 8 * 2


def test_splits_only_what_lowers_the_peak_and_fills_the_budget_with_whole_slices() -> None:
    profile = a_profile([a_unit("small", 200, split_rows=200), a_unit("head", 5000, split_rows=5000, tokens=1)])
    cluster, job = a_cluster(), a_job(world_size=8, accumulation=4, optimizer_states=0)
    whole, in_slices = BOTH, replace(BOTH, max_slices=8)
    least = {}
    for space in (whole, in_slices):
        with pytest.raises(InfeasiblePlanError) as caught:
            make_plan(profile, cluster, job, 1, space=space)
        least[space] = caught.value.least_bytes
    assert least[in_slices] < 0.6 * least[whole]
    plenty = make_plan(profile, cluster, job, 1 << 33, space=in_slices)
    assert all(unit.slices == 1 for unit in plenty.units)
    scarce = make_plan(profile, cluster, job, least[whole] - 1, space=in_slices)
    assert [unit.slices > 1 for unit in scarce.units] == [False, True]
    budget = 2 * least[whole]
    between = {space: make_plan(profile, cluster, job, budget, space=space) for space in (whole, in_slices)}
    assert between[in_slices].units[1].whole_slices > 0
    assert between[in_slices].step_seconds < 0.9 * between[whole].step_seconds
    rules = [Rule(match="*", stage=Stage.FULLY_SHARDED)]
    pinned = make_plan(profile, cluster, job, 1 << 33, space=in_slices, rules=rules)
    assert all(unit.slices == 1 for unit in pinned.units)


def test_slices_add_up_to_their_unit() -> None:
    """What is held between steps is that of the whole, and padding; what is gathered at once is the largest slice."""
    unit = a_unit("u", 1001, split_rows=1001)
    job, cluster = a_job(world_size=4), a_cluster()
    whole = price(unit, Option(Stage.FULLY_SHARDED, 4), job, cluster, gathered_again=True)
    for k in (2, 3, 7):
        split = price(unit, Option(Stage.FULLY_SHARDED, 4, k), job, cluster, gathered_again=True)
        assert whole.resident_bytes <= split.resident_bytes <= whole.resident_bytes + 16 * k
        assert split.gathered_bytes == pytest.approx(2 * (100 * -(-1001 // k) + 1001), abs=16)
        assert split.forward_ns > whole.forward_ns + whole.gather_forward_ns
        assert split.backward_bytes < whole.backward_bytes
    mixed = price(unit, Option(Stage.FULLY_SHARDED, 4, 7, 3), job, cluster, gathered_again=True)
    assert split.resident_bytes < mixed.resident_bytes < 16 * unit.numel
    assert mixed.forward_ns < split.forward_ns


def test_what_is_viewed_stays_beside_what_is_gathered_again() -> None:
    whole = a_unit("experts", 400)
    viewed = whole.model_copy(update={"viewed_bytes": 2 * 400 * 100})
    rest = [a_unit(f"l{i}", 40) for i in range(3)]
    job, space = a_job(world_size=4), Space((Stage.GRADIENTS, Stage.FULLY_SHARDED))
    for stage, freed in ((0, 0), (1, viewed.viewed_bytes)):
        with_views, without = (
            timeline(priced(a_profile([unit, *rest]), a_cluster(), job, space), [stage] * 4) for unit in (viewed, whole)
        )
        # From the forward of the next unit to its own backward.
        for a, b in zip(with_views[1:8], without[1:8], strict=True):
            assert a.bytes["gathered"] - b.bytes["gathered"] == freed, a.name


def test_slices_of_fused_experts_keep_nothing_and_run_again() -> None:
    weights = tuple(
        ParameterProfile(name=f"experts.{name}", shape=shape, dtype="bfloat16", trainable=True, split_rows=8)
        for name, shape in {"gate_up_proj": (8, 60, 20), "down_proj": (8, 20, 30)}.items()
    )
    unit = UnitProfile(
        name="experts", parameters=weights, forward=Work(flops=10**9), backward=Work(flops=2 * 10**9),
        activation_bytes=4000, transient_bytes=500, backward_transient_bytes=90_000,
    )  # fmt: skip
    job, cluster = a_job(world_size=4), a_cluster()
    whole = price(unit, Option(Stage.FULLY_SHARDED, 4), job, cluster, gathered_again=True)
    split = price(unit, Option(Stage.FULLY_SHARDED, 4, 4), job, cluster, gathered_again=True)
    assert split.resident_bytes == whole.resident_bytes
    assert 4 * split.gathered_bytes == whole.gathered_bytes
    assert (whole.activation_bytes, split.activation_bytes) == (4000, 0)
    # Beside the gradients of a slice, where the trace has seen the largest of the whole, all that a forward keeps.
    assert split.backward_bytes == 90_000 - 2 * (weights[0].numel - unit.numel // 4) + 4000
    once_again = work_seconds(unit.forward, cluster.device) * 1e9
    assert split.backward_ns > whole.backward_ns + whole.gather_backward_ns + 0.99 * once_again


def test_rules_pin_units() -> None:
    profile = a_profile([a_unit("a", 100), a_unit("b.fc", 100), a_unit("c", 100)])
    rules = [Rule(match="b.*", stage=Stage.FULLY_SHARDED), Rule(match="*.bias", stage=Stage.REPLICATED)]
    plan = make_plan(profile, a_cluster(), a_job(), 1 << 30, space=BOTH, rules=rules)
    assert [unit.stage for unit in plan.units] == [0, 3, 0]
    plan = make_plan(profile, a_cluster(), a_job(), 1 << 30, space=Space((Stage.FULLY_SHARDED,)), rules=rules)
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


def test_several_micro_batches_are_compared_by_samples_per_second() -> None:
    """With memory for it a large micro-batch gathers less often; without, a small one must do."""
    job = a_job(world_size=4, max_reuse_distance=0)
    profiles = {b: with_micro_batch(a_profile([a_unit(f"u{i}", 200, tokens=4000) for i in range(4)]), b) for b in (1, 2, 4, 8)}
    whole, cluster = job.model_copy(update={"accumulation": 8}), a_cluster()

    def best(budget: int, candidates: Sequence[int] = (1, 2, 4, 8), **more: Any) -> Plan:
        return best_micro_batch(candidates, lambda job: profiles[job.micro_batch], cluster, whole, budget, **more)

    plenty = best(1 << 33, space=Space((Stage.FULLY_SHARDED,)))
    assert (plenty.micro_batch, plenty.accumulation) == (8, 1)
    single = {b: make_plan(p, cluster, a_job(micro_batch=b), 1 << 33) for b, p in profiles.items()}
    scarce = best(single[2].peak_bytes)
    assert scarce.micro_batch <= 2
    assert scarce.peak_bytes <= single[2].peak_bytes
    assert best(1 << 33, (3, 4, 5)).micro_batch == 4, "what does not divide the global batch is left out"
    with pytest.raises(ConfigError, match="32 is no multiple of 4 ranks"):
        best(1 << 33, (3, 5))
    with pytest.raises(InfeasiblePlanError):
        best(1000)


def test_sizes_that_the_user_leaves_open_come_with_the_plan() -> None:
    profile = a_profile([a_unit(f"u{i}", 400) for i in range(6)])
    cluster = a_cluster(latency=1e-6, bandwidth=1e8)
    defaults = {"reduce_bucket_size": 500_000_000, "prefetch_bucket_size": 50_000_000, "max_reuse_distance": 10**9}
    given = a_job(**defaults)
    left = a_job(**defaults, open_sizes=tuple(CommunicationSizes.model_fields))
    sharded = Space((Stage.FULLY_SHARDED,))

    def sized(budget: int, job: Job = left) -> Plan:
        return make_plan(profile, cluster, job, budget, space=sharded)

    kept = sized(1 << 40, given)
    assert kept.sizes == given.sizes, "what is given is not touched"
    plenty = sized(1 << 30)
    assert plenty.sizes.reduce_bucket_size * 2 == 1 << 20
    assert plenty.sizes.prefetch_bucket_size == profile.units[0].numel
    assert plenty.sizes.max_reuse_distance > 0, "with the memory for it, what was gathered stays"
    least = least_bytes(sized)
    assert sized(least).sizes.max_reuse_distance == 0
    assert sized(least).step_seconds > plenty.step_seconds
    assert least < plenty.peak_bytes < kept.peak_bytes
    half = left.model_copy(update={"open_sizes": ("reduce_bucket_size",)})
    assert sized(1 << 40, half).sizes.prefetch_bucket_size == given.prefetch_bucket_size


def least_bytes(plan: Callable[[int], Plan]) -> int:
    with pytest.raises(InfeasiblePlanError) as caught:
        plan(1)
    return caught.value.least_bytes


def test_remedies_really_fit() -> None:
    profile = with_micro_batch(a_profile([a_unit(f"u{i}", 300, 300, tokens=2000) for i in range(4)]), 8)
    job = a_job(micro_batch=8, world_size=4)
    with pytest.raises(InfeasiblePlanError) as caught:
        make_plan(profile, a_cluster(), job, 1)
    least = caught.value.least_bytes
    with pytest.raises(InfeasiblePlanError, match="train_micro_batch_size_per_gpu to 4") as caught:
        make_plan(profile, a_cluster(), job, int(0.7 * least))
    assert caught.value.remedies
    smaller = job.model_copy(update={"micro_batch": 4})
    make_plan(with_micro_batch(profile, 4), a_cluster(), smaller, int(0.7 * least))


def test_an_explanation_adds_up() -> None:
    profile = a_profile([a_unit(f"u{i}", 100 + 40 * (i % 3)) for i in range(9)])
    job, cluster = a_job(accumulation=2), a_cluster()
    problem = problem_of(profile, cluster, job)
    low, high = (evaluate(problem, [i] * 9).peak_bytes for i in (1, 0))
    rules = [Rule(match="u0.*", stage=Stage.FULLY_SHARDED)]
    plan = make_plan(profile, cluster, job, (low + high) // 2, space=BOTH, rules=rules)
    reasons = explain(plan, profile, cluster, job, space=BOTH, rules=rules)
    moments = {moment.name: moment.total_bytes for moment in reasons.timeline}
    assert moments[reasons.binding_moment] == plan.peak_bytes == max(moments.values())
    assert reasons.slack_bytes == plan.budget_bytes - plan.peak_bytes >= 0
    assert [unit.name for unit in reasons.units] == [unit.name for unit in plan.units]
    assert all((unit.bytes_spent > 0) == (unit.stage is Stage.REPLICATED) for unit in reasons.units)
    assert all(unit.seconds_per_gib > 0 for unit in reasons.units if unit.stage is Stage.REPLICATED)
    seconds = [point.step_seconds for point in reasons.curve if point.step_seconds is not None]
    assert seconds == sorted(seconds, reverse=True)
    assert reasons.more.step_seconds <= plan.step_seconds
    assert reasons.less.step_seconds is None
    assert reasons.rules[0].seconds >= 0
    names = {point.name: point for point in reasons.stock}
    assert set(names) == {"DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "ZeRO-3, best threshold"}
    for point in reasons.stock:
        if point.fits and point.name != "ZeRO-3, best threshold":
            best = make_plan(profile, cluster, job, plan.budget_bytes, space=Space(tuple(Stage)))
            assert best.step_seconds <= point.step_seconds + 1e-9


def test_a_thousand_layers_are_planned_by_kinds() -> None:
    profile = a_profile([a_unit(f"h.{i // 2}.{'ab'[i % 2]}", 100 + 100 * (i % 2)) for i in range(2000)])
    job, cluster = a_job(accumulation=4, prefetch_bucket_size=200_000), a_cluster()
    problem = problem_of(profile, cluster, job)
    assert len(problem.kinds) <= 4
    low, high = (evaluate(problem, [i] * 2000).peak_bytes for i in (1, 0))
    plan = make_plan(profile, cluster, job, (low + high) // 2)
    assert plan.peak_bytes <= plan.budget_bytes
    assert plan.gap < 0.005


@pytest.mark.parametrize("units", [7, 8, 9, 12])
def test_a_middle_of_one_kind_is_not_taken_for_one_unit(units: int) -> None:
    """Gathers of some of its units hide behind the computation of others: the bound must allow for it."""
    profile = a_profile([a_unit(f"u{i}", 363) for i in range(units)])
    for bandwidth in (1e8, 1e9, 1e10, 1e11):
        problem = problem_of(profile, a_cluster(latency=1e-6, bandwidth=bandwidth), a_job(world_size=8))
        low, high = (evaluate(problem, [i] * units).peak_bytes for i in (1, 0))
        for budget in (low, (low + high) // 2, high):
            deadline = monotonic() + 60
            exact = _unit_by_unit(problem, budget, deadline, 0.0)
            relaxation = _Search(counting.relaxed(problem, budget), "y").run(deadline, 0.0)
            assert exact is not None
            assert relaxation is not None
            assert relaxation.bound * 1e3 <= evaluate(problem, exact.choice).step_ns + 2
