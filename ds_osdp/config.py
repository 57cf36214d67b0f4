"""The ``osdp`` section of a DeepSpeed JSON: found, validated once, and never guessed at."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    WithJsonSchema,
    field_validator,
)

from ds_osdp.cluster import Cluster
from ds_osdp.errors import ConfigError
from ds_osdp.frozen import Frozen, one_line
from ds_osdp.plan import Stage
from ds_osdp.profile import DTYPE_BYTES
from ds_osdp.quantities import parse_bytes

__all__ = ["BUDGET_SHARE", "SECTION", "OsdpConfig", "ReplanConfig", "Rule", "SolverConfig", "TensorSpec", "find_section"]

SECTION = "osdp"

BUDGET_SHARE = 0.9
"""Of a device's memory that a plan may use when no budget is given: the rest is for what a prediction cannot know
(fragments, the caching allocator)."""

Bytes = Annotated[int, BeforeValidator(parse_bytes, json_schema_input_type=int | str)]


class _Section(Frozen):
    """Part of the configuration: its docstrings are also what its JSON Schema says."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class Rule(_Section):
    """What the user pins: parameters whose name matches get this stage; the first rule that matches wins."""

    match: str = Field(min_length=1)
    """Shell-style pattern over parameter names, such as ``*.layers.0.*``."""
    stage: Stage
    """The ZeRO stage they get."""


class TensorSpec(_Section):
    """One tensor of one sample."""

    shape: tuple[PositiveInt, ...]
    """Without the batch dimension, which comes first and is the micro-batch."""
    dtype: str = "int64"
    """Of its elements, as torch calls it."""

    @field_validator("dtype")
    @classmethod
    def _known_dtype(cls, value: str) -> str:
        if value not in DTYPE_BYTES:
            raise ValueError(f"unknown dtype {value!r}; known are {', '.join(DTYPE_BYTES)}")
        return value


class SolverConfig(_Section):
    """How long and how exactly to search."""

    time_limit_s: PositiveFloat = 30.0
    """Seconds after which the best plan found so far is taken, with its honest gap."""
    gap: float = Field(0.0, ge=0.0, lt=1.0)
    """Relative distance to the bound at which the search may stop; 0 asks for a proven optimum."""


class ReplanConfig(_Section):
    """When to plan from what is seen while the job trains."""

    after_steps: PositiveInt = 5
    """Optimizer steps to look at before a plan; also how often ranks compare what they see after that."""
    drift: PositiveFloat = 0.2
    """Relative change of the step time, with another size of input, after which the job plans again."""
    min_interval_steps: PositiveInt = 100
    """Fewest optimizer steps from one plan to the next."""


class OsdpConfig(_Section):
    """The ``osdp`` section.  Leave a key out to have it chosen: there is no ``"auto"``."""

    enabled: bool = True
    """False trains with stock ZeRO-3."""
    memory_budget: Bytes | None = None
    """Bytes per rank a plan may use, or text such as ``"14GiB"``.  Left out: 90% of the device's free memory, the
    smallest of all ranks."""
    stages: tuple[Stage, ...] = Field(tuple(Stage), min_length=1)
    """The ZeRO stages a plan may use."""
    max_slices: int = Field(8, ge=1)
    """Into how many slices a plan may split one unit; it splits only what lowers a peak that binds.  1: none."""
    rules: tuple[Rule, ...] = ()
    """Parameters the user pins to a stage.  A rule that matches nothing is an error."""
    micro_batch: tuple[PositiveInt, ...] = ()
    """Micro-batches to choose from for the same global batch.  The choice is applied where DeepSpeed builds the loader
    (``training_data``), and is advice in the log where the user does."""
    input: dict[str, TensorSpec] | None = None
    """Shapes and dtypes of one sample by argument of the model's ``forward``, for models that cannot tell."""
    cluster: Annotated[Cluster | str | None, WithJsonSchema({"type": ["object", "string", "null"]})] = None
    """A cluster file, or its content.  Left out: the links are measured when the job starts."""
    plan: str | None = None
    """A saved plan: apply it and solve nothing."""
    save_plan: str | None = None
    """Where rank 0 writes the plan it applies."""
    replan: ReplanConfig | Literal[False] | None = None
    """Begin at stage 3, plan from what the first steps of training show, and again when that changes.  Left out: done for
    models that cannot tell their input, unless ``plan``, ``input`` or ``micro_batch`` is given; false: never."""
    solver: SolverConfig = SolverConfig()
    """How long and how exactly to search."""
    check_replicas_every: int = Field(0, ge=0)
    """Compare checksums of all replicated state between ranks every so many optimizer steps; 0 is never."""

    @field_validator("cluster", mode="before")
    @classmethod
    def _inline_cluster(cls, value: Any) -> Any:
        return Cluster.from_dict(value, "osdp.cluster") if isinstance(value, Mapping) else value

    def replans(self, *, model_tells: bool) -> ReplanConfig | None:
        """How to plan while the job trains; None to plan before it.

        Args:
            model_tells: whether the model can be traced without a sample described here.
        """
        if self.replan is None:
            described = model_tells or self.plan is not None or self.input is not None or bool(self.micro_batch)
            return None if described else ReplanConfig()
        return self.replan or None

    def load_cluster(self) -> Cluster | None:
        """The cluster of the section, read from its file if it names one; None if it names none.

        Raises:
            DocumentError: the file cannot be read.
        """
        return Cluster.load(self.cluster) if isinstance(self.cluster, str) else self.cluster


def find_section(ds_config: Mapping[str, Any]) -> OsdpConfig | None:
    """The validated ``osdp`` section of a DeepSpeed configuration, or None where there is none.

    Raises:
        ConfigError: a key is unknown, a value cannot be meant, or the section's own name is misspelt: DeepSpeed
            ignores top-level keys it does not know, so ``opsd`` would train fully sharded and nobody would notice.
    """
    for key in ds_config:
        if key != SECTION and difflib.get_close_matches(str(key).lower(), [SECTION], cutoff=0.7):
            raise ConfigError(f"the DeepSpeed configuration has a section {key!r}; did you mean {SECTION!r}?")
    if SECTION not in ds_config:
        return None
    section = ds_config[SECTION]
    if not isinstance(section, Mapping):
        raise ConfigError(f"{SECTION!r} must be an object such as {{'memory_budget': '14GiB'}}, not {section!r}")
    unknown = [key for key in section if key not in OsdpConfig.model_fields]
    if unknown:
        near = difflib.get_close_matches(str(unknown[0]), OsdpConfig.model_fields, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(OsdpConfig.model_fields)}"
        raise ConfigError(f"{SECTION}.{unknown[0]}: unknown key; {hint}")
    try:
        config = OsdpConfig.model_validate(dict(section))
    except ValidationError as error:
        raise ConfigError(f"{SECTION}: {one_line(error)}") from error
    if config.replan and config.micro_batch:
        raise ConfigError(f"{SECTION}.micro_batch is chosen before training and {SECTION}.replan plans in it: remove one")
    if config.plan is not None and (config.rules or config.save_plan):
        raise ConfigError(f"{SECTION}.plan applies a saved plan as it is: remove {SECTION}.rules and {SECTION}.save_plan")
    for path in (config.plan, config.cluster if isinstance(config.cluster, str) else None):
        if path is not None and not os.path.isfile(path):
            raise ConfigError(f"{SECTION}: there is no file {path!r} (looked in {os.getcwd()})")
    return config
