"""Stock DeepSpeed on ranks where this package cannot be imported."""

from __future__ import annotations

import sys
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from models import GPT, batch


class _Blocked:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == "ds_osdp":
            raise ImportError(f"{name} is not installed")


CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "sub_group_size": 9_000},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
}


def loads(folder: str, savers: list[str], tag: str) -> dict[str, list[str]]:
    """What differs after a load from what each saver held when it saved."""
    assert "ds_osdp" not in sys.modules
    blocked = _Blocked()
    sys.meta_path.insert(0, blocked)  # type: ignore[arg-type]
    model = GPT()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("h.2." not in name)
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    parameters = [{"params": [p for n, p in trained if n.endswith("bias") is bias]} for bias in (False, True)]
    engine = deepspeed.initialize(model=model, model_parameters=parameters, config=CONFIG)[0]
    states, _ = torch.load(f"{folder}/{tag}.pt")
    found = {}
    for saver in savers:
        engine.load_checkpoint(f"{folder}/{saver}", tag=tag)
        loaded = {name: safe_get_full_fp32_param(p) for name, p in trained}
        for key in ("exp_avg", "exp_avg_sq"):
            loaded |= {f"{name} {key}": safe_get_full_optimizer_state(p, key) for name, p in trained}
        found[saver] = [name for name, values in loaded.items() if not torch.equal(values, states[saver][name])]
        loss = engine(batch(0, engine.global_rank))
        engine.backward(loss)
        engine.step()
    engine.destroy()
    sys.meta_path.remove(blocked)  # type: ignore[arg-type]
    return found
