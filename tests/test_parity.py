"""The same losses, gradient norms and parameters as stock ZeRO-3, whatever is replicated and however one trains."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import BUCKET_BYTES, Case
from launch import on_ranks
from problems import a_job

from ds_osdp.cluster import Cluster, Collectives, Device, Link
from ds_osdp.plan import Stage
from ds_osdp.prices import Option, price
from ds_osdp.profile import ParameterProfile, UnitProfile

pytestmark = pytest.mark.ranks

PLANNED = ("none", "some", "all")
"""Plans the planner makes, so that what it predicts is compared too."""
EVERY = (*PLANNED, "two", "one", "mixed")
TELLING = ("some", "mixed")
"""What the long list of cases is trained with."""
ON_NODES = ("node", "everything")
"""Plans for two nodes of two ranks."""
FP32_RELATIVE = 1e-6
# bf16 rounds to 8 bits of mantissa: one unit in the last place is 2**-8 relative.
BF16_ULP = 2**-8

CASES: dict[str, dict[str, Any]] = {
    "accumulation 1": {},
    "accumulation 4": {"accumulation": 4},
    "bf16": {"bf16": True},
    "bf16, accumulation 4": {"bf16": True, "accumulation": 4, "steps": 5},
    "bf16, fp32 gradients": {
        "bf16": True,
        "accumulation": 2,
        "steps": 5,
        "config": {"data_types": {"grad_accum_dtype": "fp32"}},
    },
    "zero.Init, another seed on each rank": {"zero_init": True, "seed_by_rank": True},
    "another seed on each rank": {"seed_by_rank": True, "steps": 5},
    "tied embeddings": {"model": {"tied": True}, "steps": 5},
    "tied across a checkpoint": {"model": {"tied": True, "checkpoint": "reentrant"}, "steps": 5},
    "tied across a checkpoint, one bucket": {
        "model": {"tied": True, "checkpoint": "reentrant"},
        "zero": {"reduce_bucket_size": 10**6},
        "steps": 5,
    },
    "frozen layers": {"frozen": "h.1.", "steps": 5},
    "frozen, zero.Init": {"frozen": "fc1", "zero_init": True, "steps": 5},
    "parameter groups": {"groups": True, "accumulation": 2, "steps": 5},
    "small sub-groups": {"zero": {"sub_group_size": 3000}, "steps": 5},
    "prefetch": {"zero": {"stage3_prefetch_bucket_size": 30_000, "stage3_max_reuse_distance": 10**6}, "steps": 5},
    "no overlap, not contiguous": {"zero": {"overlap_comm": False, "contiguous_gradients": False}, "steps": 5},
    "checkpointing, reentrant": {"model": {"checkpoint": "reentrant"}, "steps": 5},
    "checkpointing, not reentrant": {"model": {"checkpoint": "plain"}, "accumulation": 2, "steps": 5},
    "evaluation between steps": {"drive": "evaluating", "accumulation": 2, "steps": 6},
    "unmanaged accumulation": {
        "drive": "unmanaged",
        "accumulation": 3,
        "steps": 5,
        "config": {"managed_gradient_accumulation": False},
    },
    "user-set boundary": {"drive": "boundary", "accumulation": 3, "steps": 5},
    "coalesced reduction": {
        "drive": "coalesced",
        "accumulation": 3,
        "steps": 5,
        "config": {"gradient_accumulation_steps": 1},
    },
    "used outside its module": {"model": {"outside": True}, "steps": 5},
    "dynamic control flow, unused parameters": {"model": {"skips": True}, "steps": 7},
    "dynamic control flow, accumulation 2": {"model": {"skips": True}, "accumulation": 2, "steps": 5},
    "interrupted": {"drive": "interrupting", "accumulation": 2, "steps": 6},
    "an infinite gradient on one rank": {"drive": "overflowing", "steps": 5},
    "several forwards before a backward": {"drive": "several_forwards", "steps": 5},
    "the user's forward fails, and the backward": {"drive": "failing", "steps": 6},
    "offload_states and reload_states": {"drive": "offloading", "steps": 5},
    "register_external_parameter": {"model": {"external": True}, "steps": 5},
    "torch.compile": {"drive": "compiled", "model": {"layers": 1}, "steps": 4},
    "LoRA": {"build": "lora", "steps": 5},
    "mixture of experts, leaf modules": {"build": "mixtral", "steps": 5},
    "a user's optimizer": {"lion": True, "steps": 5, "config": {"zero_allow_untested_optimizer": True}},
    "learning-rate schedule": {
        "steps": 5,
        "config": {
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 2, "warmup_type": "linear", "total_num_steps": 8},
            }
        },
    },
    "SGD with momentum": {
        "steps": 5,
        "config": {
            "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}},
            "zero_allow_untested_optimizer": True,
        },
    },
}
BASIC = ("accumulation 1", "accumulation 4", "bf16", "bf16, accumulation 4", "zero.Init, another seed on each rank")
NODE_CASES = (
    *BASIC[2:],
    "bf16, fp32 gradients",
    "unmanaged accumulation",
    "interrupted",
    "checkpointing, reentrant",
    "parameter groups",
)
ONLY = {
    "LoRA": ("adapters",),
    "mixture of experts, leaf modules": ("experts",),
    "torch.compile": ("mixed",),
    "the user's forward fails, and the backward": ("mixed", "one"),
    "register_external_parameter": ("mixed", "one"),
    **dict.fromkeys(("tied across a checkpoint", "tied across a checkpoint, one bucket"), ()),
    **dict.fromkeys(
        (
            "several forwards before a backward",
            "offload_states and reload_states",
            "a user's optimizer",
            "learning-rate schedule",
        ),
        ("mixed",),
    ),
}
"""Cases for which fewer plans tell enough, or others."""
ROWS = [(2, name, plan) for name in CASES for plan in (EVERY if name in BASIC else ONLY.get(name, TELLING))]
ROWS += [(2, name, plan) for name in ("bf16, fp32 gradients", "frozen layers") for plan in ("none", "all")]
ROWS += [(2, "frozen layers", "two"), (2, "used outside its module", "one"), (2, "used outside its module", "two")]
ROWS += [(4, name, plan) for name in BASIC[:2] for plan in (*PLANNED, "mixed", *ON_NODES)]
ROWS += [(4, name, "everything") for name in NODE_CASES]


SLOW = ("torch.compile", "LoRA", "mixture of experts, leaf modules")
"""Cases that compile, or import Hugging Face's libraries."""


