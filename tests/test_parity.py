"""The same losses, gradient norms and parameters as stock ZeRO-3, whatever is replicated and however one trains."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from cases import Case
from launch import on_ranks

pytestmark = pytest.mark.ranks

PLANNED = ("none", "some", "all")
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
    "SGD with momentum": {
        "steps": 5,
        "config": {
            "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}},
            "zero_allow_untested_optimizer": True,
        },
    },
}
ON_FOUR = ("accumulation 1", "accumulation 4", "bf16", "zero.Init, another seed on each rank")


@functools.cache
def outcome(world_size: int) -> dict[tuple[str, str], dict[str, Any]] | AssertionError:
    # One launch for all rows, and an error kept: importing DeepSpeed on every rank is most of the time.
    names = tuple(CASES) if world_size == 2 else ON_FOUR
    cases = [Case(name=name, **CASES[name]) for name in names]
    try:
        return on_ranks(world_size, "training:train_all", cases, ["stock", *PLANNED], timeout=600)
    except AssertionError as error:
        return error


def results(world_size: int) -> dict[tuple[str, str], dict[str, Any]]:
    found = outcome(world_size)
    if isinstance(found, AssertionError):
        raise found
    return found


ROWS = [(2, name, plan) for name in CASES for plan in PLANNED] + [(4, name, plan) for name in ON_FOUR for plan in PLANNED]


@pytest.mark.timeout(700)
@pytest.mark.parametrize(("world_size", "case", "plan"), ROWS)
def test_trains_as_stock_zero3(world_size: int, case: str, plan: str) -> None:
    found = results(world_size)
    stock, planned = found[case, "stock"], found[case, plan]
    assert stock["losses"][-1] < stock["losses"][0] - 0.1, "the model does not learn: nothing is compared"
    if plan == "none":
        assert planned["losses"] == stock["losses"]
        assert planned["norms"] == stock["norms"]
        assert all(torch.equal(planned["parameters"][n], p) for n, p in stock["parameters"].items())
        return
    relative = 2 * BF16_ULP if CASES[case].get("bf16") else FP32_RELATIVE
    assert planned["losses"] == pytest.approx(stock["losses"], rel=relative)
    assert planned["norms"] == pytest.approx(stock["norms"], rel=relative)
    for name, parameter in stock["parameters"].items():
        difference = (planned["parameters"][name] - parameter).norm() / parameter.norm().clamp(min=1.0)
        assert difference <= relative, name


@pytest.mark.timeout(700)
@pytest.mark.parametrize(("world_size", "case", "plan"), ROWS)
def test_partitions_what_the_plan_says(world_size: int, case: str, plan: str) -> None:
    planned = results(world_size)[case, plan]
    for name, (held, whole, ranks) in planned["held"].items():
        sharded = planned["stages"][name] == 3
        assert ranks == (world_size if sharded else 1), name
        assert held == -(-whole // ranks), name
    assert {"none": {3}, "some": {0, 3}, "all": {0}}[plan] == set(planned["stages"].values())


@pytest.mark.timeout(700)
@pytest.mark.parametrize(("world_size", "accumulation"), [(2, 1), (2, 4), (4, 1), (4, 4)])
def test_a_replicated_unit_gathers_nothing_and_reduces_once(world_size: int, accumulation: int) -> None:
    found = results(world_size)
    case = f"accumulation {accumulation}"
    parameters = sum(whole for _, whole, _ in found[case, "all"]["held"].values())
    everything = found[case, "all"]["collectives"]
    assert everything["all_reduce elements"] == parameters
    assert everything["all_reduce"] == 1, "all gradients fit one bucket here"
    assert not any(everything.get(f"{op} elements") for op in ("all_gather_into_tensor", "reduce_scatter_tensor", "broadcast"))

    stock, some = found[case, "stock"]["collectives"], found[case, "some"]["collectives"]
    replicated = sum(w for n, (_, w, _) in found[case, "some"]["held"].items() if found[case, "some"]["stages"][n] == 0)
    assert some["all_reduce elements"] == replicated
    for operation in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        assert 0 < some[f"{operation} elements"] < stock[f"{operation} elements"]
    none = found[case, "none"]["collectives"]
    assert none == stock
