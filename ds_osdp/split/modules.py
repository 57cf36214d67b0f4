"""Modules whose weights are kept in slices: an ``nn.Linear`` stays one, with its names and shapes in every state dict.

Slices are ordinary parameters of child modules, so that each can be placed by itself.  The children are never called: the
module computes with one slice after the other, and asks a :class:`Keeper` for its values.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch
from torch import nn

from ds_osdp.errors import PlanMismatchError
from ds_osdp.split import experts
from ds_osdp.split.functions import EmbeddingSlice, ExpertsSlice, JoinSlice, LinearSlice, Place

__all__ = ["KEEP", "Keeper", "SlicedParameter", "join", "sliced", "split", "split_modules", "split_rows", "unsplit_name"]

_SLICES = "osdp_slices"
_NAME = re.compile(rf"(?:(?<=\.)|^){_SLICES}\.(\d+)\.")


@dataclass(frozen=True, slots=True, eq=False)
class SlicedParameter:
    """A parameter that is kept in slices; every slice has it as ``osdp_sliced``."""

    shape: torch.Size
    axis: int
    """Along which it is sliced."""
    slices: tuple[nn.Parameter, ...]
    rows: tuple[int, ...]
    """Of each slice."""

    def join(self, slices: Iterable[torch.Tensor]) -> torch.Tensor:
        """The whole tensor out of one tensor per slice, each with as many elements as its slice; taken one by one."""
        whole: torch.Tensor | None = None
        begin = 0
        for part, rows in zip(slices, self.rows, strict=True):
            whole = part.new_empty(self.shape) if whole is None else whole
            place = whole.narrow(self.axis, begin, rows)
            place.copy_(part.view(place.shape))
            begin += rows
        assert whole is not None
        return whole

    def cut(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """One view per slice of a tensor with as many elements as the whole."""
        return list(torch.split(whole.view(self.shape), list(self.rows), self.axis))


def sliced(parameter: torch.Tensor) -> SlicedParameter | None:
    """What ``parameter`` is a slice of; None if it is whole."""
    return getattr(parameter, "osdp_sliced", None)


def unsplit_name(name: str) -> tuple[str, int | None]:
    """The name a parameter had before its module was split, and its number among the slices; None if it is whole."""
    found = _NAME.search(name)
    return (name, None) if found is None else (name[: found.start()] + name[found.end() :], int(found.group(1)))


@dataclass(frozen=True, slots=True)
class Keeper:
    """How parameters are held: how they come to their values, and are cut and made whole again."""

    gathered: Callable[[nn.Parameter], AbstractContextManager[None]]
    """Inside, the parameter has its values."""
    cut: Callable[[nn.Parameter, tuple[int, ...], int], list[nn.Parameter]]
    """The slices of a parameter: so many rows each, along an axis.  The parameter is used no more."""
    join: Callable[[SlicedParameter], nn.Parameter]
    """A parameter out of its slices.  The slices are used no more."""


def _cut(parameter: nn.Parameter, rows: tuple[int, ...], axis: int) -> list[nn.Parameter]:
    return [nn.Parameter(t.clone(), parameter.requires_grad) for t in torch.split(parameter.detach(), list(rows), axis)]


def _join(whole: SlicedParameter) -> nn.Parameter:
    return nn.Parameter(whole.join(p.detach() for p in whole.slices), whole.slices[0].requires_grad)


KEEP = Keeper(lambda parameter: nullcontext(), _cut, _join)
"""Of ordinary parameters, which always have their values."""


class _Slice(nn.Module):
    """Holds one slice of each parameter of its module; it is never called."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)

    # The module that is split saves and loads all its slices, as one tensor.
    def _save_to_state_dict(self, *_: Any) -> None: ...

    def _load_from_state_dict(self, *_: Any) -> None: ...


class _Slices(nn.ModuleList):
    def __init__(
        self, wholes: Mapping[str, SlicedParameter], gathered: Callable[[nn.Parameter], AbstractContextManager[None]]
    ) -> None:
        self.wholes = dict(wholes)
        """By the name that the module has for each."""
        first = next(iter(wholes.values()))
        super().__init__(_Slice({name: whole.slices[i] for name, whole in wholes.items()}) for i in range(len(first.slices)))
        ends = [0, *accumulate(first.rows)]
        self.places = tuple(Place(a, b, ends[-1], first.axis, gathered) for a, b in pairwise(ends))

    def each(self, *names: str) -> Iterator[tuple[Place, tuple[nn.Parameter, ...]]]:
        """One slice after the other of the parameters ``names``, with their values until the next is asked for."""
        # Not from the children: whoever sees one taken from a module that does not run may gather it for good.
        slices = zip(*(self.wholes[name].slices for name in names), strict=True)
        for place, weights in zip(self.places, slices, strict=True):
            with place.with_values(weights):
                yield place, weights


