"""What a unit is: a module that directly owns a parameter."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import nn

from ds_osdp.profile import DTYPE_BYTES, ParameterProfile
from ds_osdp.split import sliced, split_rows, unsplit_name

__all__ = ["owned_parameters", "viewed_bytes"]


def owned_parameters(model: nn.Module) -> dict[str, tuple[ParameterProfile, ...]]:
    """The parameters that each unit owns, by the name of the unit, in the order of definition.

    A tied parameter belongs to the first module that has it, in the order of ``named_parameters``; a module that is left with
    none is no unit.  What is split counts as it was before.
    """
    owned: dict[str, tuple[ParameterProfile, ...]] = {}
    rows = split_rows(model)
    for name, parameter in model.named_parameters():
        whole = sliced(parameter)
        name, index = unsplit_name(name)
        if index:
            continue  # the first slice stands for all
        # DeepSpeed leaves an empty tensor in the module and the true shape beside it.
        shape = getattr(parameter, "ds_shape", parameter.shape) if whole is None else whole.shape
        profile = ParameterProfile(
            name=name,
            shape=tuple(shape),
            dtype=str(parameter.dtype).removeprefix("torch."),
            trainable=parameter.requires_grad,
            split_rows=rows.get(name, 1),
        )
        unit = name.rpartition(".")[0]
        owned[unit] = (*owned.get(unit, ()), profile)
    return owned


def viewed_bytes(parameters: Iterable[ParameterProfile], viewed: Collection[str]) -> int:
    """Bytes of those ``parameters`` that ``viewed`` names: views of them are saved for backward."""
    return sum(p.numel * DTYPE_BYTES[p.dtype] for p in parameters if p.name in viewed)
