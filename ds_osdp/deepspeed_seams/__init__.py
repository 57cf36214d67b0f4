"""The one door to DeepSpeed: every private name this package uses is behind it."""

from ds_osdp.deepspeed_seams.engine import (
    PlannedEngine,
    applying,
    attach,
    install,
    installed,
    is_destroyed,
    state_bytes,
    state_tensors,
    uninstall,
)
from ds_osdp.deepspeed_seams.placement import full_shapes
from ds_osdp.deepspeed_seams.ranks import (
    broadcast_from_rank_zero,
    gather_from_all_ranks,
    init_distributed,
    least_of_all_ranks,
    log_on_rank_zero,
    most_memory_held,
    on_every_rank,
    same_on_every_rank,
)
from ds_osdp.deepspeed_seams.reading import read_config
from ds_osdp.deepspeed_seams.seams import SEAMS, check_seams, missing_seams
from ds_osdp.deepspeed_seams.slices import join_slices, split_slices

__all__ = [
    "SEAMS",
    "PlannedEngine",
    "applying",
    "attach",
    "broadcast_from_rank_zero",
    "check_seams",
    "full_shapes",
    "gather_from_all_ranks",
    "init_distributed",
    "install",
    "installed",
    "is_destroyed",
    "join_slices",
    "least_of_all_ranks",
    "log_on_rank_zero",
    "missing_seams",
    "most_memory_held",
    "on_every_rank",
    "read_config",
    "same_on_every_rank",
    "split_slices",
    "state_bytes",
    "state_tensors",
    "uninstall",
]
