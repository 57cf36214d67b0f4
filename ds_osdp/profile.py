"""What is known about a model before it is planned: its units, their parameters, work and activations."""

from __future__ import annotations

from functools import cached_property
from math import prod
from typing import ClassVar

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from ds_osdp.frozen import Document, Frozen

__all__ = ["DTYPE_BYTES", "ModelProfile", "ParameterProfile", "UnitProfile", "Work"]

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


class ParameterProfile(Frozen):
    """One parameter tensor, under its first name in the model; a tied one is listed once."""

    name: str
    shape: tuple[NonNegativeInt, ...]
    dtype: str
    trainable: bool
    split_rows: PositiveInt = 1
    """Rows along which it can be split into slices; 1 if it cannot."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


class Work(Frozen):
    """Device work: counted, and priced by a cluster's rates; or measured, and worth the seconds it took."""

    flops: NonNegativeInt = 0
    """Floating-point operations of matrix products, convolutions and attention (a multiply-add counts two)."""
    bytes_moved: NonNegativeInt = 0
    """Bytes read and written by all other operators: those are bound by memory, not by arithmetic."""
    seconds: NonNegativeFloat | None = None
    """What it took on the device that will train; None where nothing was measured.  It stands for both counts."""


class UnitProfile(Frozen):
    """The smallest module planned as a whole: it owns parameters.

    Operators that run between two units (residual additions, attention without parameters) count with the
    unit that ran last, so that the sums over units are those of the model.
    """

    name: str
    """Path of the module, as ``named_modules`` says it; ``""`` is the model itself."""
    parameters: tuple[ParameterProfile, ...]
    forward: Work = Work()
    backward: Work = Work()
    activation_bytes: NonNegativeInt = 0
    """Bytes saved by one forward of one micro-batch and alive until this unit's backward."""
    transient_bytes: NonNegativeInt = 0
    """Most bytes of working tensors alive at once during its forward, beyond what is saved."""
    backward_transient_bytes: NonNegativeInt = 0
    """The same during its backward; gradients are working tensors, alive until they are reduced."""
    viewed_bytes: NonNegativeInt = 0
    """Bytes of its parameters of which views are saved for backward: those keep alive what was gathered."""
    output_bytes: NonNegativeInt = 0
    """Bytes of the tensors its forward returns, of all calls together."""
    recomputes: bool = False
    """Whether the model computes it again in backward (activation checkpointing)."""

    recomputable: bool = False
    """Whether its activations may be computed again in backward."""

    @property
    def numel(self) -> int:
        """Elements of all its parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def split_rows(self) -> int:
        """Rows along which it can be split into slices, all parameters that can be together; 1 if none can."""
        return max((parameter.split_rows for parameter in self.parameters), default=1)


class ModelProfile(Document):
    """The units of a model in the order in which one forward runs them, for one micro-batch."""

    FORMAT: ClassVar[str] = "ds_osdp.profile"
    VERSION: ClassVar[int] = 1

    model: str
    """Class name of the model."""
    micro_batch: PositiveInt
    """Samples of the traced micro-batch."""
    sample: str
    """The traced input, for people: ``input_ids int64[2, 1024]``."""
    units: tuple[UnitProfile, ...]

    buffer_bytes: NonNegativeInt = 0
    """Bytes of buffers, which every rank holds whole."""

    @property
    def parameters(self) -> tuple[ParameterProfile, ...]:
        """All parameters, in the order of their units."""
        return tuple(parameter for unit in self.units for parameter in unit.parameters)

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """Per unit, the number of its sort: units of one sort cost the same, whatever they are called."""
        sorts: dict[object, int] = {}
        return tuple(sorts.setdefault(_anonymous(unit), len(sorts)) for unit in self.units)


def _anonymous(unit: UnitProfile) -> object:
    """All of a unit but its names."""
    return (
        tuple((p.shape, p.dtype, p.trainable, p.split_rows) for p in unit.parameters),
        *((work.flops, work.bytes_moved, work.seconds) for work in (unit.forward, unit.backward)),
        *(unit.activation_bytes, unit.transient_bytes, unit.backward_transient_bytes, unit.viewed_bytes, unit.recomputable),
    )
