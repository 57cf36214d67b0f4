"""Train a byte-level GPT on text that every Python ships: an ordinary DeepSpeed script that knows nothing of plans.

deepspeed --num_gpus 2 examples/demo/train.py --deepspeed_config examples/demo/ds_zero3.json
deepspeed --num_gpus 2 --module ds_osdp.run examples/demo/train.py --deepspeed_config examples/demo/ds_osdp.json
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from pathlib import Path

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 256  # bytes


class Block(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.fc_in, self.fc_out = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, hidden] -> the same."""
        batch, tokens, hidden = x.shape
        q, k, v = (t.view(batch, tokens, self.heads, -1).transpose(1, 2) for t in self.qkv(self.ln_1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, tokens, hidden)
        x = x + self.proj(attended)
        return x + self.fc_out(F.gelu(self.fc_in(self.ln_2(x))))


class ByteGPT(nn.Module):
    """Predicts the next byte; ``forward`` returns the loss."""

    def __init__(self, layers: int = 6, hidden: int = 512, heads: int = 8, tokens: int = 128) -> None:
        super().__init__()
        self.tokens = tokens
        self.wte, self.wpe = nn.Embedding(VOCABULARY, hidden), nn.Embedding(tokens, hidden)
        self.h = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.ln_f, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, VOCABULARY, bias=False)

    @property
    def dummy_inputs(self) -> dict[str, torch.Tensor]:
        """What the model takes, as Hugging Face models tell it."""
        return {"ids": torch.zeros(1, self.tokens, dtype=torch.int64)}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids [batch, tokens] -> the mean cross-entropy of the next byte."""
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        logits = self.head(self.ln_f(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def corpus() -> torch.Tensor:
    """Python's documentation topics and standard-library sources, as one vector of bytes."""
    library = Path(sysconfig.get_path("stdlib"))
    files = [*sorted(library.glob("pydoc_data/*.py")), *sorted(library.glob("*.py"))]
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def batches(text: torch.Tensor, tokens: int, samples: int, rank: int):
    """Random windows of the text, others on every rank, the same in every run."""
    random = torch.Generator().manual_seed(1 + rank)
    while True:
        starts = torch.randint(0, len(text) - tokens, (samples,), generator=random).tolist()
        yield torch.stack([text[start : start + tokens].long() for start in starts])


def main() -> None:
    """Train, and let rank 0 write one JSON line per optimizer step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--local_rank", type=int, default=-1)
    deepspeed.add_config_arguments(parser)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = ByteGPT()
    engine, *_ = deepspeed.initialize(args=arguments, model=model, model_parameters=model.parameters())
    data = batches(corpus(), model.tokens, engine.train_micro_batch_size_per_gpu(), engine.global_rank)
    log = arguments.log.open("w") if engine.global_rank == 0 else None
    for _ in range(arguments.steps):
        began = time.perf_counter()
        for _ in range(engine.gradient_accumulation_steps()):
            loss = engine(next(data).to(engine.device))
            engine.backward(loss)
            engine.step()
        if log:
            log.write(json.dumps({"loss": loss.item(), "seconds": time.perf_counter() - began}) + "\n")
            log.flush()
    if log:
        import ds_osdp

        log.write(json.dumps({"state_bytes": ds_osdp.state_bytes(engine)}) + "\n")
        log.close()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
