"""Two defects of loading a universal checkpoint with ZeRO stage 3, seen with DeepSpeed 0.19.8; run as ``python FILE``.

1. All sub-groups share one ``step`` tensor (``load_hp_checkpoint_state_from_checkpoint_dir_stage3``, stage3.py near 3681:
   ``self.optimizer.state[fp32_param]['step'] = state_step``).  Each sub-group's step advances it, so that after one step of S
   sub-groups Adam has counted S, and its bias correction is wrong.
2. All optimizer groups get the hyperparameters of the first (near 3687, ``optim_sd[...]["param_groups"][0]`` for every
   group): another learning rate or no weight decay for some parameters is lost.

Exits with 1 if it finds either.  Needs one process and no GPU.
"""

from __future__ import annotations

import os
import sys
import tempfile
from argparse import Namespace
from typing import Any

os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29571", DS_ACCELERATOR="cpu")

import deepspeed
import torch
from deepspeed.checkpoint.ds_to_universal import main as ds_to_universal


def start(*, universal: bool) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    groups = [
        {"params": [p for p in model.parameters() if p.dim() == 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "sub_group_size": 64},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "checkpoint": {"load_universal": universal},
    }
    return deepspeed.initialize(model=model, model_parameters=groups, config=config)[0]


def train(engine: Any, steps: int) -> None:
    for _ in range(steps):
        engine.backward(engine(torch.ones(1, 8)).square().sum())
        engine.step()


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        engine = start(universal=False)
        train(engine, 3)
        engine.save_checkpoint(folder, tag="saved")
        engine.destroy()
        workers = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
        ds_to_universal(Namespace(input_folder=f"{folder}/saved", output_folder=f"{folder}/universal", **workers))
        engine = start(universal=True)
        engine.load_checkpoint(folder, tag="universal")
        decays = [group["weight_decay"] for group in engine.optimizer.optimizer.param_groups]
        train(engine, 1)
        steps = [int(state["step"]) for state in engine.optimizer.optimizer.state.values()]
    print(f"Adam's steps after 3 + 1, per sub-group: {steps}")
    print(f"weight decay, per optimizer group (saved: 0.1 and 0.0): {decays}")
    return int(set(steps) != {4} or decays != [0.1, 0.0])


if __name__ == "__main__":
    status = main()
    torch.distributed.destroy_process_group()
    sys.exit(status)
