"""A T5 or a ViT with plain DeepSpeed: two lines bring the plan in.

deepspeed --num_gpus 2 examples/clients/plain.py --model t5
torchrun --nproc_per_node 2 examples/clients/plain.py --model vit
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import deepspeed
import torch
from data import sequences
from transformers import T5Config, T5ForConditionalGeneration, ViTConfig, ViTForImageClassification

import ds_osdp

T5 = T5Config(
    vocab_size=256, d_model=48, d_kv=12, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=0, dropout_rate=0.0
)
VIT = ViTConfig(hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96, image_size=16, patch_size=4)


def t5() -> tuple[torch.nn.Module, list[dict[str, torch.Tensor]]]:
    """A model that is to count on, and what it is shown."""
    rows = sequences(T5.vocab_size)
    return T5ForConditionalGeneration(T5), [{"input_ids": row[:16], "labels": row[16:]} for row in rows]


def vit() -> tuple[torch.nn.Module, list[dict[str, torch.Tensor]]]:
    """A model that is to tell bright images from dark ones, and what it is shown."""
    generator = torch.Generator().manual_seed(0)
    labels = [torch.tensor(i % 2) for i in range(16)]
    images = [label + torch.randn(3, VIT.image_size, VIT.image_size, generator=generator) for label in labels]
    return ViTForImageClassification(VIT), [{"pixel_values": i, "labels": y} for i, y in zip(images, labels, strict=True)]


MODELS = {"t5": t5, "vit": vit}
PLAIN = str(Path(__file__).with_name("ds_plain.json"))


def main(name: str, config: Any = PLAIN) -> dict[str, Any]:
    """Train it.  Returns the losses and the engine."""
    ds_osdp.enable()
    torch.manual_seed(0)
    model, rows = MODELS[name]()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    losses = []
    for i in range(8):
        samples = rows[(2 * i + engine.global_rank) % 14 :][:2]
        batch = {key: torch.stack([sample[key] for sample in samples]).to(engine.device) for key in samples[0]}
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return {"losses": losses, "engine": engine}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, default="t5")
    parser.add_argument("--local_rank", type=int, default=-1)
    found = main(parser.parse_args().model)
    if torch.distributed.get_rank() == 0:
        print("losses", found["losses"], "planned", hasattr(found["engine"], "osdp"))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
