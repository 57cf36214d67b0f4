"""What a price needs to know of a DeepSpeed JSON: batch sizes, precision, optimizer states and communication sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import NonNegativeInt, PositiveInt

from ds_osdp.errors import ConfigError
from ds_osdp.plan import CommunicationSizes

__all__ = ["Job", "OptimizerMemory", "job_from_config"]

# By our name: DeepSpeed's key in zero_optimization and its default (runtime/zero/config.py), where the JSON is silent.
_SIZES = {
    "reduce_bucket_size": ("reduce_bucket_size", 500_000_000),
    "prefetch_bucket_size": ("stage3_prefetch_bucket_size", 50_000_000),
    "max_live_parameters": ("stage3_max_live_parameters", 1_000_000_000),
    "max_reuse_distance": ("stage3_max_reuse_distance", 1_000_000_000),
}
_SUB_GROUP = 1_000_000_000


class OptimizerMemory(NamedTuple):
    """What an optimizer holds and needs, in fp32 values per parameter element."""

    states: int
    """Kept between steps."""
    temporaries: int
    """Alive at once during a step, the gradient aside."""


# By DeepSpeed's and torch's optimizer names in lower case: the kernels of the former need no temporaries; those of the latter
# were counted (``measure.optimizer_memory``), the larger of "foreach" and one by one.  Partitions are flat, which an
# Adafactor cannot factor.
_OPTIMIZERS = {
    **dict.fromkeys(("adam", "adamw", "fusedadam", "deepspeedcpuadam"), OptimizerMemory(2, 0)),
    **dict.fromkeys(("lion", "fusedlion"), OptimizerMemory(1, 0)),
    **dict.fromkeys(("nadam", "radam", "adadelta"), OptimizerMemory(2, 2)),
    **dict.fromkeys(("adagrad", "adafactor"), OptimizerMemory(1, 2)),
    "adamax": OptimizerMemory(2, 1),
    "rmsprop": OptimizerMemory(1, 1),
}


class Job(CommunicationSizes):
    """One training job, as far as prices depend on it.  Sizes are elements, as DeepSpeed counts them."""

    world_size: PositiveInt
    micro_batch: PositiveInt
    accumulation: PositiveInt
    parameter_dtype: str
    gradient_dtype: str
    """In which gradients accumulate."""
    communication_dtype: str
    """In which gradients are reduced."""
    optimizer_states: NonNegativeInt
    """fp32 values the optimizer keeps per parameter element: 2 for Adam."""
    optimizer_temporaries: NonNegativeInt = 0
    """fp32 values per parameter element that the optimizer needs while it updates them."""
    sub_group_size: PositiveInt
    open_sizes: tuple[str, ...] = ()
    """Names of the communication sizes that the JSON leaves to the plan."""

    @property
    def sizes(self) -> CommunicationSizes:
        """The communication sizes alone."""
        return CommunicationSizes(**{name: getattr(self, name) for name in CommunicationSizes.model_fields})

    @property
    def train_batch_size(self) -> int:
        """Samples of one optimizer step on all ranks."""
        return self.micro_batch * self.accumulation * self.world_size

    def with_micro_batch(self, micro_batch: int) -> Job | None:
        """The same global batch in micro-steps of ``micro_batch`` samples; None if it does not divide."""
        accumulation, rest = divmod(self.train_batch_size, micro_batch * self.world_size)
        return None if rest else self.model_copy(update={"micro_batch": micro_batch, "accumulation": accumulation})


def job_from_config(ds_config: Mapping[str, Any], world_size: int, *, optimizer: OptimizerMemory | None = None) -> Job:
    """Read the job out of a DeepSpeed configuration.

    Args:
        ds_config: the whole DeepSpeed configuration, without ``"auto"`` in the keys read here.
        world_size: number of data-parallel ranks.
        optimizer: measured of the user's own optimizer object, which DeepSpeed prefers to the one the configuration names.

    Raises:
        ConfigError: a value is missing or is no number.
    """
    zero = ds_config.get("zero_optimization") or {}
    parameter_dtype = next(
        (dtype for key, dtype in (("bf16", "bfloat16"), ("fp16", "float16")) if (ds_config.get(key) or {}).get("enabled")),
        "float32",
    )
    accumulated = (ds_config.get("data_types") or {}).get("grad_accum_dtype")
    micro_batch, accumulation = _batch_sizes(ds_config, world_size)
    update = optimizer or _optimizer_memory(ds_config.get("optimizer") or {})
    return Job(
        world_size=world_size,
        micro_batch=micro_batch,
        accumulation=accumulation,
        parameter_dtype=parameter_dtype,
        gradient_dtype=_dtype(accumulated) or parameter_dtype,
        communication_dtype=_dtype(ds_config.get("communication_data_type")) or parameter_dtype,
        optimizer_states=update.states,
        optimizer_temporaries=update.temporaries,
        sub_group_size=_count(zero, "sub_group_size", _SUB_GROUP),
        open_sizes=tuple(name for name, (key, _) in _SIZES.items() if key not in zero),
        **{name: _count(zero, key, default) for name, (key, default) in _SIZES.items()},
    )


def _count(section: Mapping[str, Any], key: str, default: int) -> int:
    value = section.get(key, default)
    try:
        return int(value)
    except (TypeError, ValueError):
        raise ConfigError(f"zero_optimization.{key} is {value!r}, not a number: osdp needs it to predict memory") from None


def _dtype(name: Any) -> str | None:
    names = {
        "fp32": "float32", "float32": "float32", "fp16": "float16", "float16": "float16", "half": "float16",
        "bf16": "bfloat16", "bfp16": "bfloat16", "bfloat16": "bfloat16",
    }  # fmt: skip
    if name is None:
        return None
    if str(name).lower() not in names:
        raise ConfigError(f"{name!r} is no data type DeepSpeed knows: use one of {', '.join(names)}")
    return names[str(name).lower()]


def _batch_sizes(ds_config: Mapping[str, Any], world_size: int) -> tuple[int, int]:
    """Micro-batch and accumulation, completed as DeepSpeed does (``_set_batch_related_parameters``)."""
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    values = [ds_config.get(key) for key in keys]
    for key, value in zip(keys, values, strict=True):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"{key} is {value!r}: osdp needs a positive number to plan with")
    train, micro, accumulation = values
    if micro is not None:
        accumulation = accumulation or (train // (world_size * micro) if train is not None else 1)
    elif train is not None:
        accumulation = accumulation or 1
        micro = train // (world_size * accumulation)
    else:
        raise ConfigError("the DeepSpeed configuration gives neither train_batch_size nor train_micro_batch_size_per_gpu")
    if micro < 1 or accumulation < 1 or (train is not None and train != micro * accumulation * world_size):
        raise ConfigError(
            f"train_batch_size {train} is not micro-batch {micro} x accumulation {accumulation} x {world_size} ranks"
        )
    return micro, accumulation


def _optimizer_memory(section: Mapping[str, Any]) -> OptimizerMemory:
    name, parameters = str(section.get("type", "")).lower(), section.get("params") or {}
    if name == "sgd":
        return OptimizerMemory(
            bool(parameters.get("momentum")), bool(parameters.get("weight_decay") or parameters.get("nesterov"))
        )
    # Two is what Adam keeps; an optimizer that is not in the table is taken for the costliest common one.
    states, temporaries = _OPTIMIZERS.get(name, OptimizerMemory(2, 2))
    if name in ("adam", "adamw") and parameters.get("torch_adam") and not parameters.get("fused"):
        temporaries = 1 if parameters.get("foreach") else 2
    return OptimizerMemory(
        states + bool(parameters.get("amsgrad") or (name == "rmsprop" and parameters.get("momentum"))), temporaries
    )
