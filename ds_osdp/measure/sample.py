"""The input a model is traced with: names, shapes and dtypes, and no data."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ds_osdp.config import TensorSpec
from ds_osdp.errors import ProfileError

__all__ = ["InputTensor", "Sample", "sample_for"]

DEFAULT_SEQUENCE_LENGTH = 1024

# How configurations spell the longest sequence a model can take.
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_length", "max_seq_len")
# Sub-configurations that are settings of one model (MPT, DBRX), not models of their own.
_SETTINGS = {"attn_config", "ffn_config"}
# Hugging Face names a model by its head, and the head says what its labels look like.
_TOKEN_HEADS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "ForTokenClassification")
_CLASS_HEADS = ("ForSequenceClassification", "ForImageClassification")


@dataclass(frozen=True, slots=True)
class InputTensor:
    """One keyword argument of a model's ``forward``."""

    name: str
    shape: tuple[int, ...]
    """With the batch dimension, which comes first."""
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.name} {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Sample:
    """The keyword arguments of one forward of one micro-batch."""

    tensors: tuple[InputTensor, ...]

    def __post_init__(self) -> None:
        """Refuse an empty sample."""
        if not self.tensors:
            raise ProfileError("a sample needs at least one tensor: describe the arguments of forward in osdp.input")

    @classmethod
    def from_config(cls, spec: Mapping[str, TensorSpec], micro_batch: int) -> Sample:
        """The sample that ``osdp.input`` describes, with ``micro_batch`` put before each shape."""
        return cls(tuple(InputTensor(n, (micro_batch, *t.shape), getattr(torch, t.dtype)) for n, t in spec.items()))

    @property
    def micro_batch(self) -> int:
        """Number of samples."""
        return self.tensors[0].shape[0]

    def cast(self, dtype: torch.dtype) -> Sample:
        """The same with all floating-point tensors in ``dtype``."""
        return Sample(tuple(replace(t, dtype=dtype) if t.dtype.is_floating_point else t for t in self.tensors))

    def describe(self) -> str:
        """For people: ``input_ids int64[2, 1024]``."""
        return ", ".join(map(str, self.tensors))


def sample_for(model: nn.Module, micro_batch: int, sequence_length: int | None = None) -> Sample | None:
    """The input a model can be traced with, if it can tell.

    Args:
        model: a Hugging Face text or image model, PEFT's wrapper of one, or a module with ``dummy_inputs`` (a mapping
            of example tensors by argument).
        micro_batch: number of samples.
        sequence_length: tokens per sample.  Left out: as many as the model can take, at most 1024.

    Returns:
        The sample, with labels where the head takes them; None when the model cannot tell: it is no such model, or it
        takes images *and* text, speech, video or the like.  There is no padding mask: a micro-batch is taken to be full.
    """
    base: Any = model
    if hasattr(base, "get_base_model"):
        base = base.get_base_model()
    config, main_input = getattr(base, "config", None), getattr(base, "main_input_name", None)
    if main_input is None:
        return _from_dummies(getattr(base, "dummy_inputs", None), micro_batch)
    if set(getattr(config, "sub_configs", None) or ()) - _SETTINGS:
        return None  # Composed of several models: one main input would leave the others out of the trace.
    if main_input == "input_ids":
        length = sequence_length or _sequence_length(config)
        return _hugging_face(base, (InputTensor("input_ids", (micro_batch, length), torch.int64),))
    size = _image_size(config)
    if main_input == "pixel_values" and size is not None:
        shape = (micro_batch, getattr(config, "num_channels", 3), *size)
        return _hugging_face(base, (InputTensor("pixel_values", shape, torch.float32),))
    return None


def _hugging_face(model: Any, inputs: tuple[InputTensor, ...]) -> Sample:
    """``inputs`` and what the forward wants beside them."""
    takes = inspect.signature(model.forward).parameters
    main = inputs[0]
    # A user's subclass keeps its head under another name.
    classes = [cls.__name__ for cls in type(model).__mro__]
    if "labels" in takes and any(name.endswith(_TOKEN_HEADS) for name in classes):
        return Sample((*inputs, InputTensor("labels", main.shape, torch.int64)))
    if "decoder_input_ids" in takes:
        inputs = (*inputs, InputTensor("decoder_input_ids", main.shape, torch.int64))
    if "labels" in takes and any(name.endswith(_CLASS_HEADS) for name in classes):
        regression = model.config.num_labels == 1
        inputs = (*inputs, InputTensor("labels", main.shape[:1], torch.float32 if regression else torch.int64))
    return Sample(inputs)


def _sequence_length(config: Any) -> int:
    known = [length for name in _LENGTHS if isinstance(length := getattr(config, name, None), int) and length > 0]
    return min([*known, DEFAULT_SEQUENCE_LENGTH])


def _image_size(config: Any) -> tuple[int, int] | None:
    size = getattr(config, "image_size", None)
    if hasattr(config, "num_frames"):
        return None  # A video: the layout of its frames is the model's own.
    if isinstance(size, int):
        return size, size
    return (size[0], size[1]) if isinstance(size, (list, tuple)) and len(size) == 2 else None


def _from_dummies(dummies: Any, micro_batch: int) -> Sample | None:
    if not isinstance(dummies, Mapping) or not dummies:
        return None
    if not all(isinstance(tensor, torch.Tensor) and tensor.dim() for tensor in dummies.values()):
        return None
    return Sample(tuple(InputTensor(n, (micro_batch, *t.shape[1:]), t.dtype) for n, t in dummies.items()))
