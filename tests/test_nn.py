"""The loss in chunks is the loss."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from splits import Watching
from torch import nn

from ds_osdp.nn import chunked_cross_entropy
from ds_osdp.split import split


@pytest.mark.parametrize("chunk_tokens", [1, 5, 7, 30, 100])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("slices", [1, 3])
def test_same_value_and_gradients(chunk_tokens: int, label_smoothing: float, slices: int) -> None:
    torch.manual_seed(0)
    head = nn.Linear(8, 23)
    model = nn.Sequential(copy.deepcopy(head))
    if slices > 1:
        split(model, {"0.weight": slices})
    hidden = torch.randn(2, 15, 8, requires_grad=True)
    other = hidden.detach().clone().requires_grad_()
    targets = torch.randint(0, 23, (2, 15))
    targets[0, :4] = -100
    expected = F.cross_entropy(head(hidden).flatten(0, 1), targets.flatten(), label_smoothing=label_smoothing)
    loss = chunked_cross_entropy(model, other, targets, chunk_tokens=chunk_tokens, label_smoothing=label_smoothing)
    expected.backward()
    loss.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(other.grad, hidden.grad)
    weights = [p.grad for n, p in model.named_parameters() if n.endswith("weight")]
    torch.testing.assert_close(torch.cat(weights), head.weight.grad)  # type: ignore[arg-type]
    torch.testing.assert_close(model[0].bias.grad, head.bias.grad)


def test_never_all_logits_are_alive() -> None:
    head, hidden, targets = nn.Linear(4, 1000), torch.randn(64, 4, requires_grad=True), torch.randint(0, 1000, (64,))
    largest = [0]
    with Watching(lambda out: largest.append(max((t.numel() for t in out if torch.is_tensor(t)), default=0))):
        chunked_cross_entropy(head, hidden, targets, chunk_tokens=8).backward()
    assert max(largest) == 8 * 1000


def test_what_does_not_fit_together_is_refused() -> None:
    head, hidden = nn.Linear(4, 9), torch.randn(2, 6, 4)
    with pytest.raises(ValueError, match="chunk_tokens is 0"):
        chunked_cross_entropy(head, hidden, torch.zeros(2, 6, dtype=torch.long), chunk_tokens=0)
    with pytest.raises(ValueError, match=r"\(2, 6\), not \(2, 5\)"):
        chunked_cross_entropy(head, hidden, torch.zeros(2, 5, dtype=torch.long))
    assert torch.isnan(chunked_cross_entropy(head, hidden, torch.full((2, 6), -100)))
