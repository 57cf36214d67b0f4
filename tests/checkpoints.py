"""Save and load real checkpoints on the ranks that ``launch`` starts."""

from __future__ import annotations

import os
import resource
import signal
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
from _alive import Alive
from cases import Case
from deepspeed.checkpoint.ds_to_universal import main as ds_to_universal
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from entries import message_of
from models import batch
from training import make_engine, micro_steps

from ds_osdp.split import unsplit_name

# Two optimizer groups, small sub-groups and a frozen layer: every branch of the layout.
CASE = Case(
    name="checkpoint",
    groups=True,
    frozen="h.2.",
    bf16=True,
    zero={"sub_group_size": 9_000},
    config={"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 20}}},
)
STEPS = 5
SCALE = 8.0


def full_states(engine: Any) -> dict[str, torch.Tensor]:
    """Master weights and both moments of every trainable parameter, whole; weights of the frozen ones."""
    states: dict[str, list[torch.Tensor]] = {}
    for name_of_slice, parameter in engine.module.named_parameters():
        name, _ = unsplit_name(name_of_slice)
        if parameter.requires_grad:
            states.setdefault(name, []).append(safe_get_full_fp32_param(parameter))
            for key in ("exp_avg", "exp_avg_sq"):
                states.setdefault(f"{name} {key}", []).append(safe_get_full_optimizer_state(parameter, key))
        else:
            states.setdefault(name, []).append(full_parameter(parameter))
    # The slices of this model are rows of it; of what is not in slices, this makes a copy.
    return {name: torch.cat(slices) for name, slices in states.items()}


def continue_training(engine: Any, begin: int) -> list[float]:
    """Mean losses of a few steps with one global batch, which the ranks share, however many they are."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    losses = []
    for step in range(begin, begin + STEPS):
        loss = engine(batch(step, 0, samples=8).chunk(ranks)[rank])
        engine.backward(loss)
        engine.step()
        mean = loss.detach() / ranks
        torch.distributed.all_reduce(mean)
        losses.append(mean.item())
    return losses


def matrix(folder: str, plans: list[str], tag: str, before: Sequence[str] = ()) -> dict[str, Any]:
    """Every plan saves, every plan loads; what was saved, for other launches to load.

    Plans of ``before`` have done that with each other in an earlier launch: now with ``plans``.
    """
    result: dict[str, Any] = {name: {} for name in ("equal", "losses", "uninterrupted", "zero_to_fp32", "same_files")}
    states: dict[str, dict[str, torch.Tensor]] = {}
    random = torch.Generator().manual_seed(int(os.environ["RANK"])).get_state()
    if before:
        states, result["uninterrupted"] = torch.load(f"{folder}/{tag}.pt")
    for saver in plans:
        engine = make_engine(CASE, saver)
        continue_training(engine, 0)
        # As fp16 would have found; fp16 itself does not run on a CPU.
        engine.optimizer.loss_scaler.cur_scale = SCALE
        engine.save_checkpoint(f"{folder}/{saver}", tag=tag, client_state={"random": random})
        states[saver] = full_states(engine)
        result["uninterrupted"][saver] = continue_training(engine, STEPS)
        engine.destroy()
        if os.environ["RANK"] == "0":
            weights = get_fp32_state_dict_from_zero_checkpoint(f"{folder}/{saver}", tag=tag)
            result["zero_to_fp32"][saver] = _worst_difference(weights, states[saver])
    for loader in [*before, *plans]:
        engine = make_engine(CASE, loader)
        for saver in plans if loader in before else [*before, *plans]:
            _, client = engine.load_checkpoint(f"{folder}/{saver}", tag=tag)
            result["equal"][saver, loader] = different_states(engine, states[saver])
            if not torch.equal(client["random"], random) or engine.optimizer.loss_scaler.cur_scale != SCALE:
                result["equal"][saver, loader].append("random state or loss scale")
            if saver == "stock":
                engine.save_checkpoint(f"{folder}/again_{loader}", tag=tag, client_state={"random": random})
                result["same_files"][loader] = differing_files(Path(folder, "stock", tag), Path(folder, f"again_{loader}", tag))
            result["losses"][saver, loader] = continue_training(engine, STEPS)
        engine.destroy()
    if os.environ["RANK"] == "0":
        torch.save((states, result["uninterrupted"]), f"{folder}/{tag}.pt")
    return result


def different_states(engine: Any, saved: dict[str, torch.Tensor]) -> list[str]:
    loaded = full_states(engine)
    return [name for name in saved if not torch.equal(saved[name], loaded[name])]


def to_universal(folder: str, savers: list[str], tag: str) -> None:
    """DeepSpeed's converter, on rank 0."""
    if os.environ["RANK"] == "0":
        for saver in savers:
            arguments = {"input_folder": f"{folder}/{saver}/{tag}", "output_folder": f"{folder}/{saver}/universal"}
            ds_to_universal(
                Namespace(num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True, **arguments)
            )
    torch.distributed.barrier()


def from_universal(folder: str, savers: list[str], loaders: list[str], tag: str) -> dict[str, Any]:
    """What another number of ranks saved, made universal."""
    states, uninterrupted = torch.load(f"{folder}/{tag}.pt")
    case = replace(CASE, config={**CASE.config, "checkpoint": {"load_universal": True}})
    result: dict[str, Any] = {"equal": {}, "losses": {}, "uninterrupted": uninterrupted}
    for loader in loaders:
        engine = make_engine(case, loader)
        for saver in savers:
            engine.load_checkpoint(f"{folder}/{saver}", tag="universal")
            trained = {name: values for name, values in states[saver].items() if "h.2." not in name}
            result["equal"][saver, loader] = different_states(engine, trained)
            result["losses"][saver, loader] = continue_training(engine, STEPS)
        engine.destroy()
    return result


def _worst_difference(weights: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> float:
    return max((weights[name].float() - saved[name].float()).abs().max().item() for name in weights)


def differing_files(left: Path, right: Path) -> list[str]:
    """What differs between two checkpoint folders, tensor by tensor."""
    torch.distributed.barrier()
    if os.environ["RANK"] != "0":
        return []
    # The plan lies beside, for information.
    names, others = (sorted(p.name for p in folder.iterdir() if p.name != "osdp_plan.json") for folder in (left, right))
    differences = [] if names == others else [f"files {names}"]
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


def interrupted_save(folder: str) -> dict[str, Any]:
    """The disk of one rank is full in the middle of a save; after that, files are missing or end too early."""
    engine = make_engine(CASE, "mixed")
    continue_training(engine, 0)
    with Alive() as alive:
        held = alive.now_bytes
        engine.save_checkpoint(folder, tag="first")
    unit = 16 * max(p.ds_numel for p in engine.module.parameters())
    result: dict[str, Any] = {"beside": alive.peak_bytes - held, "unit": unit}
    result["states"] = 12 * sum(p.ds_numel for p in engine.module.parameters()) / 2
    saved = full_states(engine)
    losses = continue_training(engine, STEPS)
    rank, limits = int(os.environ["RANK"]), resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, limits[1]))
    result["told"] = message_of(lambda: engine.save_checkpoint(folder, tag="second"))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    result["latest"] = Path(folder, "latest").read_text()
    result["left over"] = [p.name for p in Path(folder, "second").iterdir() if p.name.endswith(".part")]
    engine.load_checkpoint(folder)
    result["different"] = different_states(engine, saved)
    result["losses"] = losses, continue_training(engine, STEPS)
    file = sorted(Path(folder, "first").glob("*rank_1*optim_states.pt"))[0]
    content = file.read_bytes()
    torch.distributed.barrier()
    for what in ("truncated", "missing"):
        if rank == 0:
            file.write_bytes(content[:-100]) if what == "truncated" else file.unlink()
        torch.distributed.barrier()
        result[what] = message_of(lambda: engine.load_checkpoint(folder))
    result["weights only"] = message_of(lambda: engine.load_checkpoint(folder, load_module_only=True))
    result["file"] = file.name
    engine.destroy()
    return result