def is_slow(world_size: int, name: str) -> bool:
    return world_size == 4 or name in SLOW


PARAMETERS = [pytest.param(*row, marks=pytest.mark.slow if is_slow(*row[:2]) else ()) for row in ROWS]


def case(name: str, world_size: int) -> Case:
    chosen = Case(name=name, **CASES[name])
    return chosen if world_size == 2 or name in BASIC[:2] else replace(chosen, steps=4)


BETTER = [(2, "tied across a checkpoint", plan) for plan in EVERY]
BETTER += [(2, "tied across a checkpoint, one bucket", plan) for plan in ("two", "mixed")]
"""Where stock ZeRO-3 is wrong, and a plan is not."""


@functools.cache
def outcome(world_size: int, slow: bool) -> dict[tuple[str, str], dict[str, Any]] | AssertionError:
    # One launch for all rows, and an error kept: importing DeepSpeed on every rank is most of the time.
    compared, better = (
        [(name, plan) for ranks, name, plan in some if ranks == world_size and is_slow(ranks, name) == slow]
        for some in (ROWS, BETTER)
    )
    stock = [(name, "stock") for name in dict.fromkeys(name for name, _ in compared)]
    rows = compared + better
    try:
        return on_ranks(
            world_size, "training:train_all", [(case(n, world_size), plan) for n, plan in stock + rows], timeout=600
        )
    except AssertionError as error:
        return error


def results(world_size: int, case: str = "") -> dict[tuple[str, str], dict[str, Any]]:
    found = outcome(world_size, is_slow(world_size, case))
    if isinstance(found, AssertionError):
        raise found
    return found


@pytest.mark.timeout(700)
@pytest.mark.parametrize(("world_size", "case", "plan"), PARAMETERS)
def test_trains_as_stock_zero3(world_size: int, case: str, plan: str) -> None:
    found = results(world_size, case)
    stock, planned = found[case, "stock"], found[case, plan]
    assert stock["losses"][-1] < stock["losses"][0] - 0.1, "the model does not learn: nothing is compared"
    if plan in ("none", "two"):
        assert planned["losses"] == stock["losses"]
        assert planned["norms"] == stock["norms"]
        assert all(torch.equal(planned["parameters"][n], p) for n, p in stock["parameters"].items())
        return
    assert_equal(planned, stock, 2 * BF16_ULP if CASES[case].get("bf16") else FP32_RELATIVE)


def assert_equal(planned: dict[str, Any], stock: dict[str, Any], relative: float) -> None:
    assert planned["losses"] == pytest.approx(stock["losses"], rel=relative)
    assert planned["norms"] == pytest.approx(stock["norms"], rel=relative)
    for name, parameter in stock["parameters"].items():
        difference = (planned["parameters"][name] - parameter).norm() / parameter.norm().clamp(min=1.0)
        assert difference <= relative, name


