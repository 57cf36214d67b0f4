"""Configuration -> plan -> engine: ``ds_osdp.initialize``, and ``enable`` for scripts that call DeepSpeed themselves."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import deepspeed
import torch

from ds_osdp import deepspeed_seams as seams
from ds_osdp import measure
from ds_osdp.config import BUDGET_SHARE, SECTION, OsdpConfig, find_section
from ds_osdp.errors import ConfigError, UnsupportedError
from ds_osdp.job import Job, job_from_config
from ds_osdp.plan import Plan
from ds_osdp.planner import best_micro_batch, make_plan
from ds_osdp.prices import Space
from ds_osdp.quantities import format_bytes
from ds_osdp.question import Question
from ds_osdp.refused import refuse_unsupported
from ds_osdp.replan import Replanner
from ds_osdp.report import plan_text

if TYPE_CHECKING:
    from torch import nn

    from ds_osdp.cluster import Cluster, Machines
    from ds_osdp.profile import ModelProfile

__all__ = ["disable", "enable", "initialize"]

Initialize = Callable[..., tuple[Any, Any, Any, Any]]

_stock_initialize: Initialize | None = None

_engines: WeakSet[Any] = WeakSet()
"""All that hold a plan: they share the memory of their device."""


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[Any, Any, Any, Any]:
    """``deepspeed.initialize``, with the plan of the configuration's ``osdp`` section applied.

    Takes and returns what ``deepspeed.initialize`` does: (engine, optimizer, data loader, LR scheduler).  The engine has
    one more attribute, ``engine.osdp``: the plan, and checks on it.

    Raises:
        ConfigError: the configuration has no ``osdp`` section, or one that cannot be meant.
        UnsupportedError: it asks for something a plan cannot be combined with.
        InfeasiblePlanError: no plan fits the budget.
        RankMismatchError: ranks were started with different configurations.
    """
    call = {name: value for name, value in locals().items() if value is not None}
    return _initialize(_stock_initialize or deepspeed.initialize, call, section_required=True)


def enable() -> _Enabled:
    """Make ``deepspeed.initialize`` apply the ``osdp`` section, for scripts and frameworks that call it themselves.

    Configurations without the section train as before.  Use it as a context manager, or undo it with :func:`disable`.
    """
    global _stock_initialize
    if _stock_initialize is None:
        seams.install()
        stock: Initialize = deepspeed.initialize
        signature = inspect.signature(stock)

        def planned(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
            return _initialize(stock, dict(signature.bind(*args, **kwargs).arguments), section_required=False)

        planned.__doc__, planned.__name__, planned.__wrapped__ = stock.__doc__, stock.__name__, stock  # type: ignore[attr-defined]
        _stock_initialize = stock
        deepspeed.initialize = planned
    return _Enabled()


def disable() -> None:
    """Put DeepSpeed back as it was.  Engines that hold a plan must not be used afterwards."""
    global _stock_initialize
    if _stock_initialize is not None:
        deepspeed.initialize = _stock_initialize
        _stock_initialize = None
    seams.uninstall()


class _Enabled:
    """``with ds_osdp.enable():`` ends with :func:`disable`."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc: object) -> None:
        disable()


def _initialize(stock: Initialize, call: dict[str, Any], *, section_required: bool) -> tuple[Any, Any, Any, Any]:
    """Plan and apply; ``call`` holds the arguments of ``deepspeed.initialize`` that were given."""
    _, world_size = seams.init_distributed(
        distributed_port=call.get("distributed_port"), dist_init_required=call.get("dist_init_required")
    )
    ds_config, section = seams.on_every_rank(lambda: _read(call, section_required))
    seams.same_on_every_rank("the DeepSpeed configuration", ds_config)
    if section is None or not section.enabled or call.get("model") is None:
        return stock(**call)
    if call.get("optimizer") is None and "optimizer" not in ds_config:
        seams.log_on_rank_zero(f"{SECTION}: no optimizer is given, so nothing is trained and nothing is planned")
        return stock(**call)

    model = call["model"]
    job = seams.on_every_rank(lambda: check_combination(ds_config, call, world_size))
    seams.join_slices(call)
    replan = section.replans(model_tells=measure.sample_for(model, job.micro_batch) is not None)
    planning = _planning(section, job) if section.plan is None or replan is not None else None
    if planning is None or section.plan is not None:
        plan = seams.broadcast_from_rank_zero(lambda: Plan.load(str(section.plan)))
    elif replan is not None:
        plan = seams.broadcast_from_rank_zero(lambda: planning.begin(model))
    else:
        builds_loader = call.get("training_data") is not None
        plan = seams.broadcast_from_rank_zero(lambda: planning.trace(model, builds_loader=builds_loader))
        if (plan.micro_batch, plan.accumulation) != (job.micro_batch, job.accumulation):
            call = _with_batch_sizes(call, ds_config, plan)
    result = apply_plan(stock, call, plan, world_size, check_replicas_every=section.check_replicas_every)
    if planning is not None and replan is not None:
        Replanner(result[0], replan, planning.observed, job.micro_batch)
    return result


