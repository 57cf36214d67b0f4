"""A Llama with LoRA adapters, to be planned without weights.

ds-osdp plan --config ds_configs/lora.json --model py:examples.lora_model:build --world-size 8
"""

from __future__ import annotations

from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM


def build() -> PeftModel:
    """What a training script would build: the base model, and adapters on its attention."""
    shape = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=32000,
        max_position_embeddings=1024,
    )
    lora = LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
    return get_peft_model(LlamaForCausalLM(shape), lora)