@pytest.mark.timeout(700)
@pytest.mark.parametrize(("case", "plan"), [(case, plan) for _, case, plan in BETTER])
def test_two_gradients_of_one_parameter_in_one_backward_are_both_reduced(case: str, plan: str) -> None:
    found = results(2)
    assert_equal(found[case, plan], found["tied embeddings", "stock"], FP32_RELATIVE)


@pytest.mark.timeout(700)
@pytest.mark.parametrize(("world_size", "case", "plan"), PARAMETERS)
def test_partitions_what_the_plan_says(world_size: int, case: str, plan: str) -> None:
    planned = results(world_size, case)[case, plan]
    for name, (held, whole, ranks) in planned["held"].items():
        assert ranks == planned["degrees"][name], name
        assert held == -(-whole // ranks), name
    stages = {
        "none": {3}, "some": {0, 3}, "all": {0}, "two": {2}, "one": {1}, "node": {3}, "mixed": {0, 1, 2, 3},
        "everything": {0, 1, 2, 3}, "adapters": {0, 2, 3}, "experts": {0, 1, 2, 3},
    }  # fmt: skip
    assert set(planned["stages"].values()) == stages[plan]


def elements(row: dict[str, Any], *stages: int) -> int:
    """Of the parameters of these stages, with DeepSpeed's padding."""
    padded = {name: held * ranks for name, (held, _, ranks) in row["held"].items()}
    return sum(padded[name] for name, stage in row["stages"].items() if stage in stages)


@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    ("world_size", "accumulation"), [(2, 1), (2, 4), *(pytest.param(4, n, marks=pytest.mark.slow) for n in (1, 4))]
)
def test_each_stage_sends_what_it_says(world_size: int, accumulation: int) -> None:
    found = results(world_size)
    case = f"accumulation {accumulation}"
    row, stock = found[case, "mixed"], found[case, "stock"]["collectives"]
    # From the first step on, though DeepSpeed knows the order of modules only after the second.
    for step, sent in enumerate(row["collectives"]):
        assert sent.get("all_reduce elements", 0) == elements(row, 0)
        scattered = elements(row, 1) + accumulation * elements(row, 2, 3)
        assert sent["reduce_scatter_tensor elements"] == scattered
        # Without a prefetch nothing is gathered but what is used, twice in each micro-step, and what is kept, once.
        share = elements(row, 3) / elements(row, 0, 1, 2, 3)
        gathered = stock[step]["all_gather_into_tensor elements"]
        assert sent["all_gather_into_tensor elements"] == pytest.approx(share * gathered + elements(row, 1, 2), rel=0.02)


