"""Scale on paper: predicted step times of large models on 8 to 16,384 GPUs, a plan beside what stock offers.

    python benchmarks/simulate_cluster.py --json
    python benchmarks/simulate_cluster.py --quick

SIMULATED: no GPU runs here. Models are traced without weights; cluster files say what links and devices do, each figure with
its source; the event-by-event replay of the planner's tests (tests/replay.py) plays every configuration, the plan like the
others. What that replay is worth is measured in the lab: its error stands in the output (`lab_error_percent`, from
benchmarks/results/time_prediction_*.json).

Every model recomputes the activations of its layers, as people train at these sizes. Stock systems have DeepSpeed's default
communication sizes; a plan brings its own. hpZ keeps a second copy of the parameters spread over the node and gathers from it
in backward; "in nodes" is ZeRO-3 inside each node with gradients reduced across, as MiCS and HSDP do. hpZ is no point of the
planner's space, so it may win. What does not fit the budget (90% of the device) counts as absent, and the table says so.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from ds_osdp import measure
from ds_osdp.cluster import Cluster
from ds_osdp.config import BUDGET_SHARE, OsdpConfig, SolverConfig
from ds_osdp.errors import InfeasiblePlanError
from ds_osdp.explain import chosen_options, stock_points
from ds_osdp.job import Job, job_from_config
from ds_osdp.plan import Stage
from ds_osdp.planner import make_plan
from ds_osdp.prices import Price, Space
from ds_osdp.profile import ModelProfile
from ds_osdp.step import Instance, evaluate, priced

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))
from replay import replay_step_ns  # noqa: E402

SPACE = Space(tuple(Stage), node_degree=True)
SOLVER = SolverConfig(gap=1e-3, time_limit_s=10)
"""Proven to a thousandth: on paper no more can be told apart."""
WORLDS = (8, 64, 512, 4096, 16_384)
CONFIG: dict[str, Any] = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW"}}


@dataclass(frozen=True)
class Shape:
    """One model at one size, and the memory it may use if that is not what the device has."""

    name: str
    config: transformers.PretrainedConfig
    tokens: int
    cluster: str
    worlds: Sequence[int] = WORLDS
    micro_batch: int = 1
    budget_bytes: int | None = None


def main() -> int:
    """Simulate every shape; print a table, or one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="the two smallest models on 8 and 64 GPUs")
    arguments = parser.parse_args()
    rows = [row for shape in _shapes(arguments.quick) for row in _rows(shape)]
    found = {"simulated": True, "lab_error_percent": _lab_error(), "rows": rows}
    ratios = [row["speedup_over_best_stock"] for row in rows if row["speedup_over_best_stock"] is not None]
    if not ratios:
        print("no shape fits any system", file=sys.stderr)
        return 1
    found["worst_speedup_over_best_stock"], found["best_speedup_over_best_stock"] = min(ratios), max(ratios)
    if arguments.json:
        print(json.dumps(found))
    else:
        _print(found)
    return 0


def _shapes(quick: bool) -> Iterator[Shape]:
    a100, h100, small = "a100-80g-8x-200g", "a100-80g-8x-200g", "a100-80g-8x-200g"
    paper = transformers.GPT2Config(n_layer=48, n_embd=1536, n_head=16, n_positions=1024)
    yield Shape("OSDP paper: GPT 48 x 1536, 8 GiB", paper, 512, small, worlds=(8,), micro_batch=2, budget_bytes=8 << 30)
    worlds = (8, 64) if quick else WORLDS
    gpt2_xl = transformers.GPT2Config(n_layer=48, n_embd=1600, n_head=25, n_positions=1024)
    yield Shape("GPT-2 XL", gpt2_xl, 1024, a100, worlds, micro_batch=4)
    if quick:
        return
    yield Shape("OSDP paper: OPT-30B cut to 8 layers, 16 GiB", _opt_30b(8), 512, small, worlds=(8,), budget_bytes=16 << 30)
    yield Shape("OPT-30B", _opt_30b(48), 2048, a100)
    yield Shape("Llama-3-8B", _llama_3(4096, 14_336, 32, 32), 4096, h100)
    yield Shape("Llama-3-70B", _llama_3(8192, 28_672, 80, 64), 4096, h100)
    mixtral = transformers.MixtralConfig()  # its defaults are those of 8x7B
    yield Shape("Mixtral 8x7B", mixtral, 4096, h100)


def _opt_30b(layers: int) -> transformers.OPTConfig:
    return transformers.OPTConfig(
        hidden_size=7168, ffn_dim=28_672, num_hidden_layers=layers, num_attention_heads=56, word_embed_proj_dim=7168
    )


def _llama_3(hidden: int, intermediate: int, layers: int, heads: int) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        vocab_size=128_256,
        max_position_embeddings=8192,
    )


