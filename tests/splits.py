"""Train models with split modules on real engines, on the ranks that ``launch`` starts."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from _alive import Alive
from cases import Case
from checkpoints import differing_files
from models import VOCABULARY, batch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from training import CLUSTER, ds_config, make_plan
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.pytorch_utils import Conv1D

import ds_osdp
from ds_osdp.errors import InfeasiblePlanError
from ds_osdp.plan import Plan, Stage
from ds_osdp.split import split_rows

ROOT = Path(__file__).parents[1]


class Kinds(nn.Module):
    """Every kind of module that can be split, of sizes that divide by nothing; ``forward`` returns the loss."""

    def __init__(
        self, hidden: int = 40, tied: bool = False, checkpoint: bool = False, outside: bool = False, lora: bool = False
    ) -> None:
        super().__init__()
        self.checkpoint, self.outside = checkpoint, outside
        self.wte, self.drop = nn.Embedding(VOCABULARY, hidden, padding_idx=5), nn.Dropout(0.1)
        self.up, self.down = Conv1D(101, hidden), nn.Linear(101, hidden)
        self.ln, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, VOCABULARY, bias=False)
        # One of the classes that DeepSpeed takes for leaves by itself.
        self.moe = MixtralSparseMoeBlock(MixtralConfig(hidden_size=hidden, intermediate_size=24, num_local_experts=7))
        self.moe.experts.config._experts_implementation = "grouped_mm"
        with deepspeed.zero.GatheredParameters(list(self.moe.parameters()), modifier_rank=0):
            for parameter in self.moe.parameters():  # which transformers leaves to its models
                nn.init.normal_(parameter, std=0.1)
        if tied:
            self.head.weight = self.wte.weight
        if lora:
            from peft import LoraConfig, inject_adapter_in_model

            targets = ["wte", "up", "down", "head"]
            inject_adapter_in_model(LoraConfig(r=4, target_modules=targets, init_lora_weights=False), self)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.wte(ids))
        run = torch.utils.checkpoint.checkpoint if self.checkpoint else lambda block, x, **_: block(x)
        x = self.ln(x + run(self.block, x, use_reentrant=True))
        logits = F.linear(x, self.head.weight) if self.outside else self.head(x)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(F.gelu(self.up(x)))) + self.moe(x)


@dataclass(frozen=True)
class Way:
    """How to train: with how many slices, of which how many whole, and what else."""

    slices: int = 1
    whole_slices: int = 0
    stages: bool = False
    """Whether modules differ in stage, too."""
    model: tuple[str, ...] = ()
    frozen: str = ""
    zero_init: bool = False
    bf16: bool = False
    accumulation: int = 1
    groups: bool = False
    client_optimizer: bool = False
    steps: int = 10

    @property
    def stock(self) -> Way:
        return Way(
            model=self.model, frozen=self.frozen, zero_init=self.zero_init, bf16=self.bf16, accumulation=self.accumulation,
            groups=self.groups, client_optimizer=self.client_optimizer, steps=self.steps,
        )  # fmt: skip


def plan_for(model: nn.Module, way: Way, config: dict[str, Any]) -> Plan:
    mixed = {"up*": (2, None), "down.bias": (1, None), "*": (3, None)}
    plan = make_plan(model, mixed if way.stages else {"*": (3, None)}, config)
    splittable = split_rows(model)
    units = [
        u.model_copy(update={"slices": way.slices, "whole_slices": way.whole_slices if u.stage is Stage(3) else 0})
        if u.name in splittable
        else u
        for u in plan.units
    ]
    return plan.model_copy(update={"units": tuple(units)})


def make_engine(way: Way, model: nn.Module | None = None) -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    case = Case(name="split", bf16=way.bf16, accumulation=way.accumulation)
    config = ds_config(case, None)
    deepspeed.init_distributed("gloo", verbose=False)
    if model is None:
        options = dict.fromkeys(way.model, True)
        if way.zero_init:
            torch.manual_seed(7 * int(os.environ["RANK"]))
            with deepspeed.zero.Init(config_dict_or_path=config):
                model = Kinds(**options)
        else:
            model = Kinds(**options)
        for name, parameter in model.named_parameters():
            if way.frozen and name.startswith(way.frozen):
                parameter.requires_grad_(False)
    call: dict[str, Any] = {"model": model, "config": config}
    if way.groups or way.client_optimizer:
        decay = [p for n, p in model.named_parameters() if p.requires_grad and not n.endswith("bias")]
        bare = [p for n, p in model.named_parameters() if p.requires_grad and n.endswith("bias")]
        call["model_parameters"] = [{"params": decay}, {"params": bare, "weight_decay": 0.0, "lr": 3e-3}]
    if way.client_optimizer:
        del config["optimizer"]
        call["optimizer"] = torch.optim.AdamW(call.pop("model_parameters"), lr=1e-2, eps=1e-4)
    if way == way.stock:
        return deepspeed.initialize(**call)[0]
    with tempfile.TemporaryDirectory() as folder:
        path = [f"{folder}/plan.json"]
        if os.environ["RANK"] == "0":
            # Not of `model`, which may come from another engine in slices.
            plan_for(Kinds(**dict.fromkeys(way.model, True)), way, config).save(path[0])
        torch.distributed.broadcast_object_list(path)
        config["osdp"] = {"plan": path[0]}
        return ds_osdp.initialize(**call)[0]


def steps(engine: Any, way: Way, begin: int, count: int) -> list[float]:
    losses = []
    torch.manual_seed(begin)  # of dropout
    for step in range(begin, begin + count):
        for i in range(way.accumulation):
            loss = engine(batch(step * way.accumulation + i, int(os.environ["RANK"])))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def train(way: Way) -> dict[str, Any]:
    engine = make_engine(way)
    losses = steps(engine, way, 0, way.steps)
    norm = float(engine.get_global_grad_norm())
    placed = {n: p.ds_zero_partition_world_size for n, p in engine.module.named_parameters()}
    whole = engine._consolidated_16bit_state_dict()
    if way != way.stock:
        engine.osdp.check_replicas()
    engine.destroy()
    return {"losses": losses, "norm": norm, "parameters": whole, "placed": placed}


def train_all(ways: list[Way]) -> list[dict[str, Any]]:
    return [train(way) for way in ways]


CHECKPOINTS = {
    "stock": Way(frozen="down", groups=True, steps=3),
    "four": Way(slices=4, whole_slices=1, stages=True, frozen="down", groups=True, steps=3),
    "three": Way(slices=3, frozen="down", groups=True, steps=3),
}


def saved_again(folder: str) -> dict[str, Any]:
    """Stock saves and goes on; every other way loads that, saves it again and goes on."""
    result: dict[str, Any] = {"differing": {}, "losses": {}}
    for name, way in CHECKPOINTS.items():
        engine = make_engine(way)
        if name == "stock":
            steps(engine, way, 0, way.steps)
        else:
            assert engine.load_checkpoint(f"{folder}/stock", tag="here")[0] is not None
        engine.save_checkpoint(f"{folder}/{name}", tag="here")
        result["differing"][name] = differing_files(Path(folder, "stock", "here"), Path(folder, name, "here"))
        result["losses"][name] = steps(engine, way, way.steps, way.steps)
        engine.destroy()
    return result


def from_engine_to_engine(ways: list[Way]) -> list[float]:
    """Losses of one model on several engines."""
    model, losses = None, []
    for i, way in enumerate(ways):
        engine = make_engine(way, model)
        losses += steps(engine, way, 2 * i, 2)
        model = engine.module
        engine.destroy()
    return losses


def most_gathered(ways: list[Way]) -> list[int]:
    """The most elements of ``head`` that are whole at once, in three steps of each way."""
    most = []
    for way in ways:
        engine = make_engine(way)
        parts = list(engine.module.head.parameters())
        seen = [0]
        steps(engine, way, 0, 1)
        with Watching(lambda _, parts=parts, seen=seen: seen.append(sum(_held(p) for p in parts))):
            steps(engine, way, 1, 2)
        most.append(max(seen))
        engine.destroy()
    return most


def _held(parameter: torch.Tensor) -> int:
    storage = parameter.untyped_storage().nbytes() // parameter.element_size()
    return storage if storage > 1 else 0


class Watching(TorchDispatchMode):
    """Looks at what every operator returned."""

    def __init__(self, look: Callable[[tuple[Any, ...]], None]) -> None:
        super().__init__()
        self.look = look

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.look(out if isinstance(out, tuple) else (out,))
        return out


def trains_within_its_budget() -> dict[str, Any]:
    """The model and the configuration of ``examples/split.py``, without slices and with them."""
    sys.path.insert(0, str(ROOT / "examples"))  # before the benchmark of the same name
    example = importlib.import_module("split")
    model, config = example.build(), example.configuration(max_slices=1)
    config["osdp"]["cluster"] = CLUSTER
    try:
        ds_osdp.initialize(model=model, model_parameters=model.parameters(), config=config)
        refused = ""
    except InfeasiblePlanError as error:
        refused = str(error)
    config["osdp"]["max_slices"] = 8
    before_bytes = Alive().peak_bytes - sum(p.numel() * p.element_size() for p in model.parameters())
    engine = ds_osdp.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    x, losses, peak = torch.randn(4, 64), [], 0
    for _ in range(4):
        with Alive() as counted:
            loss = F.cross_entropy(engine(x), torch.arange(4))
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
        peak = max(peak, counted.peak_bytes - before_bytes)
    return {"refused": refused, "plan": engine.osdp.plan, "losses": losses, "peak_bytes": peak}
