"""A mixture of experts in a script that knows nothing of plans: the launcher brings them in.

deepspeed --num_gpus 2 --module ds_osdp.run examples/clients/untouched_mixtral.py --deepspeed_config examples/clients/ds_plain.json
torchrun --nproc_per_node 2 --module ds_osdp.run examples/clients/untouched_mixtral.py --deepspeed_config examples/clients/ds_plain.json
"""  # noqa: E501

from __future__ import annotations

import argparse
from typing import Any

import deepspeed
import torch
from data import sequences
from transformers import MixtralConfig, MixtralForCausalLM

SHAPE = MixtralConfig(
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=4,
    vocab_size=256,
    max_position_embeddings=32,
)


def main(config: Any = None, arguments: argparse.Namespace | None = None) -> dict[str, Any]:
    """Train a small Mixtral.  Returns the losses and the engine."""
    torch.manual_seed(0)
    model = MixtralForCausalLM(SHAPE)
    engine, *_ = deepspeed.initialize(args=arguments, model=model, model_parameters=model.parameters(), config=config)
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
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    parser.add_argument("--local_rank", type=int, default=-1)
    found = main(arguments=parser.parse_args())
    if torch.distributed.get_rank() == 0:
        print("losses", found["losses"], "planned", hasattr(found["engine"], "osdp"))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
