"""Measure: a torch module becomes a profile, a process group a cluster."""

from ds_osdp.measure.at_work import UnitAtWork
from ds_osdp.measure.calibration import cluster_of_this_job
from ds_osdp.measure.configured import profile_for, profile_parameters, sample_of
from ds_osdp.measure.device import free_bytes, measure_device
from ds_osdp.measure.fake import ShapeRunner, tensors_in
from ds_osdp.measure.links import SHORT, THOROUGH, machines_of_this_job, measure_cluster, ranks_per_node
from ds_osdp.measure.meter import MemoryMeter
from ds_osdp.measure.observe import Observer, observe
from ds_osdp.measure.optimizer import optimizer_memory
from ds_osdp.measure.ranks import joined_ranks
from ds_osdp.measure.sample import InputTensor, Sample, sample_for
from ds_osdp.measure.trace import profile_model

__all__ = [
    "SHORT",
    "THOROUGH",
    "InputTensor",
    "MemoryMeter",
    "Observer",
    "Sample",
    "ShapeRunner",
    "UnitAtWork",
    "cluster_of_this_job",
    "free_bytes",
    "joined_ranks",
    "machines_of_this_job",
    "measure_cluster",
    "measure_device",
    "observe",
    "optimizer_memory",
    "profile_for",
    "profile_model",
    "profile_parameters",
    "ranks_per_node",
    "sample_for",
    "sample_of",
    "tensors_in",
]
