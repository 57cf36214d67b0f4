"""LoRA with PEFT: the frozen weights are only gathered, so a plan replicates as many of them as the budget holds.

deepspeed --num_gpus 2 examples/clients/peft_lora.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
from data import sequences
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import ds_osdp

CONFIG = str(Path(__file__).with_name("ds_plain.json"))
SHAPE = LlamaConfig(
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=256,
    max_position_embeddings=32,
)


def main(config: Any = CONFIG) -> dict[str, Any]:
    """Train the adapters of a small Llama.  Returns the losses and the engine."""
    ds_osdp.enable()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = get_peft_model(LlamaForCausalLM(SHAPE), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
    rows = sequences(SHAPE.vocab_size)
    losses = []
    for i in range(8):
        batch = torch.stack(rows[(2 * i + engine.global_rank) % 14 :][:2]).to(engine.device)
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return {"losses": losses, "engine": engine}


if __name__ == "__main__":
    found = main()
    if torch.distributed.get_rank() == 0:
        print("losses", found["losses"])
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
