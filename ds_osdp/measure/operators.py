"""What one operator costs: floating-point operations where they bind, bytes moved everywhere else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

__all__ = ["flop_formula", "moved_bytes"]

_aten = torch.ops.aten

# Torch's own formulas, which a FlopCounterMode carries together with the shape arithmetic around them.
_FORMULAS: dict[Any, Callable[..., int]] = FlopCounterMode(display=False).flop_registry
# The CPU's fused attention computes what the CUDA one does; torch has a formula for the latter only.
_FORMULAS |= {
    _aten._scaled_dot_product_flash_attention_for_cpu: _FORMULAS[_aten._scaled_dot_product_flash_attention],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _FORMULAS[_aten._scaled_dot_product_flash_attention_backward],
}


def _grouped_mm_flops(a: torch.Tensor, b: torch.Tensor, *_: Any, out_val: Any = None, **__: Any) -> int:
    """Mixture-of-experts product: the groups cut one dimension, so that all of them together are one plain product."""
    groups = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return groups * 2 * a.shape[-2] * a.shape[-1] * b.shape[-1]


def _convolution_backward_flops(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    output_mask: Sequence[bool],
    **_: Any,
) -> int:
    """As much as the forward, for each gradient that is wanted.  Torch's formula takes every convolution for a dense one."""
    places = x.shape[0] * prod((x if transposed else gradient).shape[2:])
    return 2 * places * weight.numel() * sum(output_mask[:2])


_FORMULAS[_aten.convolution_backward] = _convolution_backward_flops
if hasattr(_aten, "_grouped_mm"):
    _FORMULAS[_aten._grouped_mm] = _grouped_mm_flops

_UNWRITTEN = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
"""Operators that allocate and touch nothing."""
_LOOKUPS = {_aten.embedding, _aten.index_select, _aten.gather, _aten.index}
"""Operators that read of their first tensor only what they write."""


def flop_formula(operator: Any) -> Callable[..., int] | None:
    """The FLOP formula of an operator packet, to be called with its arguments and ``out_val``; None if it has none."""
    return _FORMULAS.get(operator)


def moved_bytes(operator: Any, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], mutates: bool) -> int:
    """Bytes an operator reads and writes.

    Args:
        operator: the operator's packet, such as ``torch.ops.aten.add``.
        inputs: its tensor arguments.
        outputs: the tensors it returned.
        mutates: whether it writes to an argument.

    Returns:
        Bytes read plus bytes written; 0 for views.
    """
    if operator in _UNWRITTEN:
        return 0
    if not mutates:
        sources = {_storage_id(tensor) for tensor in inputs}
        if all(_storage_id(tensor) in sources for tensor in outputs):
            return 0
    written = sum(map(_traffic, outputs))
    if operator in _LOOKUPS:
        return 2 * written + sum(map(_traffic, inputs[1:]))
    return written + sum(map(_traffic, inputs))


def _storage_id(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _traffic(tensor: torch.Tensor) -> int:
    """Bytes behind a tensor: an expanded one has fewer of them than elements."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