def killed_save(folder: str) -> None:
    """Rank 1 is killed while it writes; what was saved before lies beside."""
    engine = make_engine(CASE, "mixed")
    continue_training(engine, 0)
    engine.save_checkpoint(folder, tag="first")
    saved = full_states(engine)
    losses = continue_training(engine, STEPS)
    torch.save((saved, losses), f"{folder}/saved{os.environ['RANK']}.pt")
    torch.distributed.barrier()

    # The file is there by then, without its data: it is opened to be filled.
    def kill(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).endswith("optim_states.pt.part"):
            os.kill(os.getpid(), signal.SIGKILL)

    if os.environ["RANK"] == "1":
        sys.addaudithook(kill)
    engine.save_checkpoint(folder, tag="second")


def after_a_kill(folder: str) -> dict[str, Any]:
    """The job that died starts again, and saves where it died."""
    saved, losses = torch.load(f"{folder}/saved{os.environ['RANK']}.pt")
    engine = make_engine(CASE, "mixed")
    path, _ = engine.load_checkpoint(folder)
    result = {"path": path, "different": different_states(engine, saved)}
    result["losses"] = losses, continue_training(engine, STEPS)
    engine.save_checkpoint(folder, tag="second")
    engine.destroy()
    return result


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
    engine.destroy()
    return seen


def full_parameter(parameter: Any) -> torch.Tensor:
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def a_copy_that_drifts(plan: str) -> str:
    """The errors that ranks get when one rank's copy was changed behind the engine's back."""
    engine = make_engine(Case(name="drift", config={}), plan)
    engine.osdp.check_replicas()
    parameter = dict(engine.module.named_parameters())["h.1.fc1.weight"]
    if int(os.environ["RANK"]) == 1:
        (parameter.data.view(-1) if plan == "one" else parameter.ds_tensor)[3] += 1e-3
    told = message_of(engine.osdp.check_replicas)
    engine.destroy()
    return told


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
