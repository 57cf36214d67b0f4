"""The table of seams: every private name of DeepSpeed this package leans on, checked before the first is patched.

A seam states the parameters we wrote against, so that a DeepSpeed that moved is an error at start and not a wrong
number at hour nine.  Patches are installed together and undone together; each dispatches on what this package marked
(a pending plan, a planned parameter) and leaves everything else to stock DeepSpeed.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from packaging.version import Version

from ds_osdp.errors import SeamError

__all__ = ["SEAMS", "Patch", "Seam", "check_seams", "missing_seams", "patches_installed"]

_STAGE3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_INIT = "deepspeed.runtime.zero.partition_parameters:Init"
_COORDINATOR = "deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator"
_OFFLOAD = "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload"
_ACCESS = "deepspeed.runtime.zero.parameter_offload:ZeROOrderedDict"
_GATHERED = "deepspeed.runtime.zero.partition_parameters:GatheredParameters"


@dataclass(frozen=True, slots=True)
class Seam:
    """A private callable of DeepSpeed, the parameters we wrote against, and our reason."""

    owner: str
    """``package.module:Class``."""
    name: str
    parameters: tuple[str, ...]
    """The leading parameters after ``self``; DeepSpeed may add to them, not change them."""
    reason: str
    since: str = "0.19.3"
    """The first DeepSpeed that has it."""

    def problem(self) -> str | None:
        """What is wrong with it in the DeepSpeed that is installed; None when nothing is."""
        class_name = self.owner.partition(":")[2]
        try:
            owner = _owner(self.owner)
        except (ImportError, AttributeError):
            return f"{self.owner} is missing"
        if not hasattr(owner, self.name):
            return None if _installed() < Version(self.since) else f"{class_name}.{self.name} is missing"
        found = tuple(inspect.signature(_undecorated(getattr(owner, self.name))).parameters)
        found = found[1:] if found[:1] == ("self",) else found
        if found[: len(self.parameters)] != self.parameters:
            return f"{class_name}.{self.name} takes ({', '.join(found)}), not ({', '.join(self.parameters)})"
        return None


SEAMS = (
    Seam(_ENGINE, "_configure_zero_optimizer", ("optimizer",), "places parameters before they are partitioned"),
    Seam(_ENGINE, "forward", ("inputs",), "an allocation may fail in it, on one rank"),
    Seam(_ENGINE, "backward", ("loss",), "or in this"),
    Seam(_ENGINE, "step", ("lr_kwargs",), "a plan may follow what the steps show"),
    Seam(_ENGINE, "_get_zero_param_shapes", (), "files list parameters in the stock order"),
    Seam(_ENGINE, "_get_zero_frozen_param_attributes", ("attr_func",), "files have what was split under its own name"),
    Seam(_ENGINE, "_get_shared_params", (), "and what is tied to it"),
    Seam(_ENGINE, "_zero3_consolidated_16bit_state_dict", (), "and weights exported whole"),
    Seam(
        _ENGINE, "_save_zero_checkpoint", ("save_path", "tag"), "files are written parameter by parameter, with the plan beside"
    ),
    Seam(
        _ENGINE,
        "load_checkpoint",
        ("load_dir", "tag", "load_module_strict", "load_optimizer_states", "load_lr_scheduler_states", "load_module_only"),
        "a bad file is named on all ranks before any rank begins",
    ),
    Seam(_ENGINE, "_get_ckpt_name", ("checkpoints_path", "tag"), "which files those are"),
    Seam(_ENGINE, "_get_zero_ckpt_name", ("checkpoints_path", "tag"), "and those of the optimizer"),
    Seam(_ENGINE, "_get_param_fragment_func", ("param",), "frozen parameters are saved as this rank's 1/N"),
    Seam(_ENGINE, "load_module_state_dict", ("checkpoint",), "frozen fragments are read back into whole copies"),
    Seam(_STAGE3, "_get_param_partition_group", ("param",), "sub-groups follow the group of each parameter"),
    Seam(_STAGE3, "_create_fp32_partitions", (), "an fp32 parameter need not be held twice"),
    Seam(_STAGE3, "_get_trainable_parameter_groups", (), "the stock order of parameters is remembered before it is split"),
    Seam(
        _STAGE3,
        "reduce_independent_p_g_buckets_and_remove_grads",
        ("param",),
        "gradients that are summed up whole skip the reduce-scatter",
    ),
    Seam(
        _STAGE3,
        "partition_grads",
        ("params_to_release", "grad_partitions"),
        "a node's share of a gradient is averaged over the nodes",
    ),
    Seam(_STAGE3, "independent_gradient_partition_epilogue", (), "deferred reductions are waited for after backward"),
    Seam(_STAGE3, "clear_backward_seen_flag", (), "a new forward: what a failed backward left behind is dropped"),
    Seam(_STAGE3, "reload_states", ("non_blocking",), "gradients get other memory"),
    Seam(_STAGE3, "_pre_step", (), "empties the reduce bucket, of which a plan has one per partition group"),
    Seam(
        _STAGE3,
        "finalize_gradient_accumulation_boundary",
        (),
        "unmanaged accumulation reduces what is deferred at step()",
        since="0.19.8",
    ),
    Seam(_STAGE3, "_get_fp32_grad_state_partition", ("param", "release_swap_buffers"), "the accumulator of one gradient"),
    Seam(_STAGE3, "get_grad_norm_direct", ("gradients", "params"), "norms of copies need no collective"),
    Seam(_STAGE3, "step", ("closure",), "what is kept whole is gathered again after a step, in few collectives"),
    Seam(_STAGE3, "_partition_all_parameters", (), "frees everything before a step and a checkpoint: some need not be"),
    Seam(_STAGE3, "_prepare_fp32_grad_for_sub_group", ("sub_group_id",), "takes a gradient where it lies, without a copy"),
    Seam(_STAGE3, "unscale_and_clip_grads", ("sub_group_id", "total_norm"), "then scales into a copy"),
    Seam(
        _STAGE3,
        "_reassign_or_swap_out_partitioned_parameters",
        ("sub_group_id",),
        "nothing is to be copied to a parameter that is its own master weight",
    ),
    Seam(_STAGE3, "checkpoint_event_epilogue", (), "what is kept whole is gathered again after a checkpoint"),
    Seam(_STAGE3, "_get_param_coordinator", (), "the coordinator frees parameters that no submodule uses"),
    Seam(
        _STAGE3, "_create_fp16_partitions_with_defragmentation", ("fp16_param_groups",), "a moved engine gets new flat tensors"
    ),
    Seam(_STAGE3, "_setup_for_real_optimizer", (), "which this fills, and allocates gradients and buckets anew"),
    Seam(_STAGE3, "_create_fp32_partitions", (), "where master weights and states are those that were moved"),
    Seam(_STAGE3, "initialize_optimizer_states", (), "which are not begun anew"),
    Seam(_STAGE3, "set_grad_positions", (), "places of parameters in the flat tensors change with a move"),
    Seam(_STAGE3, "_rigid_state_dict", (), "optimizer states are saved in the stock layout"),
    Seam(_STAGE3, "_rigid_load_state_dict", ("state_dict", "load_optimizer_states"), "and read from it"),
    Seam(
        _STAGE3,
        "load_hp_checkpoint_state_from_checkpoint_dir_stage3",
        ("checkpoint_dir",),
        "a universal checkpoint gives sub-groups one step tensor to share, which then counts too fast",
    ),
    Seam(_STAGE3, "load_hp_checkpoint_state", ("folder", "key", "param"), "a universal checkpoint has what was split whole"),
    Seam(_COORDINATOR, "reset_step", (), "waits for gathers in flight; those begun after a step need not be waited for yet"),
    Seam(_COORDINATOR, "_invalidate_trace", (), "the order of modules is another once hooks are hung or taken out"),
    Seam(_COORDINATOR, "release_backward_leftovers", (), "a backward that was left in the middle leaves parameters gathered"),
    Seam(_COORDINATOR, "release_and_reset_all", ("module",), "frees everything, and forgets the users of each parameter"),
    Seam(_INIT, "_convert_to_deepspeed_param", ("param",), "reads ds_zero_partition_process_group: the mechanism itself"),
    Seam(_INIT, "_partition_param", ("param",), "re-partitions a parameter that zero.Init spread over the world"),
    Seam(_GATHERED, "__init__", ("params", "modifier_rank"), "a modified copy must reach the other copies"),
    Seam(_ACCESS, "__getitem__", ("key",), "waits for a parameter in flight that another module uses"),
    Seam(_GATHERED, "__enter__", (), "waits for parameters in flight, and sees which are whole"),
    Seam(_GATHERED, "__exit__", ("exc",), "where modified values are broadcast, and what was whole is kept so"),
)


def _owner(path: str) -> Any:
    module_name, _, class_name = path.partition(":")
    return getattr(importlib.import_module(module_name), class_name)


def _undecorated(function: Any) -> Any:
    """What DeepSpeed's ``instrument_w_nvtx`` wraps: it forwards any arguments and keeps no ``__wrapped__``."""
    if tuple(inspect.signature(function).parameters) == ("args", "kwargs"):
        inner = [cell.cell_contents for cell in function.__closure__ or () if callable(cell.cell_contents)]
        if len(inner) == 1:
            return inner[0]
    return function


