"""Optimizer states between a planned engine and the layout stock ZeRO-3 saves: the plan never leaks into files.

Stock ZeRO-3 keeps, per sub-group of parameters, one flat tensor with this rank's 1/N of every parameter, each padded to a
multiple of N.  A planned engine's sub-groups also separate parameters spread over the world from those spread over a node
or replicated, of which there is more than a 1/N here.
What is saved is the former: so stock DeepSpeed, its converters, another plan and another world size can read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS, OPTIMIZER_STATE_DICT

from ds_osdp.deepspeed_seams.placement import peers
from ds_osdp.split import SlicedParameter, sliced, unsplit_name

__all__ = [
    "Join",
    "SavedWhole",
    "cut",
    "engine_parameters",
    "from_stock",
    "gathered",
    "joined",
    "own_part",
    "parts",
    "planned_parts",
    "saved_name",
    "saved_parameters",
    "share_memory",
    "stock_groups",
    "stock_part",
    "stock_sub_groups",
    "to_stock",
]


class SavedWhole:
    """Stands for the slices of one parameter where files have the parameter."""

    def __init__(self, sliced: SlicedParameter) -> None:
        self.sliced = sliced
        self.ds_id = sliced.slices[0].ds_id  # type: ignore[attr-defined]
        self.ds_shape = sliced.shape
        self.ds_numel = sliced.shape.numel()
        self.requires_grad = sliced.slices[0].requires_grad


def saved_parameters(parameters: Iterable[Any]) -> list[Any]:
    """The parameters that files have, in order: a :class:`SavedWhole` in the place of the first slice of each."""
    saved: dict[int, Any] = {}
    for parameter in parameters:
        whole = sliced(parameter)
        key = id(parameter if whole is None else whole)
        if key not in saved:
            saved[key] = parameter if whole is None else SavedWhole(whole)
    return list(saved.values())


def engine_parameters(saved: Iterable[Any]) -> list[Any]:
    """The parameters of the engine that stand behind those of files, in order."""
    return [p for parameter in saved for p in (parameter.sliced.slices if isinstance(parameter, SavedWhole) else [parameter])]


def saved_name(parameter: Any, names: Mapping[Any, str]) -> str:
    """What files call ``parameter``; ``names`` is DeepSpeed's mapping of the engine's parameters."""
    first = parameter.sliced.slices[0] if isinstance(parameter, SavedWhole) else parameter
    return unsplit_name(names[first])[0]


def stock_groups(param_groups: Sequence[Mapping[str, Any]]) -> list[tuple[int, list[Any]]]:
    """The trainable parameters of the user's optimizer groups: (index of the group, its parameters)."""
    # As DeepSpeed's is_optimized_parameter: one without elements is in no sub-group.
    groups = ((i, [p for p in group["params"] if p.requires_grad and p.ds_numel]) for i, group in enumerate(param_groups))
    return [(i, saved_parameters(parameters)) for i, parameters in groups if parameters]


def stock_sub_groups(optimizer: Any) -> list[tuple[int, list[Any]]]:
    """The sub-groups stock ZeRO-3 would make of the same parameters (``_create_fp16_sub_groups``)."""
    sub_groups = []
    for index, parameters in optimizer.osdp_stock_groups:
        sizes = [_stock_numel(optimizer, p) for p in parameters]
        limit = optimizer.sub_group_size
        if limit is None or limit >= sum(sizes):
            sub_groups.append((index, list(parameters)))
            continue
        current: list[Any] = []
        filled = 0
        for parameter, size in zip(parameters, sizes, strict=True):
            current.append(parameter)
            filled += size
            if filled >= limit or parameter is parameters[-1]:
                sub_groups.append((index, current))
                current, filled = [], 0
    return sub_groups


Join = Callable[[Iterator[torch.Tensor], int, torch.Tensor], torch.Tensor]
"""Makes one 1-D tensor of its pieces, given its elements and a tensor of the same dtype and device."""


def joined(pieces: Iterator[torch.Tensor], numel: int, like: torch.Tensor) -> torch.Tensor:
    """The pieces behind one another, in memory."""
    return torch.cat(list(pieces))


