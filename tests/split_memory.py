"""What a split unit does to the peak of one rank of eight, which runs alone: its collectives do nothing, and take no time."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from training import CLUSTER
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from ds_osdp import deepspeed_seams as seams
from ds_osdp.cluster import Cluster
from ds_osdp.config import OsdpConfig, TensorSpec
from ds_osdp.job import job_from_config
from ds_osdp.measure import profile_for
from ds_osdp.plan import Stage
from ds_osdp.planner import make_plan
from ds_osdp.prices import Option, Space
from ds_osdp.step import evaluate, priced

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from _alive import Alive

WORLD, HIDDEN, VOCABULARY, TOKENS = 8, 512, 65_536, 64
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.5,
    "zero_optimization": {
        "stage": 3, "reduce_bucket_size": 1_000_000, "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0,
        "stage3_param_persistence_threshold": 0,
    },
    "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
    "zero_allow_untested_optimizer": True,
}  # fmt: skip


class Projection(nn.Module):
    """Two layers under a vocabulary that dwarfs them; ``forward`` returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, HIDDEN)
        self.h = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids)
        for layer in self.h:
            x = x + F.gelu(layer(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Mixture(nn.Module):
    """Fused experts that dwarf what is around them; ``forward`` returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.head = nn.Embedding(256, HIDDEN), nn.Linear(HIDDEN, 256, bias=False)
        self.moe = MixtralSparseMoeBlock(MixtralConfig(hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_local_experts=16))
        self.moe.experts.config._experts_implementation = "grouped_mm"
        for parameter in self.moe.parameters():  # which transformers leaves to its models
            nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        ids = ids % 256
        x = self.wte(ids)
        return F.cross_entropy(self.head(x + self.moe(x)).flatten(0, 1), ids.flatten())


MODELS = {"projection": Projection, "mixture": Mixture}


def peaks(name: str, slices: int) -> dict[str, int]:
    """Measured and predicted peak of a step in which the big units are in so many slices."""
    before_bytes = Alive().peak_bytes  # DeepSpeed holds on to some of an engine that is destroyed
    model = MODELS[name]()
    job = job_from_config(CONFIG, WORLD)
    section = OsdpConfig(input={"ids": TensorSpec(shape=(TOKENS,))}, max_slices=slices)
    profile = profile_for(section, model, job)
    cluster = Cluster.from_dict(CLUSTER, "test")
    space = Space((Stage.FULLY_SHARDED,), max_slices=slices)
    problem = priced(profile, cluster, job, space)
    finest = Option(Stage.FULLY_SHARDED, WORLD, slices)
    choice = [options.index(finest) if finest in (options := problem.options(u)) else 0 for u in range(len(profile.units))]
    plan = make_plan(profile, cluster, job, evaluate(problem, choice).peak_bytes, space=space)
    call: dict[str, Any] = {"model": model, "config": CONFIG}
    seams.split_slices(call, plan)
    with seams.applying(plan):
        engine = deepspeed.initialize(**call)[0]
    seams.attach(engine, plan)
    ids = torch.randint(0, VOCABULARY, (1, TOKENS))
    del call, model
    most = 0
    for _ in range(2):
        alive = Alive()
        with alive:
            engine.backward(engine(ids))
            engine.step()
        most = alive.peak_bytes
    engine.destroy()
    return {"measured": most - before_bytes, "predicted": plan.peak_bytes, "slices": max(unit.slices for unit in plan.units)}


if __name__ == "__main__":
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(WORLD), MASTER_ADDR="127.0.0.1", MASTER_PORT="29777", DS_ACCELERATOR="cpu"
    )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    deepspeed.init_distributed("gloo", verbose=False)
    print(json.dumps([peaks(sys.argv[1], int(slices)) for slices in sys.argv[2:]]))