def _installed() -> Version:
    return Version(version("deepspeed").split("+")[0])


# What the mechanisms are, where no signature tells: a DeepSpeed without the first accepts the attribute and shards
# everything; one without the second frees what a plan keeps whole.
_MECHANISMS = (
    (_INIT, "_convert_to_deepspeed_param", "ds_zero_partition_process_group", "per-parameter groups"),
    (_COORDINATOR, None, "not param.ds_active_sub_modules", "parameters in use are not freed"),
    (_COORDINATOR, "__init__", "self.__prefetch_bucket_sz: int", "an engine that moves gathers with other sizes"),
    (_COORDINATOR, "__init__", "self.__max_reuse_dist_in_numel: int", "and frees with others"),
    (_COORDINATOR, "__init__", "self.__max_n_available_params: int", "and holds another amount"),
    (_OFFLOAD, "__init__", "ds_inflight_param_registry", "the module shows which gathers are under way"),
    (_OFFLOAD, "_register_deepspeed_module", "self.forward_hooks.append", "the hooks of every module are listed"),
    (_OFFLOAD, "_register_deepspeed_module", "self.backward_hooks.append", "and those for its backward"),
)


def missing_seams() -> list[str]:
    """What the installed DeepSpeed lacks; empty when everything is as this package was written against."""
    problems = [problem for seam in SEAMS if (problem := seam.problem()) is not None]
    if problems:
        return problems
    return [
        f"{owner.partition(':')[2]}{f'.{name}' if name else ''} does not contain {text!r} ({what})"
        for owner, name, text, what in _MECHANISMS
        if text not in _source(_owner(owner) if name is None else getattr(_owner(owner), name))
    ]


