"""Hugging Face's fused experts, all in one tensor per projection: a module of some of them runs as if it had no others.

Transformers runs such a module on the experts of one rank (expert parallelism): an id that is out of range stands for an expert
elsewhere, and adds nothing.  So the outputs of a module's slices add up to that of the whole.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import nn

__all__ = ["are_fused", "run"]

_IMPLEMENTATIONS = ("grouped_mm", "batched_mm")
"""Of transformers' that leave out what is elsewhere, whatever the class: eager loops do not in all of them."""


def are_fused(module: nn.Module) -> bool:
    """Whether :func:`run` can run ``module`` in parts: transformers chooses what computes it, by its configuration."""
    moe = sys.modules.get("transformers.integrations.moe")
    if moe is None or getattr(type(module).forward, "__globals__", None) is not vars(moe):
        return False
    return (
        getattr(module, "_is_expert_parallel", None) is False
        and getattr(module.config, "_experts_implementation", None) in _IMPLEMENTATIONS
        # Those of a module below would get no gradient where a slice runs again.
        and 0 < len(module._parameters) == len(list(module.parameters()))
    )


def run(
    module: nn.Module,
    original: type[nn.Module],
    names: Sequence[str],
    begin: int,
    count: int,
    hidden: torch.Tensor,
    chosen: torch.Tensor,
    scores: torch.Tensor,
    *weights: torch.Tensor,
) -> torch.Tensor:
    """What the experts from ``begin`` on add to the output.

    Args:
        module: of all experts.
        original: its class, whose forward computes.
        names: of its parameters.
        begin: the first expert to run.
        count: how many.
        hidden: [tokens, features].
        chosen: [tokens, choices], experts.
        scores: [tokens, choices].
        weights: a slice [count, ...] of each parameter.

    Returns:
        [tokens, features].
    """
    part = original.__new__(original)
    own = dict(zip(names, weights, strict=True))
    vars(part).update(vars(module), _parameters=own, num_experts=count, _is_expert_parallel=True)
    local = chosen - begin
    elsewhere = (local < 0) | (local >= count)
    return part.forward(hidden, local.masked_fill(elsewhere, count), scores.masked_fill(elsewhere, 0))  # type: ignore[no-any-return]
