"""How well the peak memory of a rank is predicted: plans of eight models against dry runs of DeepSpeed's real engine.

    python benchmarks/memory_prediction.py --json

Every row is one plan: its predicted peak, and the most bytes of tensors alive in three real optimizer steps of rank 0 of N
(real tensors on the CPU, collectives that return at once). The models are small, so that parameters, states, gathers and
buckets weigh as much as activations; the buckets are Hugging Face's for their hidden size, so that they hide nothing.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from ds_osdp.job import Job
    from ds_osdp.measure import Sample
    from ds_osdp.plan import Plan
    from ds_osdp.profile import ModelProfile

MODELS = ("gpt2", "bert", "opt", "llama", "t5", "vit", "mixtral", "lora")
WORLDS = (2, 8, 64)
MICRO_BATCHES = (1, 4)
PRECISIONS = ("fp32", "bf16")
PLANS = ("stage 0", "stage 1", "stage 2", "stage 3", "mixed")
HIDDEN, TOKENS = 64, 64

SETTINGS: dict[str, dict[str, Any]] = {
    "base": {},
    "no prefetch": {"zero_optimization": {"stage3_prefetch_bucket_size": 0}},
    "kept by reuse distance": {
        "zero_optimization": {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 1_000_000_000}
    },
    "60,000 live parameters": {"zero_optimization": {"stage3_max_live_parameters": 60_000}},
    "small sub-groups": {"zero_optimization": {"sub_group_size": 20_000}},
    "fp32 accumulation": {"data_types": {"grad_accum_dtype": "fp32"}},
    "torch AdamW": {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}},
    "SGD": {"optimizer": {"type": "SGD", "params": {"lr": 1e-3}}},
    "SGD, momentum": {"optimizer": {"type": "SGD", "params": {"lr": 1e-3, "momentum": 0.9}}},
    "Adafactor": {"optimizer": {"type": "Adafactor", "params": {"lr": 1e-3}}},
}
"""What is changed of the configuration; all but the first are run for :data:`VARIED` only."""
VARIED = ("gpt2", "vit")


def main() -> int:
    """Compare every combination; print a table, or one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="two models on 8 ranks")
    parser.add_argument("--worker", nargs=2, metavar=("MODEL", "N"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(_rows(arguments.worker[0], int(arguments.worker[1]), quick=arguments.quick)))
        return 0
    models, worlds = (("gpt2", "mixtral"), (8,)) if arguments.quick else (MODELS, WORLDS)
    # A process has one world.
    jobs = [(model, world) for model in models for world in worlds]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        rows = [row for found in pool.map(lambda job: _worker(*job, quick=arguments.quick), jobs) for row in found]
    errors = [row["error_percent"] for row in rows]
    summary = {
        "rows": len(rows),
        "within_5_percent": 100 * sum(abs(error) <= 5 for error in errors) / len(errors),
        "worst_under": max(0.0, -min(errors)),
        "worst_over": max(0.0, *errors),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("torch", "deepspeed", "transformers", "peft")},
        "configuration": _config("fp32", 1, "base"),
        "tokens": TOKENS,
        "by_row": rows,
    }
    if not arguments.json:
        for row in rows:
            print(row)
        del summary["by_row"]
    print(json.dumps(summary))
    return 0


