"""Token sequences with something to learn in them, the same on every machine."""

from __future__ import annotations

import torch


def sequences(vocabulary: int, count: int = 16, tokens: int = 32) -> list[torch.Tensor]:
    """``count`` rows of ``tokens`` ids, each counting up from a random start."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(0, vocabulary, (count,), generator=generator)
    return [(start + torch.arange(tokens)) % vocabulary for start in starts]