def apply_plan(
    stock: Initialize, call: dict[str, Any], plan: Plan, world_size: int, *, check_replicas_every: int = 0
) -> tuple[Any, Any, Any, Any]:
    """``stock(**call)`` with ``plan`` applied to the model; every rank must hold the same plan.

    Raises:
        PlanMismatchError: the plan was made for another model or another number of ranks.
    """
    seams.on_every_rank(lambda: plan.check_belongs(seams.full_shapes(call["model"]), world_size))
    seams.log_on_rank_zero(f"{SECTION}: plan {plan.plan_hash}\n{plan_text(plan)}")
    seams.split_slices(call, plan)
    with seams.applying(plan, check_replicas_every=check_replicas_every):
        result = stock(**call)
    seams.attach(result[0], plan)
    _engines.add(result[0])
    return result


def _read(call: dict[str, Any], section_required: bool) -> tuple[dict[str, Any], OsdpConfig | None]:
    ds_config = seams.read_config(call.get("args"), call.get("config"), call.get("config_params"))
    section = find_section(ds_config)
    if section is None and section_required:
        raise ConfigError(
            f'the DeepSpeed configuration has no {SECTION!r} section: add "{SECTION}": {{}}, or call deepspeed.initialize'
        )
    return ds_config, section


def check_combination(ds_config: dict[str, Any], call: dict[str, Any], world_size: int) -> Job:
    """Everything that can be refused is refused here, before the model is touched; returns the job.

    Raises:
        UnsupportedError: a plan cannot be combined with what was asked for.
        ConfigError: the configuration cannot be meant.
    """
    refuse_unsupported(ds_config, optimizer=call.get("optimizer"))
    for name in ("mpu", "mesh_param"):
        if call.get(name) is not None:
            raise UnsupportedError(
                f"deepspeed.initialize({name}=...) cannot be combined with {SECTION} yet: ranks that hold "
                "different parts of the model; set osdp.enabled to false"
            )
    optimizer = call.get("optimizer")
    return job_from_config(ds_config, world_size, optimizer=None if optimizer is None else measure.optimizer_memory(optimizer))


