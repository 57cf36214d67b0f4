"""A split module is the module it was: the same training, names and files; only less is gathered at once."""

from __future__ import annotations

import copy
import functools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import set_z3_leaf_module, z3_leaf_module
from launch import on_ranks
from splits import CHECKPOINTS, Kinds, Way
from torch import nn
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from ds_osdp.deepspeed_seams.slices import join_slices, open_leaves
from ds_osdp.errors import PlanMismatchError, UnsupportedError
from ds_osdp.split import join, split, split_rows

FP32_RELATIVE = 1e-6
BF16_ULP = 2**-8
SLICES = (2, 3, 4, 7)

WAYS = {f"{k} slices": Way(slices=k) for k in SLICES}
WAYS |= {f"{k} slices of two stages": Way(slices=k, whole_slices=(k + 1) // 2, stages=True) for k in SLICES}
WAYS |= {
    "tied": Way(slices=3, model=("tied",)),
    "tied, two stages": Way(slices=4, whole_slices=1, model=("tied",), steps=5),
    "recomputed": Way(slices=3, whole_slices=1, model=("checkpoint",), steps=5),
    "used outside its module": Way(slices=3, model=("outside",), steps=5),
    "zero.Init, another seed on each rank": Way(slices=3, whole_slices=1, zero_init=True, steps=5),
    "tied, zero.Init": Way(slices=2, model=("tied",), zero_init=True, steps=5),
    "frozen": Way(slices=3, frozen="up", steps=5),
    "frozen experts": Way(slices=3, frozen="moe.experts", steps=5),
    "bf16, accumulation 2": Way(slices=3, whole_slices=1, bf16=True, accumulation=2, steps=5),
    "accumulation 3, stages": Way(slices=4, whole_slices=1, stages=True, accumulation=3, steps=4),
    "LoRA": Way(slices=3, whole_slices=1, model=("lora",)),
    "parameter groups": Way(slices=3, groups=True, steps=5),
    "the user's optimizer": Way(slices=3, client_optimizer=True, steps=5),
}  # fmt: skip


@functools.cache
def results() -> dict[Way, dict[str, Any]] | AssertionError:
    ways = list(dict.fromkeys([way.stock for way in WAYS.values()] + list(WAYS.values())))
    try:
        return dict(zip(ways, on_ranks(2, "splits:train_all", ways), strict=True))
    except AssertionError as error:
        return error


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("name", WAYS)
def test_trains_as_the_whole_module(name: str) -> None:
    found = results()
    if isinstance(found, AssertionError):
        raise found
    way = WAYS[name]
    split_up, stock = found[way], found[way.stock]
    relative = 2 * BF16_ULP if way.bf16 else FP32_RELATIVE
    assert stock["losses"][-1] < stock["losses"][0] - 0.1, "the model does not learn: nothing is compared"
    assert split_up["losses"] == pytest.approx(stock["losses"], rel=relative)
    assert split_up["norm"] == pytest.approx(stock["norm"], rel=relative)
    assert split_up["parameters"].keys() == stock["parameters"].keys()
    for key, parameter in stock["parameters"].items():
        difference = (split_up["parameters"][key].float() - parameter.float()).norm() / parameter.float().norm().clamp(min=1.0)
        assert difference <= relative, key


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("name", ["7 slices", "7 slices of two stages"])
def test_every_slice_has_its_own_place(name: str) -> None:
    found = results()
    assert not isinstance(found, AssertionError)
    ranks = [found[WAYS[name]]["placed"][f"head.osdp_slices.{i}.weight"] for i in range(7)]
    assert ranks == [1] * WAYS[name].whole_slices + [2] * (7 - WAYS[name].whole_slices)


@pytest.mark.slow
@pytest.mark.ranks
def test_one_slice_is_gathered_at_a_time() -> None:
    ways = [Way(), Way(slices=4), Way(slices=7), Way(slices=4, model=("tied",))]
    whole, four, seven, tied = on_ranks(2, "splits:most_gathered", ways)
    # 97 rows of 40: the first slices have a row more, and DeepSpeed's padding is one element.
    assert whole == 97 * 40
    assert 25 * 40 <= four <= 25 * 40 + 2
    assert 14 * 40 <= seven <= 14 * 40 + 2
    assert four <= tied <= four + 2


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(("model", "buffer_bytes"), [("projection", 512 * 65_536 * 4), ("mixture", 16 * 3 * 512 * 1024 * 4)])
def test_the_peak_of_a_big_unit_falls(model: str, buffer_bytes: int) -> None:
    """One rank of eight, with a vocabulary of 64k under two layers, or with sixteen fused experts."""
    script = Path(__file__).with_name("split_memory.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    output = subprocess.run(
        [sys.executable, str(script), model, "1", "2", "4"], capture_output=True, check=True, env=environment
    )
    whole, *in_slices = json.loads(output.stdout.splitlines()[-1])
    for row in in_slices:
        assert whole["measured"] - row["measured"] >= 0.6 * (1 - 1 / row["slices"]) * buffer_bytes
    for row in (whole, *in_slices):
        assert row["predicted"] == pytest.approx(row["measured"], rel=0.05)


@pytest.mark.slow
@pytest.mark.ranks
def test_what_does_not_fit_whole_trains_in_slices() -> None:
    row = on_ranks(2, "splits:trains_within_its_budget")
    assert "into 4 slices" in row["refused"]
    assert max(unit.slices for unit in row["plan"].units) > 1
    assert row["losses"][-1] < row["losses"][0]
    assert row["peak_bytes"] <= row["plan"].budget_bytes


@pytest.mark.slow
@pytest.mark.ranks
def test_files_are_those_of_the_whole_module(tmp_path: Path) -> None:
    """Those of every kind that can be split; the plans and numbers of ranks between them are test_checkpoints.py's."""
    found = on_ranks(2, "splits:saved_again", str(tmp_path))
    assert found["differing"] == {name: [] for name in CHECKPOINTS}
    for name in CHECKPOINTS:
        assert found["losses"][name] == pytest.approx(found["losses"]["stock"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.ranks
def test_a_split_model_can_go_to_another_engine() -> None:
    plain, *others = (
        [replace(Way(steps=2), slices=k, whole_slices=w) for k, w in ways] for ways in ([(2, 0)] * 3, [(4, 1), (2, 0), (3, 2)])
    )
    for ways in others:
        losses = on_ranks(2, "splits:from_engine_to_engine", ways)
        assert losses == pytest.approx(on_ranks(2, "splits:from_engine_to_engine", plain), rel=FP32_RELATIVE)


@pytest.mark.parametrize("count", [1, 3, 7, 40])
@pytest.mark.parametrize("tied", [False, True])
def test_names_and_values_stay_without_an_engine(count: int, tied: bool) -> None:
    torch.manual_seed(0)
    model = Kinds(tied=tied).eval()
    original = copy.deepcopy(model)
    names = list(model.state_dict())
    counts = {name: min(count, rows) for name, rows in split_rows(model).items()}
    assert len(counts) == (5 if tied else 6)
    placed = split(model, counts)
    assert len({part for parts in placed.values() for part in parts}) == sum(counts.values())
    assert isinstance(model.head, nn.Linear)
    assert isinstance(model.wte, nn.Embedding)
    assert list(model.state_dict()) == names
    ids = torch.randint(0, 97, (2, 16))
    loss, expected = model(ids), original(ids)
    torch.testing.assert_close(loss, expected, rtol=FP32_RELATIVE, atol=0)
    loss.backward()
    expected.backward()
    slices = dict(zip((n for n, p in original.named_parameters() if n in split_rows(original)), placed.values(), strict=True))
    for name, parts in slices.items():
        axis = 1 if name.startswith("up") else 0
        gradient = torch.cat([part.grad for part in parts], axis)  # type: ignore[misc]
        torch.testing.assert_close(gradient, original.get_parameter(name).grad, rtol=1e-5, atol=1e-7)
    other = Kinds(tied=tied).eval()
    other.load_state_dict(model.state_dict())
    split(other, dict.fromkeys(split_rows(other), 2))
    other.load_state_dict(original.state_dict())
    with pytest.raises(RuntimeError, match=r"size mismatch for head\.weight"):
        other.load_state_dict({**original.state_dict(), "head.weight": torch.zeros(3, 3)})
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict({n: v for n, v in original.state_dict().items() if n != "head.weight"})
    join(other)
    assert [n for n, _ in other.named_parameters()] == [n for n, _ in original.named_parameters()]
    assert all(torch.equal(value, original.state_dict()[name]) for name, value in other.state_dict().items())


def test_an_id_out_of_range_is_noticed() -> None:
    model = nn.Sequential(nn.Embedding(10, 4))
    split(model, {"0.weight": 3})
    for bad in (-1, 10):
        with pytest.raises(IndexError):
            model(torch.tensor([2, bad]))


def test_leading_dimensions_and_autocast() -> None:
    layer = nn.Linear(6, 11)
    model = nn.Sequential(copy.deepcopy(layer))
    split(model, {"0.weight": 4})
    for shape in ((6,), (3, 6), (2, 3, 6), (2, 1, 3, 6), (0, 6)):
        torch.testing.assert_close(model(torch.ones(shape)), layer(torch.ones(shape)))
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.ones(3, 6)).dtype is torch.bfloat16
        model(torch.ones(3, 6)).sum().backward()
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())


def test_what_cannot_be_split_is_left_or_refused() -> None:
    class Scaled(nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(ids)

    shared = nn.ModuleList([nn.Linear(4, 4), nn.Bilinear(4, 1, 4)])
    shared[1].weight = shared[0].weight
    model = nn.ModuleDict(
        {
            "scaled": Scaled(9, 4), "sparse": nn.Embedding(9, 4, sparse=True), "norm": nn.LayerNorm(4), "shared": shared,
            "attention": nn.MultiheadAttention(4, 2), "linear": nn.Linear(4, 5),
        }
    )  # fmt: skip
    assert split_rows(model) == {"linear.weight": 5}
    for name, count in (("norm.weight", 2), ("linear.weight", 6)):
        with pytest.raises(PlanMismatchError, match=name):
            split(model, {name: count})
    assert not any("osdp" in name for name, _ in model.named_parameters())


def test_fused_experts_are_split_together_or_not_at_all() -> None:
    model = Kinds().moe
    both = {"experts.gate_up_proj": 7, "experts.down_proj": 7}
    assert split_rows(model) == both
    for slices in ({"experts.down_proj": 2}, {"experts.gate_up_proj": 2, "experts.down_proj": 3}):
        with pytest.raises(PlanMismatchError, match="together"):
            split(model, slices)
    experts = model.experts
    for attribute, value in (("_is_expert_parallel", True), ("act_fn", nn.PReLU())):
        before = getattr(experts, attribute)
        setattr(experts, attribute, value)
        assert split_rows(model) == {}
        setattr(experts, attribute, before)
    for implementation, rows in (("eager", {}), ("batched_mm", both)):
        experts.config._experts_implementation = implementation
        assert split_rows(model) == rows


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_fused_experts_of_any_layout(implementation: str) -> None:
    """With biases, transposed, with a gate of their own; where no token chooses some of them."""
    torch.manual_seed(0)
    config = GptOssConfig(hidden_size=32, intermediate_size=24, num_local_experts=7)
    model = nn.Sequential(GptOssExperts(config))
    model[0].config._experts_implementation = implementation
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    whole = copy.deepcopy(model)
    placed = split(model, dict.fromkeys(split_rows(model), 3))
    assert len(placed) == 4
    inputs = [(torch.randn(9, 32).requires_grad_(), torch.rand(9, 2).requires_grad_()) for _ in range(2)]
    inputs[1][0].data, inputs[1][1].data = inputs[0][0].data, inputs[0][1].data
    chosen = torch.tensor([[0, 1], [2, 0], [1, 6]] * 3)  # none of the second slice
    outputs = [experts[0](x, chosen, scores) for experts, (x, scores) in zip((model, whole), inputs, strict=True)]
    torch.testing.assert_close(*outputs, rtol=FP32_RELATIVE, atol=1e-7)
    for output in outputs:
        output.square().sum().backward()
    for ours, theirs in zip(*inputs, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)
    for parts, parameter in zip(placed.values(), whole.parameters(), strict=True):
        gradient = torch.cat([part.grad for part in parts])  # type: ignore[misc]
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-5, atol=1e-6)


def test_leaf_modules_do_not_gather_slices() -> None:
    model = nn.ModuleDict({"moe": Kinds().moe, "plain": nn.Sequential(nn.Linear(4, 4))})
    leaves = [model["moe"], model["plain"]]
    for leaf in leaves:
        set_z3_leaf_module(leaf, True)
    split(model, {"moe.experts.gate_up_proj": 2, "moe.experts.down_proj": 2})
    open_leaves(model)
    assert [z3_leaf_module(leaf) for leaf in leaves] == [False, True]
    join_slices({"model": model})
    assert [z3_leaf_module(leaf) for leaf in leaves] == [True, True]
    split(model, {"plain.0.weight": 2})
    with pytest.raises(UnsupportedError, match=r"plain\.0"):
        open_leaves(model)
