"""Small models that the tests train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, TOKENS = 97, 16


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        # A bias of the keys has no gradient but noise (softmax ignores it), which Adam turns into steps of full size.
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden)
        self.fc1, self.fc2 = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, hidden = x.shape
        q, k, v = (t.view(batch, tokens, self.heads, -1).transpose(1, 2) for t in self.qkv(self.ln1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, tokens, hidden))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x))))


class GPT(nn.Module):
    """Odd sizes on purpose: partitions need padding.  ``forward`` returns the loss."""

    def __init__(
        self,
        hidden: int = 36,
        layers: int = 3,
        tied: bool = False,
        checkpoint: str = "",
        skips: bool = False,
        outside: bool = False,
        external: bool = False,
    ) -> None:
        super().__init__()
        self.checkpoint, self.skips, self.outside, self.forwards = checkpoint, skips, outside, 0
        self.wte, self.wpe = nn.Embedding(VOCABULARY, hidden), nn.Embedding(TOKENS, hidden)
        self.h = nn.ModuleList(Block(hidden) for _ in range(layers))
        self.ln_f, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.wte.weight
        self.borrowed = [self.wpe.weight] if external else []
        if external:
            deepspeed.zero.register_external_parameter(self, self.wpe.weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        # With `outside`, a parameter is used, the first of all, and its module never called.
        x = F.embedding(positions, self.wpe.weight) if self.outside else self.wpe(positions)
        # Nothing but its registration tells DeepSpeed of this use.
        x = x + sum(weight[positions] for weight in self.borrowed)
        x = self.wte(ids) + x
        self.forwards += 1
        # With `skips`, no two forwards in a row use the same modules: DeepSpeed never knows their order.
        for block in [b for i, b in enumerate(self.h) if not self.skips or i != self.forwards % 3]:
            x = self.checkpointed(block, x)
        logits = self.checkpointed(lambda x: self.head(self.ln_f(x)), x)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())

    def checkpointed(self, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        if not self.checkpoint:
            return run(x)
        return torch.utils.checkpoint.checkpoint(run, x, use_reentrant=self.checkpoint == "reentrant")


def lora() -> nn.Module:
    """The GPT with adapters, everything else frozen."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=32, target_modules=["qkv", "fc1", "fc2"], init_lora_weights=False)
    return get_peft_model(GPT(), config)  # type: ignore[no-any-return]


class Mixtral(nn.Module):
    """A mixture of experts as DeepSpeed wants it: the block that routes is a leaf, of which all experts are gathered."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import MixtralConfig, MixtralForCausalLM
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

        config = MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=36,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            max_position_embeddings=TOKENS,
            attn_implementation="eager",
        )
        self.model = MixtralForCausalLM(config)
        deepspeed.utils.set_z3_leaf_modules(self, [MixtralSparseMoeBlock])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, labels=ids).loss  # type: ignore[no-any-return]


BUILDS: dict[str, Callable[..., nn.Module]] = {"gpt": GPT, "lora": lora, "mixtral": Mixtral}


class Lion(torch.optim.Optimizer):
    """Chen et al., Symbolic Discovery of Optimization Algorithms, 2023: an optimizer that DeepSpeed does not know."""

    def __init__(self, parameters: Any, lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            near, far = group["betas"]
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.add_(torch.sign(near * momentum + (1 - near) * p.grad), alpha=-group["lr"])
                momentum.lerp_(p.grad, 1 - far)


def batch(seed: int, rank: int, samples: int = 2) -> torch.Tensor:
    """Token ids [samples, TOKENS] of one micro-step on one rank."""
    generator = torch.Generator().manual_seed(
        1000 * (seed % 3) + rank
    )  # three batches again and again: there is something to learn
    return torch.randint(0, VOCABULARY, (samples, TOKENS), generator=generator)
