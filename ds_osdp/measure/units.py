"""What a unit is: a module that directly owns a parameter."""

from __future__ import annotations

from torch import nn

from ds_osdp.profile import ParameterProfile

__all__ = ["owned_parameters"]


def owned_parameters(model: nn.Module) -> dict[str, tuple[ParameterProfile, ...]]:
    """The parameters that each unit owns, by the name of the unit, in the order of definition.

    A tied parameter belongs to the first module that has it, in the order of ``named_parameters``; a module that is left with
    none is no unit.
    """
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    owned = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        named = [(prefix + name, p) for name, p in module.named_parameters(recurse=False)]
        first = [(name, p) for name, p in named if first_names[id(p)] == name]
        if first:
            owned[path] = tuple(
                ParameterProfile(
                    name=name,
                    # DeepSpeed leaves an empty tensor in the module and the true shape beside it.
                    shape=tuple(getattr(p, "ds_shape", p.shape)),
                    dtype=str(p.dtype).removeprefix("torch."),
                    trainable=p.requires_grad,
                )
                for name, p in first
            )
    return owned
