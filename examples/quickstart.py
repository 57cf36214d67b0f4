"""The quick start of README, complete: run it on 2 ranks.

deepspeed --num_gpus 2 examples/quickstart.py
"""

from __future__ import annotations

import torch
from torch import nn

import ds_osdp


def main() -> None:
    """Train a small model for a few steps and show what was planned."""
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 1_000_000},
        "osdp": {"memory_budget": "64MiB", "input": {"input": {"shape": [64], "dtype": "float32"}}},
    }
    engine, *_ = ds_osdp.initialize(model=model, model_parameters=model.parameters(), config=config)
    for step in range(5):
        x = torch.randn(4, 64, device=engine.device)
        loss = (engine(x) - x).square().mean()
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
