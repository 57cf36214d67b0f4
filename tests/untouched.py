"""A training script that knows nothing of plans; a test runs a copy of it."""

import sys

import deepspeed
import torch
from cases import Case
from models import GPT, batch
from training import PLANS, ds_config

torch.set_num_threads(1)
model = GPT()
config = ds_config(Case(name="script"), PLANS["some"])
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
loss = engine(batch(0, engine.global_rank))
engine.backward(loss)
engine.step()
if engine.global_rank == 0:
    stages = sorted({int(stage) for stage in engine.osdp.plan.stage_of.values()})
    print("planned stages", stages, "argument", sys.argv[-1], flush=True)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