class _Split(nn.Module):
    """In front of the class of a module that is split."""

    original: ClassVar[type[nn.Module]]
    osdp_slices: _Slices

    def _join(self, name: str) -> torch.Tensor:
        """A whole parameter, joined anew each time it is asked for: what is written to it is lost."""
        out = None
        for place, (weight,) in self.osdp_slices.each(name):
            out = JoinSlice.apply(out, weight, place)  # type: ignore[no-untyped-call]
        return out  # type: ignore[return-value]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, whole in self.osdp_slices.wholes.items():
            # Of slices without values the state dict has a placeholder, as of every parameter that is partitioned.
            saved = self._join(name) if all(map(_has_values, whole.slices)) else whole.slices[0].new_empty(0)
            destination[f"{prefix}{name}"] = saved if keep_vars else saved.detach()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        errors: list[str],
    ) -> None:
        wholes = {f"{prefix}{name}": whole for name, whole in self.osdp_slices.wholes.items()}
        rest = {name: value for name, value in state_dict.items() if name not in wholes}
        super()._load_from_state_dict(rest, prefix, metadata, strict, missing_keys, unexpected_keys, errors)
        for key, whole in wholes.items():
            given = state_dict.get(key)
            if given is None:
                missing_keys.append(key)
            elif given.numel() == 0 and not all(map(_has_values, whole.slices)):
                continue  # a placeholder, for slices that are partitioned
            elif given.shape != whole.shape:
                errors.append(
                    f"size mismatch for {key}: {tuple(given.shape)} in the checkpoint, {tuple(whole.shape)} in the model."
                )
            else:
                with torch.no_grad():
                    for weight, part in zip(whole.slices, whole.cut(given), strict=True):
                        weight.copy_(part)


def _has_values(weight: nn.Parameter) -> bool:
    return weight.untyped_storage().nbytes() >= max(1, weight.numel()) * weight.element_size()


class _SplitMatrix(_Split):
    """A linear layer, or Hugging Face's Conv1D."""

    bias: torch.Tensor | None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slices, device = self.osdp_slices, x.device.type
        whole = slices.wholes["weight"]
        dtype = whole.slices[0].dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            x = x.to(dtype)
        biases = [None] * len(slices) if self.bias is None else torch.split(self.bias, list(whole.rows))
        out = None
        for (place, (weight,)), bias in zip(slices.each("weight"), biases, strict=True):
            out = LinearSlice.apply(x, out, weight, bias, place, dtype)  # type: ignore[no-untyped-call]
        return out  # type: ignore[return-value]


class _SplitEmbedding(_Split):
    padding_idx: int | None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out = None
        for place, (weight,) in self.osdp_slices.each("weight"):
            out = EmbeddingSlice.apply(ids, out, weight, place, self.padding_idx)  # type: ignore[no-untyped-call]
        return out  # type: ignore[return-value]


