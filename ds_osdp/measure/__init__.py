"""Measure: a torch module becomes a profile, a process group a cluster."""

from ds_osdp.measure.at_work import UnitAtWork
from ds_osdp.measure.configured import profile_for, sample_of
from ds_osdp.measure.fake import ShapeRunner, tensors_in
from ds_osdp.measure.links import free_bytes, measure_cluster, measure_device
from ds_osdp.measure.meter import MemoryMeter
from ds_osdp.measure.observe import Observer, observe
from ds_osdp.measure.optimizer import optimizer_memory
from ds_osdp.measure.sample import InputTensor, Sample, sample_for
from ds_osdp.measure.trace import profile_model

__all__ = [
    "InputTensor",
    "MemoryMeter",
    "Observer",
    "Sample",
    "ShapeRunner",
    "UnitAtWork",
    "free_bytes",
    "measure_cluster",
    "measure_device",
    "observe",
    "optimizer_memory",
    "profile_for",
    "profile_model",
    "sample_for",
    "sample_of",
    "tensors_in",
]
