"""Linear layers as DeepSpeed runs them: what they save for backward, and what their backward holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

__all__ = ["deepspeed_linear"]


@contextmanager
def deepspeed_linear() -> Iterator[None]:
    """Inside, ``torch.nn.functional.linear`` computes as ``deepspeed.runtime.zero.linear`` does.

    An engine of stage 3 replaces it, for all units whatever their stage, and for good (``memory_efficient_linear``).  Torch's
    own saves a transposed view of the weight, which would keep what was gathered alive until backward, and no input where the
    weight is frozen; DeepSpeed's saves the weight itself and always the input.
    """
    before = functional.linear
    functional.linear = _linear
    try:
        yield
    finally:
        functional.linear = before


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    return _Linear.apply(input, weight, bias)  # type: ignore[no-untyped-call]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(input, weight, bias)
        if input.dim() == 2 and bias is not None:
            return torch.addmm(bias, input, weight.t())
        output = input.matmul(weight.t())
        if bias is not None:
            output += bias
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight, _ = ctx.saved_tensors
        of_input, of_weight, of_bias = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1])
        return (
            gradient.matmul(weight) if of_input else None,
            rows.t().matmul(input.reshape(-1, input.shape[-1])) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )
