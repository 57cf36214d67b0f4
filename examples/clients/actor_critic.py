"""Two engines in one script: each has its own plan, and they share the memory.

deepspeed --num_gpus 2 examples/clients/actor_critic.py
"""

from __future__ import annotations

import json
from typing import Any

import deepspeed
import torch
from torch import nn

import ds_osdp

ACTOR: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 1_000_000},
    "osdp": {"memory_budget": "192MiB", "input": {"input": {"shape": [16], "dtype": "float32"}}},
}
CRITIC: dict[str, Any] = {**ACTOR, "osdp": {**ACTOR["osdp"], "memory_budget": "64MiB"}}


def main(actor_config: dict[str, Any] = ACTOR, critic_config: dict[str, Any] = CRITIC) -> dict[str, Any]:
    """Train both in turn on made-up rewards.  Returns the losses and the engines."""
    ds_osdp.enable()
    torch.manual_seed(0)
    actor = nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 4))
    critic = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    actor_engine, *_ = deepspeed.initialize(model=actor, model_parameters=actor.parameters(), config=actor_config)
    critic_engine, *_ = deepspeed.initialize(model=critic, model_parameters=critic.parameters(), config=critic_config)
    generator = torch.Generator().manual_seed(actor_engine.global_rank)
    losses = []
    for _ in range(4):
        state = torch.randn(4, 16, generator=generator).to(actor_engine.device)
        policy = actor_engine(state).log_softmax(-1)
        reward = state[:, :4].gather(1, policy.argmax(-1, keepdim=True))
        value = critic_engine(state)
        advantage = (reward - value).detach()
        actor_loss = -(policy.max(-1, keepdim=True).values * advantage).mean()
        critic_loss = (reward - value).square().mean()
        for engine, loss in ((actor_engine, actor_loss), (critic_engine, critic_loss)):
            engine.backward(loss)
            engine.step()
        losses += [actor_loss.item(), critic_loss.item()]
    return {"losses": losses, "engines": [actor_engine, critic_engine]}


if __name__ == "__main__":
    found = main()
    if torch.distributed.get_rank() == 0:
        print(json.dumps(found["losses"]))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
