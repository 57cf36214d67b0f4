"""A model whose last layer is too big for the budget to be gathered whole: planned in slices, it trains within it.

deepspeed --num_gpus 2 examples/split.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import ds_osdp

CLASSES = 60_000


def configuration(max_slices: int) -> dict[str, Any]:
    """116 MiB hold the states, and slices of the last layer with their gradients one by one; whole, it needs 125 MiB."""
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 1_000_000},
        "osdp": {
            "memory_budget": "116MiB",
            "max_slices": max_slices,
            "input": {"input": {"shape": [64], "dtype": "float32"}},
        },
    }


def build() -> nn.Module:
    """Two layers, of which the last has 7.7 million parameters."""
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, CLASSES, bias=False))


def main() -> None:
    """Try without slices, then train with them."""
    model = build()
    try:
        ds_osdp.initialize(model=model, model_parameters=model.parameters(), config=configuration(max_slices=1))
    except ds_osdp.OsdpError as error:
        refused = str(error)
    engine, *_ = ds_osdp.initialize(model=model, model_parameters=model.parameters(), config=configuration(max_slices=8))
    if engine.global_rank == 0:
        print(f"whole: {refused}")
        for unit in engine.osdp.plan.units:
            if unit.slices > 1:
                print(f"in slices: {unit.name!r} is planned in {unit.slices} slices, {unit.whole_slices} of them whole")
    for step in range(5):
        x = torch.randn(4, 64, device=engine.device)
        loss = nn.functional.cross_entropy(engine(x), torch.arange(4, device=engine.device))
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
