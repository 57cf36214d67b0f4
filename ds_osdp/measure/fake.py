"""A copy of a model that has shapes and no data, and the operators that run on it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["ShapeRunner", "tensors_in"]

_aten = torch.ops.aten
_GROUPED_MM = _aten._grouped_mm.default if hasattr(_aten, "_grouped_mm") else None

_REAL_ELEMENTS = 1 << 22
"""Index arithmetic on more elements than this (tables of relative positions) runs on shapes only."""


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """All tensors in nested containers."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class ShapeRunner:
    """Runs operators on shapes, and on values where these are a few integers that depend on no weight.

    Models look at positions and masks to choose what to run: Hugging Face's drop a causal mask, and with it take a leaner
    attention kernel, after a look at the position numbers.  Whoever hides those values traces another computation than the
    one that trains.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def run(self, func: Any, args: Any, kwargs: Any, inputs: Sequence[torch.Tensor]) -> Any:
        """What ``func`` returns: fake tensors, or real ones if no input was fake and they are small and integer.

        Args:
            func: the operator.
            args: its positional arguments.
            kwargs: its keyword arguments.
            inputs: the tensors among them.
        """
        known = not any(isinstance(tensor, FakeTensor) for tensor in inputs)
        shapes = args, kwargs
        if known and inputs:  # Left real, some would be computed on values at once, however large the result.
            shapes = tree_map_only(torch.Tensor, self._mode.from_tensor, shapes)
        try:
            with self._mode:
                out = self._on_shapes(func, *shapes)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if not known:
                raise
        else:
            if not known or not all(map(_may_be_real, tensors_in(out))):
                return out
        return func(*args, **kwargs)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A fake tensor."""
        with self._mode:
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def copy(self, model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
        """Copy ``model`` with every tensor of its modules replaced by a fake one.

        Args:
            model: any module: ordinary, on the meta device, or built under ``deepspeed.zero.Init``.
            dtype: of floating-point parameters and buffers, as ``module.to(dtype)`` would have it; None leaves them.

        Returns:
            The copy: tied parameters are tied in it, and what is trainable or in training mode stays so.
        """
        memo: dict[int, Any] = {}
        for module in model.modules():
            cast = {id(tensor) for tensor in (*module._parameters.values(), *module._buffers.values())}
            for tensor in tensors_in(vars(module)):
                if id(tensor) not in memo:
                    memo[id(tensor)] = self._like(tensor, dtype if id(tensor) in cast else None)
        # deepcopy asks the memo first: it finds the fake tensors there, and never reads the real ones.
        return copy.deepcopy(model, memo)

    def _like(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        # deepspeed.zero.Init leaves an empty tensor in the module and the true shape beside it.
        shape = getattr(tensor, "ds_shape", tensor.shape)
        fake = self.empty(shape, tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype)
        return nn.Parameter(fake, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake

    @staticmethod
    def _on_shapes(func: Any, args: Any, kwargs: Any) -> Any:
        if _GROUPED_MM is not None and func is _GROUPED_MM and args[0].dtype is not torch.bfloat16:
            # Its kernels take other dtypes too; torch's function of their shapes refuses them.
            a, b, *rest = args
            return func(a.bfloat16(), b.bfloat16(), *rest, **kwargs).to(a.dtype)
        return func(*args, **kwargs)


def _may_be_real(tensor: torch.Tensor) -> bool:
    # Not an empty one: DeepSpeed puts it in the place of a parameter that it has freed, and that must stay a fake tensor.
    return tensor.numel() == 1 if tensor.is_floating_point() else tensor.numel() <= _REAL_ELEMENTS