def _with_batch_sizes(call: dict[str, Any], ds_config: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """``call`` with the micro-batch and accumulation of ``plan``: the global batch stays as it is."""
    sizes = {"train_micro_batch_size_per_gpu": plan.micro_batch, "gradient_accumulation_steps": plan.accumulation}
    args = copy(call.get("args"))
    # DeepSpeed takes one configuration only.
    for name in ("deepspeed_config", "deepscale_config"):
        if getattr(args, name, None) is not None:
            setattr(args, name, None)
    return {**call, "args": args, "config": {**ds_config, **sizes}, "config_params": None}


@dataclass(frozen=True, slots=True)
class _Planning:
    """What a plan is made for, the same on all ranks; rank 0 makes it."""

    section: OsdpConfig
    job: Job
    cluster: Cluster
    budget_bytes: int

    def trace(self, model: nn.Module, *, builds_loader: bool) -> Plan:
        """A plan from what the model tells of itself, before it trains."""
        section, job = self.section, self.job

        @cache
        def profile_of(job: Job) -> ModelProfile:
            return measure.profile_for(section, model, job)

        within = self.cluster, job, self.budget_bytes
        search = self._search(section.max_slices)
        if not section.micro_batch:
            plan = make_plan(profile_of(job), *within, **search)
        elif builds_loader:
            plan = best_micro_batch(section.micro_batch, profile_of, *within, **search)
        else:
            plan = make_plan(profile_of(job), *within, **search)
            best = best_micro_batch([*section.micro_batch, job.micro_batch], profile_of, *within, **search)
            seams.log_on_rank_zero(
                f"{SECTION}: of the micro-batches offered, train_micro_batch_size_per_gpu {best.micro_batch} with "
                f"gradient_accumulation_steps {best.accumulation} is predicted fastest: {best.samples_per_second:.3g} "
                f"samples/s, and {plan.samples_per_second:.3g} as it is. Your script makes the batches, so it is left to you"
            )
        return self._saved(plan, profile_of)

    def begin(self, model: nn.Module) -> Plan:
        """What to begin with when nothing has been seen yet: stage 3, but for what the user pins."""
        profile = measure.profile_parameters(model, self.job.micro_batch)
        sharded = Space((max(self.section.stages),))
        return make_plan(profile, self.cluster, self.job, self.budget_bytes, space=sharded, rules=self.section.rules)

    def observed(self, profile: ModelProfile, spare_bytes: int) -> Plan:
        """A plan from what a job showed, within the budget less ``spare_bytes``; a live engine cannot be split."""
        budget = max(1, self.budget_bytes - spare_bytes)
        return self._saved(make_plan(profile, self.cluster, self.job, budget, **self._search(1)), lambda _: profile)

    def _search(self, max_slices: int) -> dict[str, Any]:
        section = self.section
        space = Space(section.stages, max_slices=max_slices, node_degree=self.cluster.node_differs)
        return {"space": space, "rules": section.rules, "solver": section.solver}

    def _saved(self, plan: Plan, profile_of: Callable[[Job], ModelProfile]) -> Plan:
        if self.section.save_plan is not None:
            Question.kept_in(plan, self.section, self.job, self.cluster, profile_of).save(self.section.save_plan)
        return plan


def _planning(section: OsdpConfig, job: Job) -> _Planning:
    """Every rank helps to measure."""
    ranks_per_node, dtype = measure.ranks_per_node(), getattr(torch, job.parameter_dtype)
    machines = measure.machines_of_this_job(ranks_per_node, dtype)
    cluster = seams.on_every_rank(lambda: _given_cluster(section, machines))
    if cluster is None:
        cluster, origin = measure.cluster_of_this_job(machines)
        seams.log_on_rank_zero(f"{SECTION}: {origin}")
    free = seams.least_of_all_ranks(measure.free_bytes(ranks_per_node))
    budget = _budget(section, free, -seams.least_of_all_ranks(-_promised_bytes()))
    return _Planning(section, job, cluster, budget)


def _given_cluster(section: OsdpConfig, machines: Machines) -> Cluster | None:
    cluster = section.load_cluster()
    if cluster is not None:
        cluster.check_describes(machines, f"{SECTION}.cluster")
    return cluster


def _budget(section: OsdpConfig, free_bytes: int, promised_bytes: int) -> int:
    """What a plan may use of ``free_bytes``, of which the plans of living engines may still take ``promised_bytes``.

    Raises:
        ConfigError: that leaves too little.
    """
    left = (free_bytes if section.memory_budget else int(BUDGET_SHARE * free_bytes)) - promised_bytes
    if promised_bytes and left < (section.memory_budget or 1):
        asked = format_bytes(section.memory_budget) if section.memory_budget else "all that is left"
        raise ConfigError(
            f"this engine is to have {asked}, and of {format_bytes(free_bytes)} free memory the plans of engines that "
            f"already live may still take {format_bytes(promised_bytes)}: give each engine its share in {SECTION}.memory_budget"
        )
    return section.memory_budget or left


def _promised_bytes() -> int:
    """What the engines of this rank may still take beyond what they hold."""
    if _engines:
        gc.collect()  # One that was dropped lives on in cycles, and would keep its share.
    plans = [engine.osdp.plan for engine in _engines if not seams.is_destroyed(engine)]
    return sum(plan.budget_bytes - plan.resident_bytes for plan in plans)
