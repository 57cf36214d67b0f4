"""Split units on an engine: slices are ZeRO parameters that no DeepSpeed hook gathers.

DeepSpeed gathers what belongs to the modules it sees running, and its prefetcher looks ahead: it would hold all slices of a
unit at once.  Slices belong to modules that never run.  They are gathered and freed here, where they are used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import set_z3_leaf_module, z3_leaf_module
from torch import nn

from ds_osdp.errors import PlanMismatchError, UnsupportedError
from ds_osdp.plan import Plan
from ds_osdp.split import KEEP, Keeper, SlicedParameter, join, sliced, split, split_modules, split_rows, unsplit_name

__all__ = ["join_consolidated", "join_slices", "open_leaves", "split_slices"]


def split_slices(call: dict[str, Any], plan: Plan) -> None:
    """Split the model as ``plan`` says; the user's optimizer groups hold the slices in place of what they held.

    Args:
        call: the arguments of ``deepspeed.initialize`` that were given; changed in place.
        plan: made for this model.

    Raises:
        PlanMismatchError: the plan splits what cannot be split; nothing was changed.
    """
    model = call["model"]
    wanted = [unit for unit in plan.units if unit.slices > 1]
    if not wanted:
        return
    rows = split_rows(model)
    slices = {name: unit.slices for unit in wanted for name in unit.parameters if name in rows}
    for unit in wanted:
        if not slices.keys() & set(unit.parameters):
            raise PlanMismatchError(
                f"the plan splits {unit.name!r} into {unit.slices} slices, and none of its parameters can be split: plan again"
            )
    # Before it is split: afterwards its own order is another, and files keep the order of the optimizer's groups.
    if not isinstance(call.get("optimizer"), torch.optim.Optimizer) and call.get("model_parameters") is None:
        call["model_parameters"] = list(model.parameters())
    _replace(call, split(model, slices, _ZERO))


def join_slices(call: dict[str, Any]) -> None:
    """Undo :func:`split_slices` and :func:`open_leaves`, on a model that comes from another engine."""
    for module in call["model"].modules():
        if vars(module).pop("osdp_leaf", False):
            set_z3_leaf_module(module, True)
    joined = join(call["model"], _ZERO)
    if joined:
        first = {sliced(part): part for part in reversed(joined)}
        _replace(call, {part: (whole,) if first[sliced(part)] is part else () for part, whole in joined.items()})


def open_leaves(model: nn.Module) -> None:
    """Let no leaf module (``set_z3_leaf_modules``) gather slices: it would gather all that is in it at once.

    A leaf is for modules of which some run, by what the data says.  Of fused experts all do, so theirs is none any more.

    Raises:
        UnsupportedError: a leaf has slices, and no fused experts.
    """
    for name, leaf in model.named_modules():
        if not z3_leaf_module(leaf) or not (inside := split_modules(leaf)):
            continue
        if not any(inside.values()):
            raise UnsupportedError(
                f"the plan splits {name}.{next(iter(inside))}, and {name} is a leaf module, which gathers all that is in it at "
                "once: give the unit a stage below 3 in osdp.rules, or set osdp.max_slices to 1"
            )
        set_z3_leaf_module(leaf, False)
        leaf.osdp_leaf = True


def join_consolidated(module: nn.Module, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state dict of whole tensors with the slices in it joined, under the names from before they were split."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    parts: dict[str, dict[int, torch.Tensor]] = {}
    for key in state_dict:
        name, index = unsplit_name(key)
        if index is not None:
            parts.setdefault(name, {})[index] = state_dict[key]
    tensors: dict[SlicedParameter, torch.Tensor] = {}  # tied parameters stay one tensor
    joined: dict[str, torch.Tensor] = {}
    for key, value in state_dict.items():
        name, index = unsplit_name(key)
        if index is None:
            joined[key] = value
        elif name not in joined:
            whole = sliced(parameters[key])
            assert whole is not None
            if whole not in tensors:
                tensors[whole] = whole.join(parts[name][i] for i in range(len(whole.slices)))
            joined[name] = tensors[whole]
    return joined


@contextmanager
def _gathered(parameter: Any) -> Iterator[None]:
    if not hasattr(parameter, "ds_status"):
        yield  # not on an engine yet
        return
    whole = getattr(parameter, "osdp_whole", None)
    if whole is not None:
        whole.wait([parameter])
    if parameter.ds_status is ZeroParamStatus.AVAILABLE:
        yield
        return
    with torch.no_grad():
        parameter.all_gather_coalesced([parameter]).wait()
    try:
        yield
    finally:
        parameter.partition()
        # Autograd compares the layout of a gradient, which comes after this, with the parameter's: of an expanded scalar
        # it has the shape, and no memory.
        parameter.data = parameter.data.new_zeros(1).expand(parameter.ds_shape)


def _cut(parameter: Any, rows: tuple[int, ...], axis: int) -> list[nn.Parameter]:
    if not hasattr(parameter, "ds_id"):
        slices = KEEP.cut(parameter, rows, axis)
        parameter.data = parameter.data.new_empty(0)  # whoever still has it
        return slices
    slices = []
    with _gathered(parameter):
        for part in torch.split(parameter.detach(), list(rows), axis):
            slices.append(nn.Parameter(part.clone(), parameter.requires_grad))
            parameter.convert_to_zero_parameters(slices[-1:])
    parameter.ds_tensor.data = parameter.ds_tensor.data.new_empty(0)
    return slices


def _join(whole: SlicedParameter) -> nn.Parameter:
    first: Any = whole.slices[0]
    if not hasattr(first, "ds_id"):
        return KEEP.join(whole)
    joined = nn.Parameter(whole.join(_values(whole)), first.requires_grad)
    first.convert_to_zero_parameters([joined])
    return joined


def _values(whole: SlicedParameter) -> Iterator[torch.Tensor]:
    for part in whole.slices:
        with _gathered(part):
            yield part.detach()


_ZERO = Keeper(_gathered, _cut, _join)


def _replace(call: dict[str, Any], placed: Mapping[nn.Parameter, Sequence[nn.Parameter]]) -> None:
    """Put other parameters into the places of those in the optimizer's groups."""

    def replaced(parameters: Any) -> list[Any]:
        listed: list[Any] = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        return [new for parameter in listed for new in placed.get(parameter, (parameter,))]

    optimizer, given = call.get("optimizer"), call.get("model_parameters")
    if isinstance(optimizer, torch.optim.Optimizer):
        for group in optimizer.param_groups:
            group["params"] = replaced(group["params"])
    if given is not None:
        items = [given] if isinstance(given, (torch.Tensor, Mapping)) else list(given)
        groups = [{**item, "params": replaced(item["params"])} for item in items if isinstance(item, Mapping)]
        call["model_parameters"] = groups or replaced(items)