def _worker(model: str, world: int, *, quick: bool) -> list[dict[str, Any]]:
    command = [sys.executable, __file__, "--worker", model, str(world), *(["--quick"] if quick else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        sys.stderr.write(done.stderr)
        raise SystemExit(f"{model} on {world} ranks could not be measured")
    return list(json.loads(done.stdout.splitlines()[-1]))


def _rows(kind: str, world: int, *, quick: bool) -> list[dict[str, Any]]:
    import torch

    warnings.filterwarnings("ignore")
    rows = []
    for micro_batch in MICRO_BATCHES[: 1 if quick else None]:
        model, sample = _build(kind, micro_batch)
        for precision in PRECISIONS:
            dtype = torch.bfloat16 if precision == "bf16" else torch.float32
            varied = kind in VARIED and world == 8 and micro_batch == 1 and not quick
            for setting in SETTINGS if varied else ("base",):
                config = _config(precision, micro_batch, setting)
                rows += [
                    {
                        "model": kind,
                        "world_size": world,
                        "micro_batch": micro_batch,
                        "precision": precision,
                        "setting": setting,
                        "plan": plan,
                        **compare(copy.deepcopy(model), sample, config, dtype, world, plan),
                    }
                    for plan in PLANS
                ]
    return rows


def plan_named(name: str, profile: ModelProfile, job: Job) -> Plan:
    """One of :data:`PLANS`."""
    from ds_osdp.cluster import DEFAULT_CLUSTER, Cluster
    from ds_osdp.config import Rule
    from ds_osdp.plan import Stage
    from ds_osdp.planner import make_plan

    # In the mixed plan neighbours differ, and every stage is used alike.
    stages = [7 * u % 4 if name == "mixed" else int(name[-1]) for u in range(len(profile.units))]
    rules = [
        Rule(match=unit.parameters[0].name, stage=Stage(stage))
        for unit, stage in zip(profile.units, stages, strict=True)
        if unit.parameters
    ]
    return make_plan(profile, Cluster.shipped(DEFAULT_CLUSTER), job, 1 << 40, rules=rules)


def compare(model: nn.Module, sample: Sample, config: dict[str, Any], dtype: Any, world: int, name: str) -> dict[str, Any]:
    """The peak of one plan, predicted and measured; ``model`` is taken over by the engine."""
    from ds_osdp.dry_run import dry_run
    from ds_osdp.job import job_from_config
    from ds_osdp.measure import profile_model

    job = job_from_config(config, world)
    plan = plan_named(name, profile_model(model, sample, dtype=dtype), job)
    measured = dry_run(model, config, plan, sample, accumulation=job.accumulation, dtype=dtype, real=True)
    return {
        "predicted_bytes": plan.peak_bytes,
        "predicted_moment": plan.peak_moment,
        "measured_bytes": measured.peak_bytes,
        "measured_moment": measured.peak_moment,
        "allocator_bytes": measured.allocator_bytes,
        "error_percent": 100 * (plan.peak_bytes / measured.peak_bytes - 1),
    }


def _config(precision: str, micro_batch: int, setting: str) -> dict[str, Any]:
    changes = SETTINGS[setting]
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": precision == "bf16"},
        **changes,
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": HIDDEN**2,
            "stage3_prefetch_bucket_size": int(0.9 * HIDDEN**2),
            "stage3_max_reuse_distance": 0,
            **changes.get("zero_optimization", {}),
        },
    }


def _build(kind: str, micro_batch: int) -> tuple[nn.Module, Sample]:
    """A small model of the kind, and its input."""
    import torch
    import transformers as hf

    from ds_osdp.measure import sample_for

    # Of the text models; an image model has no vocabulary, and keeps no cache.
    text = {"vocab_size": 512, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    body = {"hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4}
    mlp = {**body, "intermediate_size": 160}
    grouped = {**mlp, **text, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model: nn.Module
    if kind == "gpt2":
        config = hf.GPT2Config(n_embd=HIDDEN, n_layer=2, n_head=4, n_positions=128, **text)
        model = hf.GPT2LMHeadModel(config)
    elif kind == "bert":
        model = hf.BertForMaskedLM(hf.BertConfig(**mlp, vocab_size=512))
    elif kind == "opt":
        config = hf.OPTConfig(**body, **text, ffn_dim=160, max_position_embeddings=128, word_embed_proj_dim=HIDDEN)
        model = hf.OPTForCausalLM(config)
    elif kind == "t5":
        config = hf.T5Config(d_model=HIDDEN, d_kv=16, d_ff=160, num_layers=2, num_heads=4, decoder_start_token_id=0, **text)
        model = hf.T5ForConditionalGeneration(config)
    elif kind == "vit":
        model = hf.ViTForImageClassification(hf.ViTConfig(**mlp, image_size=32, patch_size=8))
    elif kind == "mixtral":
        model = hf.MixtralForCausalLM(hf.MixtralConfig(**grouped, num_local_experts=4))
    else:
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**grouped))
    if kind == "lora":
        import peft

        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, lora)
    model.train()
    sample = sample_for(model, micro_batch, TOKENS)
    assert sample is not None, "all of these can tell what they take"
    return model, sample


if __name__ == "__main__":
    sys.exit(main())