def to_stock(optimizer: Any, state_dict: dict[str, Any], join: Join = joined) -> dict[str, Any]:
    """A planned optimizer's state dict, in the layout of stock ZeRO-3; ``join`` makes its flat tensors."""
    sub_groups = stock_sub_groups(optimizer)
    saved = state_dict[OPTIMIZER_STATE_DICT]

    def merged(flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        own = parts(optimizer, flats)

        def pieces(parameters: list[Any]) -> Iterator[torch.Tensor]:
            return (stock_part(optimizer, p, own) for p in parameters)

        return [join(pieces(ps), sum(_stock_numel(optimizer, p) for p in ps), flats[0]) for _, ps in sub_groups]

    masters = optimizer.fp32_partitioned_groups_flat
    # torch numbers optimizer parameters in the order of param_groups, not of DeepSpeed's sub-groups.
    ids = _state_ids([optimizer.sub_group_to_group_id[i] for i in range(len(masters))])
    states: dict[int, dict[str, Any]] = {}
    if saved["state"]:
        kept = [saved["state"][ids[i]] for i in range(len(masters))]
        stock_ids = _state_ids([index for index, _ in sub_groups])
        for key, example in kept[0].items():
            if _is_flat(example, masters[0]):
                values: Sequence[Any] = merged([state[key] for state in kept])
            else:
                values = [_copy(example) for _ in sub_groups]
            for i, value in enumerate(values):
                states.setdefault(stock_ids[i], {})[key] = value
    groups = _renumbered(saved["param_groups"], [index for index, _ in sub_groups])
    return {
        **state_dict,
        FP32_FLAT_GROUPS: merged(masters),
        OPTIMIZER_STATE_DICT: {"state": dict(sorted(states.items())), "param_groups": groups},
    }


def from_stock(optimizer: Any, state_dict: Mapping[str, Any], load_optimizer_states: bool) -> dict[str, Any]:
    """A state dict in the layout of stock ZeRO-3, as this planned optimizer keeps it.

    A parameter that is not spread over the world is gathered from the ranks' parts, one at a time.
    """
    sub_groups = stock_sub_groups(optimizer)
    masters = optimizer.fp32_partitioned_groups_flat

    def regrouped(flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        planned: dict[int, torch.Tensor] = {}
        for (_, parameters), flat in zip(sub_groups, flats, strict=True):
            sizes = [_stock_numel(optimizer, p) for p in parameters]
            for parameter, part in zip(parameters, torch.split(flat.detach(), sizes), strict=True):
                planned |= planned_parts(optimizer, parameter, part.to(masters[0].device))
        return [torch.cat([planned[p.ds_id] for p in group]) for group in optimizer.fp16_groups]

    converted = {**state_dict, FP32_FLAT_GROUPS: regrouped(state_dict[FP32_FLAT_GROUPS])}
    saved = state_dict[OPTIMIZER_STATE_DICT]
    if not load_optimizer_states:
        return converted
    own_groups = [optimizer.sub_group_to_group_id[i] for i in range(len(masters))]
    own_ids, stock_ids = _state_ids(own_groups), _state_ids([index for index, _ in sub_groups])
    states: dict[int, dict[str, Any]] = {}
    if saved["state"]:
        stock = [saved["state"][stock_ids[i]] for i in range(len(sub_groups))]
        for key, example in stock[0].items():
            if _is_flat(example, state_dict[FP32_FLAT_GROUPS][0]):
                values: Sequence[Any] = regrouped([state[key] for state in stock])
            else:
                values = [_copy(example) for _ in masters]
            for i, value in enumerate(values):
                states.setdefault(own_ids[i], {})[key] = value
    groups = _renumbered(saved["param_groups"], own_groups)
    return {**converted, OPTIMIZER_STATE_DICT: {"state": states, "param_groups": groups}}


def stock_part(optimizer: Any, parameter: Any, own: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """The 1/N that stock ZeRO-3 keeps here of ``parameter`` (1-D, zero-padded), out of what a planned engine keeps.

    Every rank must call it: a part of a node's copy is gathered inside the node, and slices are gathered one by one.

    Args:
        optimizer: the planned optimizer.
        parameter: a parameter, or a :class:`SavedWhole`.
        own: the part kept here of every parameter, by DeepSpeed's id.
    """
    if isinstance(parameter, SavedWhole):
        whole = parameter.sliced.join(_whole(p, own[p.ds_id]) for p in parameter.sliced.slices).view(-1)  # type: ignore[attr-defined]
    elif peers(parameter) is None:
        return own[parameter.ds_id]
    else:
        whole = _whole(parameter, own[parameter.ds_id])
    return cut(whole, _stock_numel(optimizer, parameter), dist.get_rank(group=optimizer.dp_process_group))


def planned_parts(optimizer: Any, parameter: Any, part: torch.Tensor) -> dict[int, torch.Tensor]:
    """What a planned engine keeps of ``parameter``, by DeepSpeed's id, out of this rank's stock 1/N.

    Every rank must call it.
    """
    if isinstance(parameter, SavedWhole):
        whole = gathered(part, optimizer.dp_process_group)[: parameter.ds_numel]
        slices = zip(parameter.sliced.slices, parameter.sliced.cut(whole), strict=True)
        return {p.ds_id: own_part(p, tensor.reshape(-1)) for p, tensor in slices}  # type: ignore[attr-defined]
    if peers(parameter) is None:
        return {parameter.ds_id: part}
    return {parameter.ds_id: own_part(parameter, gathered(part, optimizer.dp_process_group)[: parameter.ds_numel])}


def own_part(parameter: Any, whole: torch.Tensor) -> torch.Tensor:
    """What this rank keeps of ``parameter``, whose values are ``whole`` (1-D)."""
    return cut(whole, parameter.partition_numel(), parameter.ds_zero_partition_rank)


def _whole(parameter: Any, part: torch.Tensor) -> torch.Tensor:
    return gathered(part, parameter.ds_process_group)[: parameter.ds_numel]


def parts(optimizer: Any, flats: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """The part kept here of every optimized parameter, by DeepSpeed's id, out of one flat tensor per planned sub-group."""
    return {
        parameter.ds_id: part
        for group, flat in zip(optimizer.fp16_groups, flats, strict=True)
        for parameter, part in zip(group, torch.split(flat.detach(), [p.partition_numel() for p in group]), strict=True)
    }


def gathered(part: torch.Tensor, group: Any) -> torch.Tensor:
    """The parts of all ranks of ``group`` behind one another; ``part`` itself where the group is this rank alone."""
    ranks = dist.get_world_size(group=group)
    if ranks == 1:
        return part
    whole = torch.empty(part.numel() * ranks, dtype=part.dtype, device=part.device)
    dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
    return whole


def cut(whole: torch.Tensor, size: int, index: int) -> torch.Tensor:
    """A copy of the part of ``size`` elements number ``index``, padded with zeros where ``whole`` ends before it does."""
    out = torch.zeros(size, dtype=whole.dtype, device=whole.device)
    own = whole[index * size : (index + 1) * size]
    out[: own.numel()] = own
    return out


def _stock_numel(optimizer: Any, parameter: Any) -> int:
    return -(-int(parameter.ds_numel) // int(dist.get_world_size(group=optimizer.dp_process_group)))


def _state_ids(group_of: Sequence[int]) -> list[int]:
    """Torch's number of the flat parameter of each sub-group, given the optimizer group of each."""
    order = sorted(range(len(group_of)), key=lambda i: (group_of[i], i))
    ids = [0] * len(group_of)
    for number, i in enumerate(order):
        ids[i] = number
    return ids


def _renumbered(param_groups: Sequence[Mapping[str, Any]], group_of: Sequence[int]) -> list[dict[str, Any]]:
    """The optimizer's groups with the numbers of their flat parameters set to those of ``group_of``'s sub-groups."""
    ids = _state_ids(group_of)
    return [
        {**group, "params": sorted(ids[i] for i, owner in enumerate(group_of) if owner == g)}
        for g, group in enumerate(param_groups)
    ]


def _is_flat(value: Any, flat: torch.Tensor) -> bool:
    return torch.is_tensor(value) and value.dim() == 1 and value.numel() == flat.numel()


def _copy(value: Any) -> Any:
    return value.clone() if torch.is_tensor(value) else value


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether they are views of one storage; not by address, for tensors on shapes have none."""
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)