def _rows(shape: Shape) -> Iterator[dict[str, Any]]:
    cluster = Cluster.shipped(shape.cluster)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(shape.config)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    profile: ModelProfile | None = None
    for world in shape.worlds:
        job = job_from_config({**CONFIG, "train_micro_batch_size_per_gpu": shape.micro_batch}, world)
        profile = profile or measure.profile_for(OsdpConfig(), model, job, shape.tokens)
        yield _row(shape, profile, cluster, job)


def _row(shape: Shape, profile: ModelProfile, cluster: Cluster, job: Job) -> dict[str, Any]:
    assert cluster.device.memory_bytes is not None
    budget = shape.budget_bytes or int(BUDGET_SHARE * cluster.device.memory_bytes)
    systems = {
        point.name: {"step_seconds": point.step_seconds, "peak_bytes": point.peak_bytes, "fits": point.fits}
        for point in stock_points(profile, cluster, job, budget)
    }
    problem = priced(profile, cluster, job, SPACE)
    if job.world_size > cluster.ranks_per_node:
        systems["ZeRO-3 in nodes"] = _system(problem, _uniform(problem, cluster.ranks_per_node), budget)
        systems["ZeRO-3 with hpZ"] = _system(*_hpz(problem, cluster), budget)
    try:
        plan = make_plan(profile, cluster, job, budget, space=SPACE, solver=SOLVER)
    except InfeasiblePlanError as error:
        planned, why = None, str(error)
    else:
        sized = priced(profile, cluster, job.model_copy(update=plan.sizes.model_dump()), SPACE)
        planned, why = _system(sized, chosen_options(sized, plan), budget), None
    stock = [system["step_seconds"] for system in systems.values() if system["fits"]]
    return {
        "model": shape.name,
        "cluster": cluster.name,
        "world_size": job.world_size,
        "micro_batch": job.micro_batch,
        "tokens": shape.tokens,
        "parameters": sum(parameter.numel for parameter in profile.parameters),
        "budget_bytes": budget,
        "osdp": planned,
        "osdp_does_not_fit": why,
        "stock": systems,
        "speedup_over_best_stock": min(stock) / planned["step_seconds"] if planned and stock else None,
    }


def _uniform(problem: Instance, degree: int) -> list[int]:
    return [
        next(i for i, o in enumerate(problem.options(u)) if o.stage is Stage.FULLY_SHARDED and o.degree == degree)
        for u in range(len(problem.units))
    ]


def _hpz(problem: Instance, cluster: Cluster) -> tuple[Instance, list[int]]:
    """``problem`` with one option a unit: stage 3 over the world, its backward gathers from a second copy in the node."""

    def both(world: Price, node: Price) -> Price:
        return replace(
            world, gather_backward_ns=node.gather_backward_ns, parameter_bytes=world.parameter_bytes + node.parameter_bytes
        )

    kinds = []
    for kind in problem.kinds:
        at = {o.degree: i for i, o in enumerate(kind.options) if o.stage is Stage.FULLY_SHARDED}
        world, node = at[max(at)], at[cluster.ranks_per_node]
        kinds.append(replace(kind, options=(kind.options[world],), prices=(both(kind.prices[world], kind.prices[node]),)))
    return replace(problem, kinds=tuple(kinds)), [0] * len(problem.units)


def _system(problem: Instance, choice: Sequence[int], budget_bytes: int) -> dict[str, Any]:
    peak = evaluate(problem, choice).peak_bytes
    return {"step_seconds": replay_step_ns(problem, choice) / 1e9, "peak_bytes": peak, "fits": peak <= budget_bytes}


def _lab_error() -> dict[str, float] | None:
    """Of the newest measurement of predicted against measured seconds, in percent."""
    files = sorted((HERE / "results").glob("time_prediction_*.json"))
    if not files:
        return None
    found = json.loads(files[-1].read_text())
    return {"median": found["median_error"], "worst": found["worst_error"]}


def _print(found: dict[str, Any]) -> None:
    table = Table(title="SIMULATED seconds per step (what does not fit is in brackets)", title_justify="left")
    names = list(dict.fromkeys(name for row in found["rows"] for name in row["stock"]))
    for heading in ("model", "GPUs", *names, "plan", "over best that fits"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for row in found["rows"]:
        ratio = row["speedup_over_best_stock"]
        cells = [_cell(row["stock"].get(name)) for name in names]
        table.add_row(
            row["model"], f"{row['world_size']:,}", *cells, _cell(row["osdp"]), "" if ratio is None else f"{ratio:.2f}x"
        )
    console = Console(width=160)
    console.print(table)
    error = found["lab_error_percent"]
    console.print("error of the simulator in the lab: " + (str(error) if error else "not measured yet"))


def _cell(system: dict[str, Any] | None) -> str:
    if system is None:
        return ""
    seconds = f"{system['step_seconds']:.3g}"
    return seconds if system["fits"] else f"({seconds})"


if __name__ == "__main__":
    sys.exit(main())
