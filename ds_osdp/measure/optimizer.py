"""What an optimizer keeps and needs, read from the optimizer itself."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch

from ds_osdp.job import OptimizerMemory
from ds_osdp.measure.meter import MemoryMeter

__all__ = ["optimizer_memory"]

_ELEMENTS = 1 << 14
"""Enough for counters and the like to vanish beside it."""
_VALUE_BYTES = 4


def optimizer_memory(optimizer: Any) -> OptimizerMemory:
    """Let ``optimizer`` update one small flat fp32 parameter, as DeepSpeed gives it partitions, and look at what it holds.

    Args:
        optimizer: a torch optimizer, or what makes one of a list of parameters.  Its own parameters and states are not touched.
    """
    own = isinstance(optimizer, torch.optim.Optimizer)
    # A group may be empty: what holds for its parameters holds for those of another.
    group = next((group for group in optimizer.param_groups if group["params"]), None) if own else None
    device = group["params"][0].device if group else torch.device("cpu")
    parameter = torch.nn.Parameter(torch.zeros(_ELEMENTS, device="cpu" if device.type == "meta" else device))
    twin = copy.copy(optimizer) if own else optimizer([parameter])
    if own:
        twin.param_groups = [{**(group or optimizer.param_groups[0]), "params": [parameter]}]
        twin.state = defaultdict(dict)
    parameter.grad = torch.ones_like(parameter)
    twin.step()  # makes the states
    states = [value for value in twin.state[parameter].values() if isinstance(value, torch.Tensor)]
    meter = MemoryMeter(None, {})
    meter.made([parameter, parameter.grad, *states], "held")
    meter.enter("step")
    with meter:
        twin.step()
    alive = meter.highest()["step"]
    del alive["held"]
    return OptimizerMemory(
        states=_values(sum(tensor.numel() * tensor.element_size() for tensor in states)),
        temporaries=_values(sum(alive.values())),
    )


def _values(size_bytes: int) -> int:
    return -(-(size_bytes - _ELEMENTS // 2) // (_ELEMENTS * _VALUE_BYTES))
