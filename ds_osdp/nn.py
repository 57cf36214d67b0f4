"""What a model may use to need less memory, whether a plan is applied or not."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

__all__ = ["chunked_cross_entropy"]


def chunked_cross_entropy(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    targets: torch.Tensor,
    *,
    chunk_tokens: int = 1024,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """``F.cross_entropy(head(hidden), targets)``, with the logits of ``chunk_tokens`` tokens alive at a time.

    The logits of each chunk are computed again in backward.  ``head`` is called once per chunk, so it may be any module: with a
    bias, with an adapter, split, or partitioned by ZeRO-3 (``stage3_max_reuse_distance`` above 0 keeps it gathered from one
    chunk to the next).

    Args:
        head: from [tokens, features] to logits [tokens, classes].
        hidden: [..., features].
        targets: [...], class indices.
        chunk_tokens: tokens per chunk.
        ignore_index: the target of tokens that do not count.
        label_smoothing: as of ``F.cross_entropy``.

    Returns:
        The mean over the tokens that count, in fp32; NaN if none does, as of ``F.cross_entropy``.

    Raises:
        ValueError: ``chunk_tokens`` is not positive, or the tokens of ``hidden`` are not those of ``targets``.
    """
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}: at least one token must be computed at a time")
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(
            f"hidden states of shape {tuple(hidden.shape)} need targets of shape {tuple(hidden.shape[:-1])}, "
            f"not {tuple(targets.shape)}"
        )

    def sum_of(x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(
            head(x).float(), wanted, reduction="sum", ignore_index=ignore_index, label_smoothing=label_smoothing
        )

    tokens, wanted = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    sums = [
        checkpoint(sum_of, x, t, use_reentrant=False)
        for x, t in zip(torch.split(tokens, chunk_tokens), torch.split(wanted, chunk_tokens), strict=True)
    ]
    return torch.stack(sums).sum() / (wanted != ignore_index).sum()
