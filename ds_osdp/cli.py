"""The command line: ``ds-osdp plan`` and ``ds-osdp check``.

Exit status: 0 done; 2 bad input; 3 no plan fits (``plan``) or DeepSpeed does not fit this package (``check``).
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from ds_osdp.cluster import DEFAULT_CLUSTER, Cluster
from ds_osdp.config import BUDGET_SHARE, OsdpConfig, find_section
from ds_osdp.errors import ConfigError, InfeasiblePlanError, OsdpError
from ds_osdp.job import Job, job_from_config, refuse_unsupported
from ds_osdp.plan import Plan
from ds_osdp.prices import Space
from ds_osdp.quantities import parse_bytes
from ds_osdp.report import explanation_renderable, plan_renderable

if TYPE_CHECKING:
    from torch import nn

    from ds_osdp.explain import Explanation
    from ds_osdp.profile import ModelProfile

__all__ = ["main"]

EXIT_BAD_INPUT = 2
EXIT_INFEASIBLE = 3
EXIT_UNFIT_DEEPSPEED = 3

_PLAN_EXAMPLE = """\
example:
  ds-osdp plan --config ds.json --model hf:Llama/config.json --world-size 64 --ranks-per-node 8 --memory-budget 70GiB
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except InfeasiblePlanError as error:
        if arguments.format == "json":
            _print_json({"error": str(error), "budget_bytes": error.budget_bytes, "least_bytes": error.least_bytes})
        return _fail(error, EXIT_INFEASIBLE)
    except OsdpError as error:
        return _fail(error, EXIT_BAD_INPUT)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ds-osdp", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="COMMAND")

    plan = verbs.add_parser(
        "plan",
        help="plan a model for a cluster, without either",
        epilog=_PLAN_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan.add_argument("--config", required=True, metavar="DS.json", help="the DeepSpeed JSON")
    plan.add_argument("--model", required=True, metavar="hf:CONFIG.json|py:MODULE:CALLABLE", help="what to train")
    plan.add_argument("--world-size", required=True, type=_positive, metavar="N", help="number of ranks")
    plan.add_argument("--ranks-per-node", type=_positive, metavar="K", help="default: the cluster's")
    plan.add_argument("--memory-budget", type=_size, metavar="SIZE", help="per rank, such as 70GiB; overrides the JSON")
    plan.add_argument("--micro-batch", type=_positive, metavar="B", help="samples; overrides the JSON")
    plan.add_argument("--sequence-length", type=_positive, metavar="S", help="tokens of one sample, for models with text input")
    plan.add_argument("--cluster", metavar="FILE", help=f"default: osdp.cluster of the JSON, else {DEFAULT_CLUSTER}")
    plan.add_argument("--output", metavar="plan.json", help="write the plan here, for osdp.plan")
    plan.add_argument("--explain", action="store_true", help="also say why: what binds, what memory buys, how far stock is")
    _add_format(plan)
    plan.set_defaults(run=_plan)

    check = verbs.add_parser("check", help="say whether the installed DeepSpeed has every seam this package needs")
    _add_format(check)
    check.set_defaults(run=_check)
    return parser


def _add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=("text", "json"), default="text")


def _plan(arguments: argparse.Namespace) -> int:
    ds_config = _read_config(arguments)
    section = find_section(ds_config) or OsdpConfig()
    refuse_unsupported(ds_config)
    cluster = _cluster(arguments, section)
    budget = arguments.memory_budget or section.memory_budget
    if budget is None:
        if cluster.device.memory_bytes is None:
            raise ConfigError("give --memory-budget: the cluster file does not say how much memory a device has")
        budget = int(BUDGET_SHARE * cluster.device.memory_bytes)
    job = job_from_config(ds_config, arguments.world_size)
    plan, profile = _make_plan(arguments, section, cluster, job, budget)
    reasons = _explain(plan, profile, section, cluster, job) if arguments.explain else None
    if arguments.output:
        plan.save(arguments.output)
    if arguments.format == "json":
        _print_json({**plan.to_dict(), **({"explanation": asdict(reasons)} if reasons else {})})
    else:
        console = Console()
        console.print(plan_renderable(plan))
        if reasons:
            console.print(explanation_renderable(plan, reasons))
        console.print(f"planned for: {cluster.name}", style="dim")
        if arguments.output:
            console.print(f'written to {arguments.output}; apply it with "osdp": {{"plan": "{arguments.output}"}}')
    return 0