@pytest.mark.timeout(700)
@pytest.mark.parametrize("accumulation", [1, 4])
def test_what_is_whole_travels_in_few_collectives(accumulation: int) -> None:
    found = results(2)
    case = f"accumulation {accumulation}"
    buckets = -(-elements(found[case, "one"], 1) * 4 // BUCKET_BYTES)
    for plan, operations in {
        "all": {"all_reduce": 1},
        "one": {"reduce_scatter_tensor": buckets, "all_gather_into_tensor": buckets},
        "two": {"all_gather_into_tensor": buckets},
    }.items():
        row = found[case, plan]
        for sent in row["collectives"]:
            for operation, least in operations.items():
                assert least <= sent[operation] <= least + 2, (plan, operation)
            others = {"all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor"} - operations.keys()
            if plan == "two":
                others.discard("reduce_scatter_tensor")
            assert not any(sent.get(operation) for operation in others), plan
    assert found[case, "none"]["collectives"] == found[case, "stock"]["collectives"]


def priced_bytes(row: dict[str, Any], operation: str, option: Option, world_size: int, accumulation: int) -> float:
    """What one rank sends in ``operation`` during a step, by the prices: seconds where only that takes time, a byte each."""
    speed = {name: 1.0 if name == operation else 1e30 for name in COLLECTIVES}
    links = Collectives(**{name: Link(latency_seconds=0, bytes_per_second=speed[name]) for name in speed})
    device = Device(flops_per_second=1e30, bytes_per_second=1e30)
    cluster = Cluster(name="counts bytes", ranks_per_node=option.degree, device=device, world=links)
    fp32 = dict.fromkeys(("parameter_dtype", "gradient_dtype", "communication_dtype"), "float32")
    job = a_job(world_size=world_size, accumulation=accumulation, **fp32)
    total = 0
    for name, (_, numel, _) in row["held"].items():
        parameter = ParameterProfile(name=name, shape=(numel,), dtype="float32", trainable=True)
        paid = price(UnitProfile(name=name, parameters=(parameter,)), option, job, cluster, gathered_again=True)
        total += paid.gather_first_ns + (accumulation - 1) * paid.gather_forward_ns + accumulation * paid.gather_backward_ns
        total += (accumulation - 1) * paid.reduce_ns + paid.last_reduce_ns
    return total / 1e9


COLLECTIVES = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor", "all_reduce": "all_reduce"}
UNIFORM = {"none": Option(Stage(3), 2), "two": Option(Stage(2), 2), "one": Option(Stage(1), 2), "all": Option(Stage(0), 1)}


@pytest.mark.timeout(700)
@pytest.mark.parametrize("operation", COLLECTIVES)
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize(
    ("world_size", "plan", "option"),
    [*((2, *item) for item in UNIFORM.items()), pytest.param(4, "node", Option(Stage(3), 2), marks=pytest.mark.slow)],
)
def test_sends_the_bytes_that_are_priced(world_size: int, plan: str, option: Option, accumulation: int, operation: str) -> None:
    row = results(world_size)[f"accumulation {accumulation}", plan]
    # All groups here have two ranks: the node, the pair across nodes, and the world of two.
    share = 2 / 2 if operation == "all_reduce" else 1 / 2
    sent = {step.get(f"{COLLECTIVES[operation]} elements", 0) * 4 * share for step in row["collectives"]}
    assert sent == {priced_bytes(row, operation, option, world_size, accumulation)}


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("accumulation", [1, 4])
def test_nodes_exchange_their_share_once(accumulation: int) -> None:
    row = results(4)[f"accumulation {accumulation}", "node"]
    for sent in row["collectives"]:
        assert sent["all_reduce elements"] == elements(row, 3) / 2
        assert sent["reduce_scatter_tensor elements"] == accumulation * elements(row, 3)


@pytest.mark.timeout(700)
def test_what_is_frozen_is_gathered_once_and_for_all() -> None:
    row = results(2)["frozen layers", "two"]
    trained = sum(
        held * ranks for name, (held, _, ranks) in row["held"].items() if CASES["frozen layers"]["frozen"] not in name
    )
    assert [sent["all_gather_into_tensor elements"] for sent in row["collectives"]] == [trained] * 5


@pytest.mark.timeout(700)
@pytest.mark.parametrize("plan", EVERY)
def test_holds_what_its_stages_say(plan: str) -> None:
    row = results(2)["accumulation 1", plan]
    part = {name: held for name, (held, _, _) in row["held"].items()}
    whole = {stage: elements(row, stage) for stage in range(4)}
    four_bytes = {
        "parameters": sum(part.values()) + whole[1] + whole[2],
        "gradients": sum(part.values()) + whole[1],
        # Two moments: an fp32 parameter is its own master weight.
        "optimizer_states": 2 * sum(part.values()),
    }
    # A gather may leave out the padding, and an optimizer counts its steps.
    assert row["state_bytes"] == pytest.approx({key: 4 * count for key, count in four_bytes.items()}, rel=0.002)


@pytest.mark.timeout(700)
def test_a_step_does_not_wait_for_its_gathers() -> None:
    found = results(2)
    for plan, after_step in {"all": "AVAILABLE", "one": "INFLIGHT", "two": "INFLIGHT", "none": "NOT_AVAILABLE"}.items():
        assert set(found["accumulation 1", plan]["after_step"].values()) == {after_step}


@pytest.mark.timeout(700)
@pytest.mark.parametrize("case", ["accumulation 1", "bf16", "bf16, fp32 gradients", "frozen layers"])
@pytest.mark.parametrize("plan", PLANNED)
def test_bytes_between_steps_are_predicted(case: str, plan: str) -> None:
    """Exactly, but for the optimizer's step counters: four bytes a partition group."""
    planned = results(2)[case, plan]
    measured = sum(planned["state_bytes"].values())
    assert 0 <= measured - planned["resident_bytes"] <= 4 * 4


FP16 = {"bf16": {"enabled": False}, "fp16": {"enabled": True, "initial_scale_power": 12}}


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("drive", ["micro_steps", "overflowing"])
@pytest.mark.parametrize("plan", ["none", "mixed"])
def test_fp16_trains_as_stock_zero3(drive: str, plan: str) -> None:
    case = Case(name="fp16", drive=drive, steps=6, config=FP16)
    rows = [(case, "stock"), (case, plan)]
    found = on_ranks(2, "training:train_all", rows, environment={"DS_ACCELERATOR": "cuda"})
    # fp16 has 11 bits of mantissa.
    assert_equal(found["fp16", plan], found["fp16", "stock"], 2**-10)
