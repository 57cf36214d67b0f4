"""Accelerate: the script knows neither DeepSpeed nor plans, but for one line.

accelerate launch --config_file examples/clients/accelerate.yaml examples/clients/accelerate_bert.py
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from data import sequences
from transformers import BertConfig, BertForMaskedLM

import ds_osdp

SHAPE = BertConfig(
    hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, vocab_size=256, max_position_embeddings=32
)


def main(deepspeed_plugin: Any = None) -> dict[str, Any]:
    """Train a small BERT.  Returns the losses and the engine."""
    ds_osdp.enable()
    accelerator = Accelerator(deepspeed_plugin=deepspeed_plugin)
    torch.manual_seed(0)
    model = BertForMaskedLM(SHAPE)
    # The JSON names an optimizer; Accelerate wants a placeholder for it.
    from accelerate.utils import DummyOptim

    loader = torch.utils.data.DataLoader(sequences(SHAPE.vocab_size), batch_size=2)
    engine, _, loader = accelerator.prepare(model, DummyOptim(model.parameters()), loader)
    losses = []
    for batch in loader:
        with accelerator.accumulate(engine):
            loss = engine(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
        losses.append(loss.item())
    accelerator.print("losses", losses, "planned", hasattr(engine, "osdp"))
    return {"losses": losses, "engine": engine}


if __name__ == "__main__":
    main()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
