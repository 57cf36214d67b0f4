"""A plan: the stage of every unit, with its totals, its certificate and its provenance; a JSON file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, ClassVar

from pydantic import JsonValue, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from ds_osdp.errors import PlanMismatchError
from ds_osdp.frozen import Document, Frozen, fingerprint

__all__ = ["CommunicationSizes", "Plan", "Provenance", "Stage", "UnitPlan", "model_fingerprint"]


class Stage(IntEnum):
    """The ZeRO stage of one unit: what is kept whole on every rank, and what is spread."""

    REPLICATED = 0
    """Everything whole on every rank; one all-reduce per optimizer step."""
    OPTIMIZER_STATES = 1
    """Optimizer states spread; one reduce-scatter and one all-gather per optimizer step."""
    GRADIENTS = 2
    """Gradients spread too; a reduce-scatter per micro-step, one all-gather per optimizer step."""
    FULLY_SHARDED = 3
    """1/N of everything; gathered around each use, a reduce-scatter per micro-step."""


class UnitPlan(Frozen):
    """What was decided for one unit."""

    name: str
    stage: Stage
    degree: PositiveInt
    """Over how many ranks its partitioned states are spread; 1 for a replicated unit."""
    slices: PositiveInt = 1
    """Pieces of its weight that are gathered, used and freed in turn."""
    whole_slices: NonNegativeInt = 0
    """How many of them, the first ones, every rank holds whole (stage 0)."""
    recompute: bool = False
    parameters: tuple[str, ...]
    """Names of its parameters in the model, each under its first name."""
    elements: NonNegativeInt
    """Elements of all its parameters."""
    held_bytes: NonNegativeInt = 0
    """Predicted: what a rank holds of it between steps."""
    busy_seconds: NonNegativeFloat = 0.0
    """Predicted: what its computation and its communication take in one optimizer step, hidden or not."""


class CommunicationSizes(Frozen):
    """DeepSpeed's sizes of communication, in elements; a plan is priced and applied with them.

    They are the keys of ``zero_optimization`` in the DeepSpeed JSON; there all but the first begin with ``stage3_``.
    """

    reduce_bucket_size: PositiveInt
    """Gradients reduced together; a buffer of this size is allocated at start."""
    prefetch_bucket_size: NonNegativeInt
    """How far gathers may run ahead."""
    max_live_parameters: NonNegativeInt
    """How much may be gathered at once."""
    max_reuse_distance: NonNegativeInt
    """What is used again within this distance stays gathered: all from forward to backward, or nothing."""


class Provenance(Frozen):
    """Where a plan comes from: enough to make it again, and to see what it was made for."""

    model: str
    model_fingerprint: str
    """Hash of the names and shapes of all parameters."""
    cluster: str
    sample: str
    solver: str
    ds_osdp_version: str
    question: dict[str, JsonValue] | None = None
    """The JSON form of a :class:`ds_osdp.question.Question`, in plans that were saved: all that made the plan."""


def model_fingerprint(shapes: Mapping[str, Sequence[int]]) -> str:
    """Hash of the names and full shapes of a model's parameters: which model a plan belongs to."""
    return fingerprint(sorted([name, list(shape)] for name, shape in shapes.items()))


class Plan(Document):
    """The chosen option of every unit, in the order in which one forward runs them.

    Seconds are predicted for one optimizer step; bytes are per rank.
    """

    FORMAT: ClassVar[str] = "ds_osdp.plan"
    VERSION: ClassVar[int] = 1

    world_size: PositiveInt
    micro_batch: PositiveInt
    accumulation: PositiveInt
    step_seconds: NonNegativeFloat
    bound_seconds: NonNegativeFloat
    """No plan under the same budget can be predicted faster than this."""
    gap: NonNegativeFloat
    """(step - bound) / step: 0 means proven optimal."""
    samples_per_second: NonNegativeFloat
    budget_bytes: PositiveInt
    resident_bytes: NonNegativeInt
    """Parameters, gradients and optimizer states held between steps."""
    peak_bytes: NonNegativeInt
    peak_moment: str
    sizes: CommunicationSizes
    deferred_bucket_bytes: PositiveInt
    """How many bytes are sent together of what is sent once per optimizer step: reductions of stages 0 and 1 and between
    nodes, and the gathers behind the step of stages 1 and 2."""
    units: tuple[UnitPlan, ...]
    provenance: Provenance

    @property
    def plan_hash(self) -> str:
        """Hash of what is applied: equal on all ranks, or the job must not start."""
        units = [unit.model_dump(mode="json", exclude={"held_bytes", "busy_seconds"}) for unit in self.units]
        sizes = {**self.sizes.model_dump(), "deferred_bucket_bytes": self.deferred_bucket_bytes}
        return fingerprint({"world_size": self.world_size, "sizes": sizes, "units": units})

    @property
    def stage_of(self) -> dict[str, Stage]:
        """The stage of every parameter, by its name."""
        return {parameter: unit.stage for unit in self.units for parameter in unit.parameters}

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; ``plan_hash`` stands in it for people and for the check when it is read."""
        return {**super().to_dict(), "plan_hash": self.plan_hash}

    @model_validator(mode="before")
    @classmethod
    def _check_hash(cls, value: Any) -> Any:
        if not isinstance(value, dict) or "plan_hash" not in value:
            return value
        stated = value["plan_hash"]
        plan = cls.model_validate({k: v for k, v in value.items() if k != "plan_hash"})
        if plan.plan_hash != stated:
            raise ValueError(
                f"its units hash to {plan.plan_hash}, not to the plan_hash {stated} it states: the file was changed or "
                "cut. If the change is meant, remove its 'plan_hash'"
            )
        return plan.model_dump()

    def check_belongs(self, parameters: Mapping[str, Sequence[int]], world_size: int) -> None:
        """Check that this plan was made for a model with these parameters (name to full shape) on ``world_size`` ranks.

        Raises:
            PlanMismatchError: naming what differs.
        """
        if world_size != self.world_size:
            raise PlanMismatchError(
                f"the plan was made for {self.world_size} ranks and the job has {world_size}: plan again, or run on "
                f"{self.world_size}"
            )
        planned = set(self.stage_of)
        missing, foreign = sorted(parameters.keys() - planned), sorted(planned - parameters.keys())
        if missing or foreign:
            raise PlanMismatchError(
                f"the plan belongs to another model ({self.provenance.model}): "
                + "; ".join(
                    f"{len(names)} parameters {what}, such as {names[0]!r}"
                    for names, what in ((missing, "are not in the plan"), (foreign, "are in the plan only"))
                    if names
                )
            )
        if model_fingerprint(parameters) != self.provenance.model_fingerprint:
            raise PlanMismatchError(
                f"the plan belongs to another size of {self.provenance.model}: parameters have the same names and other "
                "shapes. Plan again"
            )
