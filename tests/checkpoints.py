"""Save and load real checkpoints on the ranks that ``launch`` starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import deepspeed
import torch
from cases import Case
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from training import make_engine, micro_steps

# Two optimizer groups, small sub-groups and a frozen layer: every branch of the layout.
CASE = Case(name="checkpoint", accumulation=2, groups=True, frozen="h.2.", bf16=True, zero={"sub_group_size": 9_000})
STEPS = 3


def full_states(engine: Any) -> dict[str, torch.Tensor]:
    """Master weights and both moments of every trainable parameter, whole; weights of the frozen ones."""
    states = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            states[name] = safe_get_full_fp32_param(parameter).clone()
            for key in ("exp_avg", "exp_avg_sq"):
                states[f"{name} {key}"] = safe_get_full_optimizer_state(parameter, key).clone()
        else:
            with deepspeed.zero.GatheredParameters([parameter]):
                states[name] = parameter.detach().clone()
    return states


def continue_training(engine: Any, begin: int) -> list[float]:
    return [loss for step in range(begin, begin + STEPS) for loss in micro_steps(engine, step, CASE.accumulation)]


def round_trips(folder: str, plans: list[str]) -> dict[str, Any]:
    """Every plan saves, every plan loads."""
    result: dict[str, Any] = {"equal": {}, "losses": {}, "uninterrupted": {}, "zero_to_fp32": {}, "same_files": {}}
    for saver in plans:
        engine = make_engine(CASE, saver)
        continue_training(engine, 0)
        engine.save_checkpoint(f"{folder}/{saver}", tag="here")
        saved = full_states(engine)
        result["uninterrupted"][saver] = continue_training(engine, STEPS)
        engine.destroy()
        result["zero_to_fp32"][saver] = _worst_difference(
            get_fp32_state_dict_from_zero_checkpoint(f"{folder}/{saver}", tag="here"), saved
        )
        for loader in plans:
            engine = make_engine(CASE, loader)
            path, _ = engine.load_checkpoint(f"{folder}/{saver}", tag="here")
            assert path is not None
            loaded = full_states(engine)
            result["equal"][saver, loader] = [name for name in saved if not torch.equal(saved[name], loaded[name])]
            if saver == "stock":
                engine.save_checkpoint(f"{folder}/again_{loader}", tag="here")
                result["same_files"][loader] = differing_files(
                    Path(folder, "stock", "here"), Path(folder, f"again_{loader}", "here")
                )
            result["losses"][saver, loader] = continue_training(engine, STEPS)
            engine.destroy()
    return result


def _worst_difference(weights: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> float:
    return max((weights[name].float() - saved[name].float()).abs().max().item() for name in weights)


def differing_files(left: Path, right: Path) -> list[str]:
    """What differs between two checkpoint folders, tensor by tensor."""
    torch.distributed.barrier()
    names = sorted(p.name for p in left.iterdir())
    differences = [] if names == sorted(p.name for p in right.iterdir()) else [f"files {names}"]
    for name in names:
        a, b = (torch.load(folder / name, weights_only=False) for folder in (left, right))
        differences += _different(f"{name}", a, b)
    return differences


def _different(where: str, a: Any, b: Any) -> list[str]:
    if where.endswith(("/ds_config", "/lr_scheduler", "/client_lr_scheduler")):
        return []
    if isinstance(a, dict) and isinstance(b, dict):
        keys = [where] if a.keys() != b.keys() else []
        return keys + [d for key in a.keys() & b.keys() for d in _different(f"{where}/{key}", a[key], b[key])]
    if isinstance(a, (list, tuple)):
        lengths = [where] if len(a) != len(b) else []
        return lengths + [d for i, (x, y) in enumerate(zip(a, b, strict=False)) for d in _different(f"{where}/{i}", x, y)]
    if torch.is_tensor(a):
        return [] if torch.equal(a, b) else [where]
    if isinstance(a, (int, float, str, bool)):
        return [] if a == b else [f"{where}: {a} and {b}"]
    return []


def gathered_modifier(plan: str, rank_to_modify: int) -> dict[str, list[float]]:
    """What every rank sees after ``GatheredParameters(modifier_rank=...)`` on parameters of every stage."""
    engine = make_engine(Case(name="modify"), plan)
    continue_training(engine, 0)
    rank = int(os.environ["RANK"])
    chosen = {n: p for n, p in engine.module.named_parameters() if n.startswith("h.0.") and p.ds_numel < 200}
    before = {name: full_parameter(p) for name, p in chosen.items()}
    for parameters in (list(chosen.values()), *([p] for p in chosen.values())):
        with deepspeed.zero.GatheredParameters(parameters, modifier_rank=rank_to_modify):
            if rank == rank_to_modify:
                for p in parameters:
                    p.data.add_(0.5)
    seen = {}
    for name, p in chosen.items():
        everyone = [torch.empty_like(before[name]) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(everyone, full_parameter(p) - before[name])
        seen[name] = [value for t in everyone for value in (t.min().item(), t.max().item())]
    engine.osdp.check_replicas()
    # What the parts hold, gathered anew.
    engine.empty_partition_cache()
    for name, p in chosen.items():
        seen[name] += [(full_parameter(p) - before[name]).min().item()]
    return seen


def full_parameter(parameter: Any) -> torch.Tensor:
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def a_copy_that_drifts(plan: str) -> str:
    """The error every rank gets when one rank's copy was changed behind the engine's back."""
    engine = make_engine(Case(name="drift", config={}), plan)
    engine.osdp.check_replicas()
    parameter = dict(engine.module.named_parameters())["h.1.fc1.weight"]
    if int(os.environ["RANK"]) == 1:
        (parameter.data.view(-1) if plan == "one" else parameter.ds_tensor)[3] += 1e-3
    try:
        engine.osdp.check_replicas()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was noticed"


def one_engine_after_another(plans: list[str]) -> list[float]:
    """Losses of one model on several engines, each with a plan of its own."""
    model, losses = None, []
    for i, plan in enumerate(plans):
        engine = make_engine(Case(name="again"), plan, model)
        for step in range(2 * i, 2 * i + 2):
            losses += list(micro_steps(engine, step, 1))
        model = engine.module
        engine.destroy()
    return losses