class _SplitExperts(_Split):
    """Hugging Face's fused experts."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        out, names = None, tuple(self.osdp_slices.wholes)
        for place, weights in self.osdp_slices.each(*names):
            run = partial(experts.run, self, self.original, names, place.begin, place.end - place.begin)
            out = ExpertsSlice.apply(hidden, chosen, scores, out, run, place, *weights)  # type: ignore[no-untyped-call]
        return out  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class _Kind:
    """How a module can be split."""

    split: type[_Split]
    axes: Mapping[str, int]
    """Along which each of its parameters is sliced, by name; all of them are, or none."""


def _kind(module: nn.Module) -> _Kind | None:
    """How a module can be split; None if it cannot."""
    if "forward" in vars(module):
        return None
    if experts.are_fused(module):
        every = all(p is not None and _shape(p) and _shape(p)[0] == module.num_experts for p in module._parameters.values())
        return _Kind(_SplitExperts, dict.fromkeys(module._parameters, 0)) if every else None
    if module._parameters.get("weight") is None:
        return None
    forward = type(module).forward
    if forward is nn.Linear.forward and not isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return _Kind(_SplitMatrix, {"weight": 0})
    if forward is nn.Embedding.forward:
        plain = module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
        return _Kind(_SplitEmbedding, {"weight": 0}) if plain else None
    # Not imported here: who has such a module has imported it.
    conv1d = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return _Kind(_SplitMatrix, {"weight": 1}) if conv1d is not None and forward is conv1d.forward else None


def _shape(parameter: nn.Parameter) -> torch.Size:
    # DeepSpeed leaves an empty tensor in the module and the true shape beside it.
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def _users(model: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """The modules that have each parameter, and how they call it."""
    users: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                users.setdefault(parameter, []).append((module, name))
    return users


def _axes(users: Mapping[nn.Parameter, list[tuple[nn.Module, str]]]) -> dict[nn.Parameter, int]:
    """The parameters that all their users can use in slices, and along which axis."""
    axes: dict[nn.Parameter, int] = {}
    kinds = {module: _kind(module) for of in users.values() for module, _ in of}
    for parameter, of in users.items():
        found = {None if (kind := kinds[module]) is None else kind.axes.get(name) for module, name in of}
        axis = found.pop()
        if axis is not None and not found:
            axes[parameter] = axis
    return axes


def split_rows(model: nn.Module) -> dict[str, int]:
    """How many rows there are to slice, by name of parameter; parameters that cannot be sliced are left out.

    Of what is split already, the rows it had before, under its name from before.

    ``nn.Linear``, ``nn.Embedding`` and Hugging Face's ``Conv1D`` can be, along their output, and its fused experts, expert by
    expert; a tied parameter if all modules that have it can slice it along the same axis.
    """
    axes = _axes(_users(model))
    rows: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        whole = sliced(parameter)
        if whole is not None:
            rows[unsplit_name(name)[0]] = whole.shape[whole.axis]
        elif parameter in axes:
            rows[name] = _shape(parameter)[axes[parameter]]
    return rows


def split(model: nn.Module, slices: Mapping[str, int], keeper: Keeper = KEEP) -> dict[nn.Parameter, tuple[nn.Parameter, ...]]:
    """Split parameters of ``model`` in place; their values, gradients and names in state dicts stay what they were.

    Rows that do not divide evenly go to the first slices, one each.

    Args:
        model: the model.
        slices: number of slices, by name of parameter; the same for all that a module uses in slices.
        keeper: how its parameters are held.

    Returns:
        The slices that took the place of each parameter.

    Raises:
        PlanMismatchError: a parameter cannot be split so; nothing was changed.
    """
    users = _users(model)
    axes = _axes(users)
    counts: dict[nn.Parameter, int] = {}
    for name, parameter in model.named_parameters():
        count = slices.get(name)
        if count is None:
            continue
        rows = _shape(parameter)[axes[parameter]] if parameter in axes else 1
        if count > rows:
            raise PlanMismatchError(f"the plan splits {name!r} into {count} slices, and it has {rows} to split: plan again")
        counts[parameter] = count
    kinds: dict[nn.Module, _Kind] = {}
    for parameter in counts:
        for module, name in users[parameter]:
            kind = _kind(module)
            assert kind is not None
            together = [p for other, p in module._parameters.items() if p is not None and other in kind.axes]
            if any(counts.get(p) != counts[parameter] for p in together):
                raise PlanMismatchError(
                    f"the plan splits {name!r} of a {type(module).__name__} into {counts[parameter]} slices, and not so all of "
                    f"{', '.join(kind.axes)}, which it uses together: plan again"
                )
            kinds[module] = kind
    wholes: dict[nn.Parameter, SlicedParameter] = {}
    for parameter, count in counts.items():
        shape, axis = _shape(parameter), axes[parameter]
        least, more = divmod(shape[axis], count)
        rows_of = tuple(least + (i < more) for i in range(count))
        wholes[parameter] = whole = SlicedParameter(shape, axis, tuple(keeper.cut(parameter, rows_of, axis)), rows_of)
        for part in whole.slices:
            part.osdp_sliced = whole  # type: ignore[attr-defined]
    for module, kind in kinds.items():
        own = {name: wholes[module._parameters.pop(name)] for name in kind.axes}  # type: ignore[index]
        module.__class__ = _split_class(kind.split, type(module), tuple(own))  # type: ignore[arg-type]
        module.osdp_slices = _Slices(own, keeper.gathered)
    return {parameter: whole.slices for parameter, whole in wholes.items()}


def split_modules(model: nn.Module) -> dict[str, bool]:
    """The modules of ``model`` that are split, by name, and whether each is one of fused experts."""
    return {name: isinstance(m, _SplitExperts) for name, m in model.named_modules() if isinstance(m, _Split)}


def join(model: nn.Module, keeper: Keeper = KEEP) -> dict[nn.Parameter, nn.Parameter]:
    """Undo :func:`split`.

    Returns:
        The parameter that took the place of each slice.
    """
    joined: dict[SlicedParameter, nn.Parameter] = {}
    for module in model.modules():
        if not isinstance(module, _Split):
            continue
        own = module.osdp_slices.wholes
        for whole in own.values():
            if whole not in joined:
                joined[whole] = keeper.join(whole)
        del module._modules[_SLICES]
        module.__class__ = type(module).original  # type: ignore[assignment]
        rest = dict(module._parameters)
        module._parameters.clear()
        module._parameters.update({name: joined[whole] for name, whole in own.items()} | rest)
    return {part: parameter for whole, parameter in joined.items() for part in whole.slices}


@cache
def _split_class(kind: type[_Split], original: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """A subclass of ``original``, so that checks for it still hold; ``names`` are what it has in slices."""
    wholes = {name: property(partial(_Split._join, name=name)) for name in names}
    return type(f"Split{original.__name__}", (kind, original), {"original": original, "__module__": __name__, **wholes})
