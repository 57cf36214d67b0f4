"""Fetch and release hooks only around modules that have something to fetch and release.

DeepSpeed hangs four hooks on every module and runs them in every forward and backward.  A module whose parameters are all
kept whole needs none of them: it only has to wait, in its first forward after a step, for what is still on its way.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

import torch
from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params
from torch import nn

from ds_osdp.deepspeed_seams.placement import is_whole
from ds_osdp.deepspeed_seams.whole import WholeParameters

__all__ = ["ModuleHooks"]

Hook = tuple[MutableMapping[int, Any], int, Any]
"""The module's dictionary of hooks, the hook's place in it, and the hook."""


class ModuleHooks:
    """DeepSpeed's hooks on the modules of one engine, each in place or taken out."""

    def __init__(self, module: nn.Module, offload: Any, whole: WholeParameters) -> None:
        """Take note of the hooks that ``offload``, DeepSpeed's ``DeepSpeedZeRoOffload``, has hung on ``module``."""
        self._coordinator = offload.get_param_coordinator()
        self._whole = whole
        owner = {id(hooks): m for m in module.modules() for hooks in (m._forward_pre_hooks, m._forward_hooks)}
        self._hooks: dict[nn.Module, list[Hook]] = {}
        for handle in (*offload.forward_hooks, *offload.backward_hooks):
            hooks = handle.hooks_dict_ref()
            self._hooks.setdefault(owner[id(hooks)], []).append((hooks, handle.id, hooks[handle.id]))
        self._bare: set[nn.Module] = set()
        self._external = 0
        self._waits: list[Any] = []

    def follow_plan(self) -> None:
        """Hang and take out hooks as the stages of the parameters now ask for; to be called whenever these change."""
        for wait in self._waits:
            wait.remove()
        bare = {module for module in self._hooks if not _gathers(module)}
        for module in self._bare - bare:
            self._put_back(module)
        for module in bare - self._bare:
            for hooks, place, _ in self._hooks[module]:
                hooks.pop(place)
        self._waits = [m.register_forward_pre_hook(self._wait, prepend=True) for m in bare if _may_be_in_flight(m)]
        if bare != self._bare and not self._coordinator.is_invalid_trace():
            self._coordinator._invalidate_trace()
        self._bare = bare
        self._external = self._count_external()

    def begin_forward(self) -> None:
        """Follow what modules were told since to gather of others' parameters (``register_external_parameter``)."""
        if self._count_external() != self._external:
            self.follow_plan()

    def put_back(self) -> None:
        """All of DeepSpeed's hooks in place, and none of ours, for DeepSpeed to remove."""
        for wait in self._waits:
            wait.remove()
        for module in self._bare:
            self._put_back(module)
        self._waits, self._bare = [], set()

    def _put_back(self, module: nn.Module) -> None:
        for hooks, place, hook in self._hooks[module]:
            # Numbers grow with every hook that is registered: those behind this one move behind it again.
            later = [other for other in hooks if other > place]
            hooks[place] = hook
            for other in later:
                hooks[other] = hooks.pop(other)

    def _count_external(self) -> int:
        modules: Iterable[Any] = self._hooks
        return sum(len(module._external_params) for module in modules)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _wait(self, module: nn.Module, _: Any) -> None:
        self._whole.provide(list(iter_params(module)))


def _gathers(module: Any) -> bool:
    """Whether a parameter of ``module`` or below, or one registered with it, is gathered for each use.

    What is below counts although it has hooks of its own: forward of a module may use it directly, and DeepSpeed then
    registers it with the innermost module that has hooks, which would keep it gathered for longer.
    """
    return any(not is_whole(parameter) for parameter in iter_params(module, recurse=True))


def _may_be_in_flight(module: Any) -> bool:
    return any(parameter.ds_zero_partition_world_size > 1 for parameter in iter_params(module))