def _source(member: Any) -> str:
    """The text of a class or function; nothing where there is none to read, which no mechanism can be found in."""
    try:
        return inspect.getsource(member)
    except OSError:
        return ""


def check_seams() -> None:
    """Raise unless every seam is there.

    Raises:
        SeamError: naming the seams that are missing or have moved.
    """
    problems = missing_seams()
    if problems:
        raise SeamError(
            f"DeepSpeed {version('deepspeed')} does not fit this ds_osdp: {'; '.join(problems)}. "
            "Install deepspeed>=0.19.3,<0.20, or a newer ds_osdp"
        )


class Patch:
    """A method of a DeepSpeed class that is wrapped while installed."""

    def __init__(self, owner: type, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self.owner, self.name, self.wrap = owner, name, wrap
        self.original: Any = None

    def install(self) -> None:
        """Put the wrapper in place; a second call changes nothing."""
        if self.original is None:
            self.original = self.owner.__dict__[self.name]
            setattr(self.owner, self.name, self.wrap(self.original))

    def undo(self) -> None:
        """Put the original back."""
        if self.original is not None:
            setattr(self.owner, self.name, self.original)
            self.original = None


def patches_installed(patches: list[Patch]) -> Iterator[str]:
    """The names of the patches that are in place now."""
    return (f"{patch.owner.__name__}.{patch.name}" for patch in patches if patch.original is not None)
