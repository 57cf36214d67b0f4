"""Profile a model for a job: with the input its configuration describes, or the one the model tells."""

from __future__ import annotations

import torch
from torch import nn

from ds_osdp.config import SECTION, OsdpConfig
from ds_osdp.errors import ConfigError
from ds_osdp.job import Job
from ds_osdp.measure.sample import Sample, sample_for
from ds_osdp.measure.trace import profile_model
from ds_osdp.measure.units import owned_parameters
from ds_osdp.profile import ModelProfile, UnitProfile

__all__ = ["profile_for", "profile_parameters", "sample_of"]


def profile_for(section: OsdpConfig, model: nn.Module, job: Job, sequence_length: int | None = None) -> ModelProfile:
    """The profile of ``model`` for one micro-batch of ``job``, in the precision DeepSpeed will cast it to.

    Args:
        section: its ``input``, if there is one, describes a sample.
        model: the model; on any device, or partitioned by ``deepspeed.zero.Init``.
        job: micro-batch and precision.
        sequence_length: tokens of a sample, for a model that tells its input.

    Raises:
        ConfigError: neither the section nor the model says what the model takes.
        ProfileError: the model cannot be traced.
    """
    return profile_model(
        model, sample_of(section, model, job.micro_batch, sequence_length), dtype=getattr(torch, job.parameter_dtype)
    )


def sample_of(section: OsdpConfig, model: nn.Module, micro_batch: int, sequence_length: int | None = None) -> Sample:
    """The input of one micro-step of ``micro_batch`` samples, as the section describes it or the model tells.

    Raises:
        ConfigError: neither does.
    """
    if section.input is not None:
        return Sample.from_config(section.input, micro_batch)
    sample = sample_for(model, micro_batch, sequence_length)
    if sample is None:
        raise ConfigError(
            f"{type(model).__name__} cannot tell what it takes as input: describe one sample in {SECTION}.input, such as "
            '{"input_ids": {"shape": [1024], "dtype": "int64"}} (names of forward\'s arguments, shapes without the batch)'
        )
    return sample


def profile_parameters(model: nn.Module, micro_batch: int) -> ModelProfile:
    """The profile of a model of which nothing is known yet but its parameters: units in the order of definition."""
    units = tuple(UnitProfile(name=name, parameters=owned) for name, owned in owned_parameters(model).items())
    return ModelProfile(model=type(model).__name__, micro_batch=micro_batch, sample="not seen yet", units=units)
