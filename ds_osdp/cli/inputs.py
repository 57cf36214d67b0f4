"""What several verbs read: the job as a user describes it, without machines and without weights."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_osdp.cli.models import build_model
from ds_osdp.cluster import DEFAULT_CLUSTER, Cluster
from ds_osdp.config import BUDGET_SHARE, OsdpConfig, find_section
from ds_osdp.errors import ConfigError
from ds_osdp.job import Job, job_from_config
from ds_osdp.quantities import parse_bytes
from ds_osdp.refused import refuse_unsupported

if TYPE_CHECKING:
    from torch import nn

    from ds_osdp.profile import ModelProfile

__all__ = ["Inputs", "add_inputs", "positive", "read_inputs", "size"]


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a plan is made from."""

    section: OsdpConfig
    cluster: Cluster
    job: Job
    budget_bytes: int
    micro_batches: tuple[int, ...]
    """To choose from; empty if the job's is given."""
    profile_of: Callable[[Job], ModelProfile]
    """Traces the model with a job's micro-batch."""
    ds_config: dict[str, Any]
    """The DeepSpeed JSON, with what the arguments change in it."""
    model: nn.Module
    """On the meta device."""


def add_inputs(
    parser: argparse.ArgumentParser, world_size: Callable[[str], Any] | None = None, world_size_help: str = "number of ranks"
) -> None:
    """The arguments that describe a job; a verb may read ``--world-size`` in its own way."""
    parser.add_argument("--config", required=True, metavar="DS.json", help="the DeepSpeed JSON")
    parser.add_argument("--model", required=True, metavar="hf:CONFIG.json|py:MODULE:CALLABLE", help="what to train")
    parser.add_argument("--world-size", required=True, type=world_size or positive, metavar="N", help=world_size_help)
    parser.add_argument("--ranks-per-node", type=positive, metavar="K", help="default: the cluster's")
    parser.add_argument("--memory-budget", type=size, metavar="SIZE", help="per rank, such as 70GiB; overrides the JSON")
    parser.add_argument("--micro-batch", type=positive, metavar="B", help="samples; overrides the JSON")
    parser.add_argument(
        "--sequence-length", type=positive, metavar="S", help="tokens of one sample, for models with text input"
    )
    parser.add_argument("--cluster", metavar="FILE", help=f"default: osdp.cluster of the JSON, else {DEFAULT_CLUSTER}")


def read_inputs(arguments: argparse.Namespace) -> Inputs:
    """Read what :func:`add_inputs` asked for, and build the model.

    Raises:
        ConfigError: a value is missing or cannot be meant.
        OsdpError: the model, the cluster or the JSON cannot be used.
    """
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
    # torch takes seconds to import: not before the rest is known to be good.
    from ds_osdp import measure

    model = build_model(arguments.model)

    @cache
    def profile_of(job: Job) -> ModelProfile:
        return measure.profile_for(section, model, job, arguments.sequence_length)

    return Inputs(
        section, cluster, job, budget, () if arguments.micro_batch else section.micro_batch, profile_of, ds_config, model
    )


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


def positive(text: str) -> int:
    """A count of at least one."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def size(text: str) -> int:
    """Bytes, as people write them."""
    try:
        return parse_bytes(int(text) if text.lstrip("-").isdecimal() else text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
