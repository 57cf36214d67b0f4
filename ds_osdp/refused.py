"""What a plan cannot be combined with, each with its reason: refused at start, because a wrong result must never be silent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ds_osdp.errors import ConfigError, UnsupportedError

__all__ = ["NOT_ELEMENTWISE", "REFUSED", "Refusal", "refuse_unsupported"]

NOT_ELEMENTWISE = ("adafactor", "lamb", "fusedlamb", "onebitlamb", "lars", "muon", "muonwithauxadam", "shampoo", "soap")
"""Optimizers, in lower case, that look at a whole tensor to update an element of it."""

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A setting of a DeepSpeed JSON that a plan cannot be combined with."""

    name: str
    """As the JSON has it, with the name people know it by."""
    reason: str
    asked_for: Callable[[Config], Any]
    """Whether a configuration asks for it."""


def _zero(key: str) -> Callable[[Config], Any]:
    return lambda config: (config.get("zero_optimization") or {}).get(key)


def _offload(key: str, old_key: str) -> Callable[[Config], Any]:
    def asked_for(config: Config) -> bool:
        zero = config.get("zero_optimization") or {}
        section = zero.get(key)
        return bool(zero.get(old_key) or (section and section.get("device", "cpu") not in (None, "none")))

    return asked_for


def _in(section: str, key: str = "enabled", *, beyond: int | None = None) -> Callable[[Config], Any]:
    """Whether ``key`` of ``section`` is set; with ``beyond``, whether it is a number larger than that."""

    def asked_for(config: Config) -> bool:
        value = (config.get(section) or {}).get(key)
        return bool(value) if beyond is None else (value or beyond) > beyond

    return asked_for


REFUSED = (
    Refusal(
        "zero_optimization.offload_optimizer",
        "gradients take another way there, past the reductions of a plan",
        _offload("offload_optimizer", "cpu_offload"),
    ),
    Refusal(
        "zero_optimization.offload_param",
        "a plan has priced parameters on the device",
        _offload("offload_param", "cpu_offload_param"),
    ),
    Refusal(
        "zero_optimization.zero_hpz_partition_size (hpZ)",
        "its second copy of a parameter knows one partition group; a plan with sharding inside a node does the same per unit",
        lambda config: (_zero("zero_hpz_partition_size")(config) or 1) > 1,
    ),
    *(
        Refusal(
            f"zero_optimization.{key} (ZeRO++)", "quantised collectives run past the groups of a plan, unpriced", _zero(key)
        )
        for key in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
    ),
    Refusal("zero_optimization.zenflow (ZenFlow)", "it takes over gradients and the optimizer step", _zero("zenflow")),
    Refusal(
        "zero_optimization.stage3_use_all_reduce_for_fetch_params",
        "it gathers every parameter over all ranks, whatever its group",
        _zero("stage3_use_all_reduce_for_fetch_params"),
    ),
    Refusal(
        "zero_optimization.memory_efficient_linear: false",
        "every linear layer then keeps its gathered weight from forward to backward, which is not priced",
        lambda config: _zero("memory_efficient_linear")(config) is False,
    ),
    Refusal(
        "zero_optimization.stage3_module_granularity_threshold",
        "it gathers other modules together than were planned; name leaf modules instead",
        _zero("stage3_module_granularity_threshold"),
    ),
    Refusal(
        "compile.deepcompile (DeepCompile)",
        "the compiler schedules the gathers itself, without hooks",
        _in("compile", "deepcompile"),
    ),
    Refusal("compile.passes", "DeepSpeed's compiler passes rewrite what was planned", _in("compile", "passes")),
    Refusal(
        "expert_parallel (AutoEP)",
        "it gives partition groups to parameters itself, and ranks hold different experts",
        _in("expert_parallel"),
    ),
    Refusal(
        "tensor_parallel (AutoTP)", "ranks hold different parts of the model", _in("tensor_parallel", "autotp_size", beyond=1)
    ),
    Refusal(
        "sequence_parallel_size",
        "gradients are averaged over fewer ranks than a plan reduces over",
        lambda config: (config.get("sequence_parallel_size") or 1) > 1,
    ),
    Refusal(
        "torch_autocast",
        "parameters are gathered and reduced in several types, and a plan has priced one; use bf16",
        _in("torch_autocast"),
    ),
    Refusal("hybrid_engine", "it changes modules between training and generation", _in("hybrid_engine")),
    Refusal("amp", "Apex patches the optimizer; use bf16 or fp16", _in("amp")),
    Refusal("compression_training", "it changes weights and modules during training", lambda c: c.get("compression_training")),
    Refusal("quantize_training", "it changes weights after the step", _in("quantize_training")),
    *(
        Refusal(
            f"{kind}.{kind}_master_weights_and_grads",
            "it needs optimizer offload",
            _in(kind, f"{kind}_master_weights_and_grads"),
        )
        for kind in ("bf16", "fp16")
    ),
    Refusal(
        "gradient_predivide_factor",
        "a plan divides before it adds, once",
        lambda config: config.get("gradient_predivide_factor", 1.0) != 1.0,
    ),
    Refusal("prescale_gradients", "a plan divides before it adds, once", lambda config: config.get("prescale_gradients")),
    Refusal(
        "gradient_allreduce_op other than mean",
        "a plan averages",
        lambda config: config.get("gradient_allreduce_op", "mean") != "mean",
    ),
)


def refuse_unsupported(ds_config: Config, *, optimizer: Any = None) -> None:
    """Refuse, by name, what a plan cannot be combined with.

    Args:
        ds_config: the whole DeepSpeed configuration.
        optimizer: the user's own optimizer object, if there is one.

    Raises:
        UnsupportedError: naming the first such setting, why, and what to do.
        ConfigError: the ZeRO stage is not 3.
    """
    stage = _zero("stage")(ds_config) or 0
    if stage != 3:
        raise ConfigError(
            f"osdp plans the stages of single units inside ZeRO-3, and zero_optimization.stage is {stage!r}: set it to 3, "
            "or remove the osdp section"
        )
    for refusal in REFUSED:
        if refusal.asked_for(ds_config):
            raise UnsupportedError(
                f"{refusal.name} cannot be combined with osdp: {refusal.reason}. Remove it, or set osdp.enabled to false to "
                "train with stock ZeRO-3"
            )
    name = str((ds_config.get("optimizer") or {}).get("type") or type(optimizer).__name__)
    if name.lower() in NOT_ELEMENTWISE:
        raise UnsupportedError(
            f"the optimizer {name} cannot be combined with osdp: to update an element it looks at the whole tensor, and gets "
            "flat pieces from ZeRO-3, other ones from every plan. Use one that looks at each element alone (the Adam family, "
            "SGD, Lion, Adagrad, RMSprop), or set osdp.enabled to false"
        )
