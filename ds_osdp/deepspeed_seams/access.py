"""Access to parameters from outside their modules' forward: all copies get what was modified, and what is whole stays so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from ds_osdp.deepspeed_seams.placement import peers
from ds_osdp.deepspeed_seams.whole import through_partition

__all__ = ["gathered_enter", "gathered_exit", "gathered_init", "parameter_access"]


def gathered_init(original: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: Any, params: Any, modifier_rank: int | None = None, *args: Any, **kwargs: Any) -> None:
        if not isinstance(params, torch.Tensor):
            params = list(params)
        each = [params] if isinstance(params, torch.Tensor) else params
        if modifier_rank is None or all(peers(p) is None for p in each):
            original(self, params, modifier_rank, *args, **kwargs)
            return
        # DeepSpeed reads modifier_rank as a rank of the parameter's group, which need not have that many.
        original(self, params, None, *args, **kwargs)
        if not self.enabled:
            return
        self.osdp_modifier_rank = modifier_rank
        for p in self.params:
            self.src_rank_by_group[id(p.ds_process_group)] = _source(p, modifier_rank)
        self.src_rank = self.src_rank_by_group[id(self.params[0].ds_process_group)]

    return init


def gathered_enter(original: Callable[..., Any]) -> Callable[..., Any]:
    def enter(self: Any) -> Any:
        if self.enabled:
            whole = [p for p in self.params if hasattr(p, "osdp_whole")]
            for p in whole:
                p.osdp_whole.wait([p])
            self.osdp_was_whole = [p for p in whole if p.ds_status is ZeroParamStatus.AVAILABLE]
        return original(self)

    return enter


def gathered_exit(original: Callable[..., Any]) -> Callable[..., Any]:
    def leave(self: Any, *exc: Any) -> Any:
        if not self.enabled:
            return original(self, *exc)
        modifier_rank = getattr(self, "osdp_modifier_rank", None)
        if modifier_rank is not None:
            for p in self.params:
                if peers(p) is not None:
                    dist.broadcast(p.data, modifier_rank)
        with through_partition(self.params, self.osdp_was_whole):
            return original(self, *exc)

    return leave


def parameter_access(original: Callable[..., Any]) -> Callable[..., Any]:
    """``module.weight``: what is kept whole may be used by another module than its own, and while it is on its way."""

    def access(self: Any, key: str) -> Any:
        parameter = original(self, key)
        whole = getattr(parameter, "osdp_whole", None)
        if whole is not None and not torch.compiler.is_compiling():
            whole.on_access(parameter)
        return parameter

    return access


def _source(parameter: Any, modifier_rank: int) -> int:
    """From which global rank DeepSpeed's broadcast inside the parameter's group starts."""
    group = parameter.ds_process_group
    if peers(parameter) is not None:
        return dist.get_global_rank(group, 0)  # type: ignore[no-any-return]  # all have the modifier's values by then
    return modifier_rank if group == dist.get_world_group() else dist.get_global_rank(group, modifier_rank)