def _make_plan(
    arguments: argparse.Namespace, section: OsdpConfig, cluster: Cluster, job: Job, budget: int
) -> tuple[Plan, ModelProfile]:
    # torch and pyomo take seconds to import: not before the input is known to be good.
    from ds_osdp import measure
    from ds_osdp.planner import make_plan

    profile = measure.profile_for(section, _build_model(arguments.model), job, arguments.sequence_length)
    space = Space(section.stages)
    return make_plan(profile, cluster, job, budget, space=space, rules=section.rules, solver=section.solver), profile


def _explain(plan: Plan, profile: ModelProfile, section: OsdpConfig, cluster: Cluster, job: Job) -> Explanation:
    from ds_osdp.explain import explain

    return explain(plan, profile, cluster, job, space=Space(section.stages), rules=section.rules, solver=section.solver)


def _check(arguments: argparse.Namespace) -> int:
    from ds_osdp.deepspeed_seams import SEAMS, missing_seams

    rows = [{"owner": s.owner.split(":")[1], "name": s.name, "reason": s.reason, "problem": s.problem() or ""} for s in SEAMS]
    # What enabling would refuse, and not the rows alone: some mechanisms show in no signature.
    problems = missing_seams()
    if arguments.format == "json":
        _print_json({"fits": not problems, "problems": problems, "seams": rows})
    else:
        table = Table("seam", "why", "found")
        for row in rows:
            table.add_row(f"{row['owner']}.{row['name']}", row["reason"], row["problem"] or "yes")
        console = Console()
        console.print(table)
        for problem in problems:
            console.print(problem, markup=False)
    return EXIT_UNFIT_DEEPSPEED if problems else 0


def _read_config(arguments: argparse.Namespace) -> dict[str, Any]:
    # As DeepSpeed reads it, without DeepSpeed: it takes seconds to import, and logs to where JSON is printed.
    import hjson

    path = Path(arguments.config)
    try:
        value = hjson.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path} is not a JSON object")
    config: dict[str, Any] = _without_auto(value)
    if arguments.micro_batch:
        config.pop("train_batch_size", None)
        config["train_micro_batch_size_per_gpu"] = arguments.micro_batch
    if "train_batch_size" not in config and "train_micro_batch_size_per_gpu" not in config:
        raise ConfigError(f"{path} leaves the micro-batch open: give --micro-batch")
    return config


def _without_auto(value: Any) -> Any:
    """The configuration without what Hugging Face fills in later: DeepSpeed's defaults stand for it."""
    if isinstance(value, Mapping):
        return {key: _without_auto(part) for key, part in value.items() if part != "auto"}
    return value


def _cluster(arguments: argparse.Namespace, section: OsdpConfig) -> Cluster:
    cluster = Cluster.load(arguments.cluster) if arguments.cluster else section.load_cluster()
    cluster = cluster or Cluster.shipped(DEFAULT_CLUSTER)
    if arguments.ranks_per_node:
        cluster = cluster.model_copy(update={"ranks_per_node": arguments.ranks_per_node})
    if arguments.world_size % cluster.ranks_per_node and arguments.world_size > cluster.ranks_per_node:
        raise ConfigError(
            f"{arguments.world_size} ranks do not fill nodes of {cluster.ranks_per_node}: change --world-size or "
            "--ranks-per-node"
        )
    return cluster


def _build_model(name: str) -> nn.Module:
    import torch

    kind, _, rest = name.partition(":")
    with torch.device("meta"):
        if kind == "hf" and rest:
            return _build_hugging_face(Path(rest))
        if kind == "py" and ":" in rest:
            return _call_user_code(rest)
    raise ConfigError(f"--model {name!r}: write hf:PATH_TO_CONFIG_JSON or py:MODULE:CALLABLE")


def _build_hugging_face(path: Path) -> nn.Module:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError("--model hf: needs Hugging Face transformers: pip install 'ds-osdp[hf]'") from error
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text())
        config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{file} is no Hugging Face model configuration: {error!r}") from error
    for architecture in config.architectures or ():
        if hasattr(transformers, architecture):
            model: nn.Module = getattr(transformers, architecture)(config)
            return model
    return transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]


def _call_user_code(name: str) -> nn.Module:
    module_name, _, attribute = name.partition(":")
    sys.path.insert(0, ".")
    try:
        model = getattr(importlib.import_module(module_name), attribute)()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--model py:{name}: {error}") from error
    from torch import nn

    if not isinstance(model, nn.Module):
        raise ConfigError(f"--model py:{name} returns {type(model).__name__}, not a torch.nn.Module")
    return model


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def _size(text: str) -> int:
    try:
        return parse_bytes(int(text) if text.lstrip("-").isdecimal() else text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def _fail(error: Exception, status: int) -> int:
    sys.stderr.write(f"ds-osdp: error: {error}\n")
    return status
