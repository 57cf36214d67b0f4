"""Profile a model for a job: with the input its configuration describes, or the one the model tells."""

from __future__ import annotations

import torch
from torch import nn

from ds_osdp.config import SECTION, OsdpConfig
from ds_osdp.errors import ConfigError
from ds_osdp.job import Job
from ds_osdp.measure.sample import Sample, sample_for
from ds_osdp.measure.trace import profile_model
from ds_osdp.profile import ModelProfile

__all__ = ["profile_for"]


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
    sample = (
        Sample.from_config(section.input, job.micro_batch)
        if section.input is not None
        else sample_for(model, job.micro_batch, sequence_length)
    )
    if sample is None:
        raise ConfigError(
            f"{type(model).__name__} cannot tell what it takes as input: describe one sample in {SECTION}.input, such as "
            '{"input_ids": {"shape": [1024], "dtype": "int64"}} (names of forward\'s arguments, shapes without the batch)'
        )
    return profile_model(model, sample, dtype=getattr(torch, job.parameter_dtype))
