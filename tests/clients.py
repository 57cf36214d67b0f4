"""Every client of examples/clients, with its plan and without, in one start of the ranks."""

from __future__ import annotations

import base64
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hjson
import torch

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "clients"


def stock(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "osdp"}


def in_one_start(folder: str) -> dict[str, Any]:
    """By client: what it returned without a plan and with one, the engines' stages in their place."""
    torch.set_num_threads(1)
    sys.path.insert(0, str(EXAMPLES))
    import accelerate_bert
    import actor_critic
    import hf_trainer
    import peft_lora
    import plain as plain_client
    import untouched_mixtral
    from accelerate.state import AcceleratorState
    from accelerate.utils import DeepSpeedPlugin

    import ds_osdp
    from ds_osdp.errors import ConfigError
    from ds_osdp.report.measured import read_measured

    plain = dict(hjson.loads((EXAMPLES / "ds_plain.json").read_text()))
    auto = json.loads((EXAMPLES / "ds_auto.json").read_text())
    monitored = {**plain, "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "mixtral"}}
    encoded = base64.urlsafe_b64encode(json.dumps(monitored).encode()).decode()

    def accelerate(config: dict[str, Any]) -> dict[str, Any]:
        AcceleratorState._reset_state(reset_partial_state=False)
        return accelerate_bert.main(DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=True))

    def mixtral(config: Any) -> dict[str, Any]:
        with ds_osdp.enable():
            return untouched_mixtral.main(config)

    calls: dict[str, Callable[[], dict[str, Any]]] = {
        "mixtral stock": lambda: mixtral(stock(plain)),
        "mixtral planned": lambda: mixtral(encoded),
        "t5 stock": lambda: plain_client.main("t5", stock(plain)),
        "t5 planned": lambda: plain_client.main("t5"),
        "vit stock": lambda: plain_client.main("vit", stock(plain)),
        "vit planned": lambda: plain_client.main("vit"),
        "lora stock": lambda: peft_lora.main(stock(plain)),
        "lora planned": peft_lora.main,
        "actor_critic stock": lambda: actor_critic.main(stock(actor_critic.ACTOR), stock(actor_critic.CRITIC)),
        "actor_critic planned": actor_critic.main,
        "trainer stock": lambda: hf_trainer.main(stock(auto), f"{folder}/stock"),
        "trainer planned": lambda: hf_trainer.main(output=f"{folder}/planned"),
        "accelerate stock": lambda: accelerate(stock(plain)),
        "accelerate planned": lambda: accelerate(plain),
    }
    found = {}
    for name, call in calls.items():
        result = call()
        engines = result.pop("engines", None) or [result.pop("engine")]
        result["stages"] = [
            sorted({int(s) for s in engine.osdp.plan.stage_of.values()}) if hasattr(engine, "osdp") else None
            for engine in engines
        ]
        found[name] = result
        del engines, call
        gc.collect()
    trainer = hf_trainer.make_trainer(auto, f"{folder}/another")
    found["partitioned at load"] = all(hasattr(p, "ds_id") for p in trainer.model.parameters())
    found["saved"] = sorted(path.name for path in Path(folder, "planned", "final").iterdir())
    measured = read_measured(Path(folder, "mixtral"))
    found["measured"] = list(measured.step_seconds), measured.median_seconds
    greedy = {**actor_critic.ACTOR, "osdp": {**actor_critic.ACTOR["osdp"], "memory_budget": "1PiB"}}
    try:
        actor_critic.main(greedy, actor_critic.CRITIC)
    except ConfigError as error:
        found["greedy"] = str(error)
    return found
