"""The model and the data of the benchmarks: the same for every system, given the same arguments and seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class GPTConfig:
    """The size of a GPT; `tokens` is the length of a sequence."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    tokens: int


class Block(nn.Module):
    """Causal self-attention and an MLP, each behind a layer norm."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        hidden = config.hidden
        self.heads = config.heads
        self.ln_1, self.ln_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.fc_in, self.fc_out = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, hidden) to the same shape."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.ln_1(x)).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        mlp: Tensor = self.fc_out(functional.gelu(self.fc_in(self.ln_2(x))))
        return x + mlp


class GPT(nn.Module):
    """A decoder that answers with its loss, so that every system can call it alike."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(config.vocab, config.hidden), nn.Embedding(config.tokens, config.hidden)
        self.h = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Next-token loss of (batch, tokens) token ids."""
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        logits = self.head(self.ln_f(x))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Tower(nn.Module):
    """Many small layers behind one another, without heads: what a framework does around each is most of the work."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(nn.Linear(config.hidden, config.hidden) for _ in range(config.layers))
        self.head = nn.Linear(config.hidden, config.vocab)

    def forward(self, ids: Tensor) -> Tensor:
        """Next-token loss of (batch, tokens) token ids."""
        x = self.embed(ids)
        for layer in self.layers:
            x = x + functional.relu(layer(x)) / len(self.layers)
        logits = self.head(x)
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Projection(nn.Module):
    """Few small layers under a projection that dwarfs them: to the vocabulary, from ids that share 256 embeddings."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, config.hidden)
        self.layers = nn.ModuleList(nn.Linear(config.hidden, config.hidden) for _ in range(config.layers))
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Next-token loss of (batch, tokens) token ids."""
        x = self.embed(ids % 256)
        for layer in self.layers:
            x = x + functional.relu(layer(x))
        logits = self.head(x)
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def lora_gpt(config: GPTConfig) -> nn.Module:
    """A GPT whose linears are frozen, each with a low-rank adapter that is trained."""
    import peft

    targets = ["qkv", "proj", "fc_in", "fc_out"]
    return peft.get_peft_model(GPT(config), peft.LoraConfig(r=8, target_modules=targets))


MODELS: dict[str, Callable[[GPTConfig], nn.Module]] = {"gpt": GPT, "tower": Tower, "lora": lora_gpt}

SHAPES = {
    "narrow-deep": {"layers": 8, "hidden": 192, "heads": 4, "vocab": 256, "tokens": 128},
    "wide-shallow": {"layers": 2, "hidden": 384, "heads": 6, "vocab": 256, "tokens": 128},
    "uneven": {"layers": 2, "hidden": 256, "heads": 4, "vocab": 6144, "tokens": 128},
}
"""GPTs in the shapes that the OSDP paper compares, as small as two cores want them."""


def token_batches(config: GPTConfig, *, count: int, micro_batch: int, seed: int) -> list[Tensor]:
    """Random token ids, one (micro_batch, tokens) tensor per micro-step; give each rank its own seed."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(config.vocab, (micro_batch, config.tokens), generator=generator, dtype=torch.int64) for _ in range(count)
    ]
