"""Compare what several ranks hold copies of, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import deepspeed.comm as dist
import torch

from ds_osdp.deepspeed_seams import layout
from ds_osdp.deepspeed_seams.placement import is_whole, peers

__all__ = ["Copy", "copies", "differing"]

Copy = tuple[str, torch.Tensor, Any]
"""What it is, this rank's copy, and the group of ranks that hold the others."""


def copies(optimizer: Any) -> Iterator[Copy]:
    """Everything a planned optimizer holds that other ranks hold too, in the same order on all ranks."""
    names = optimizer.param_names
    for parameter in optimizer.module.parameters():
        if peers(parameter) is not None:
            yield names[parameter], _real(parameter, parameter.ds_tensor), peers(parameter)
        if is_whole(parameter) and parameter.ds_zero_partition_world_size > 1:
            yield f"{names[parameter]} (whole)", parameter.data, optimizer.dp_process_group
    masters = optimizer.fp32_partitioned_groups_flat
    states = [optimizer.optimizer.state[master] for master in masters]
    flats = {"master weights": masters}
    for key, value in states[0].items() if states else ():
        if torch.is_tensor(value) and value.numel() == masters[0].numel():
            flats[key] = [state[key] for state in states]
    for what, tensors in flats.items():
        parts = layout.parts(optimizer, tensors)
        for parameter in (p for group in optimizer.fp16_groups for p in group):
            if peers(parameter) is not None:
                yield f"{what} of {names[parameter]}", _real(parameter, parts[parameter.ds_id]), peers(parameter)


def differing(held: Iterable[Copy], world: Any) -> list[str]:
    """What differs between any two ranks, the same list on all; every rank of ``world`` must call it."""
    by_group: dict[int, tuple[Any, list[str], list[torch.Tensor]]] = {}
    for name, tensor, group in held:
        _, names, sums = by_group.setdefault(id(group), (group, [], []))
        names.append(name)
        sums.append(_checksum(tensor))
    if not by_group:
        return []
    flags = []
    for group, _, sums in by_group.values():
        least = torch.stack(sums)
        most = least.clone()
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        flags.append((least != most).to(torch.int32))
    anywhere = torch.cat(flags)
    dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=world)
    names = [name for _, names, _ in by_group.values() for name in names]
    return [name for name, differs in zip(names, anywhere.tolist(), strict=True) if differs]


def _real(parameter: Any, part: torch.Tensor) -> torch.Tensor:
    """``part`` without DeepSpeed's padding, which holds whatever was in memory."""
    begin = parameter.ds_zero_partition_rank * parameter.partition_numel()
    return part[: max(0, min(part.numel(), parameter.ds_numel - begin))]


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A 64-bit sum of the bits of ``tensor``, weighted by position so that swapped values show."""
    bits = (
        tensor.detach().reshape(-1).view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    )
    weights = torch.arange(bits.numel(), device=bits.device, dtype=torch.int64) % 8191 + 1
    return (bits * weights).sum()
