"""The osdp section, and what is read of the rest of a DeepSpeed JSON: accepted, or refused with the next step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_osdp.config import find_section
from ds_osdp.errors import ConfigError, UnsupportedError
from ds_osdp.job import job_from_config
from ds_osdp.measure import optimizer_memory
from ds_osdp.plan import Stage
from ds_osdp.refused import refuse_unsupported


def test_defaults() -> None:
    section = find_section({"osdp": {}})
    assert section is not None
    assert section.enabled
    assert section.memory_budget is None
    assert section.stages == tuple(Stage)


@pytest.mark.parametrize(
    ("section", "model_tells", "replans"),
    [
        ({}, False, True),
        ({"memory_budget": "1GiB", "rules": [{"match": "*", "stage": 0}]}, False, True),
        ({}, True, False),
        ({"input": {"ids": {"shape": [8]}}}, False, False),
        ({"micro_batch": [1, 2]}, False, False),
        ({"plan": "pyproject.toml"}, False, False),
        ({"replan": False}, False, False),
        ({"replan": {}}, True, True),
        ({"plan": "pyproject.toml", "replan": {"after_steps": 3}}, True, True),
    ],
)
def test_plans_while_training_where_nothing_says_what_to_plan_for(
    section: dict[str, Any], model_tells: bool, replans: bool
) -> None:
    config = find_section({"osdp": section})
    assert config is not None
    assert (config.replans(model_tells=model_tells) is not None) == replans


def test_no_section() -> None:
    assert find_section({"zero_optimization": {"stage": 3}}) is None


@pytest.mark.parametrize("name", ["opsd", "OSDP", "odsp", "osdP", "ospd", "osdp_"])
def test_a_near_miss_of_the_name_is_an_error(name: str) -> None:
    with pytest.raises(ConfigError, match="did you mean 'osdp'"):
        find_section({name: {}})


KNOWN_KEYS = (
    "train_batch_size optimizer scheduler fp16 bf16 amp zero_optimization steps_per_print wall_clock_breakdown "
    "dump_state flops_profiler activation_checkpointing sparse_attention data_efficiency curriculum_learning tensorboard "
    "wandb csv_monitor elasticity comms_logger autotuning compression_training checkpoint data_types compile aio"
)


@pytest.mark.parametrize("key", KNOWN_KEYS.split())
def test_deepspeeds_own_keys_are_no_near_miss(key: str) -> None:
    assert find_section({key: {}}) is None


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"memory_budgt": "3GiB"}, "did you mean 'memory_budget'"),
        ({"xyzzy": 1}, "known keys"),
        ({"memory_budget": "3GB "}, "'3GB '"),
        ({"memory_budget": -1}, "positive"),
        ({"memory_budget": "auto"}, "not a size"),
        ({"stages": [0, 7]}, "stages"),
        ({"stages": []}, "at least 1"),
        ({"rules": [{"match": "*"}]}, "stage"),
        ({"rules": [{"match": "", "stage": 0}]}, "match"),
        ({"rules": [{"match": "*", "stage": 4}]}, "stage"),
        ({"input": {"ids": {"shape": [0]}}}, "shape"),
        ({"input": {"ids": {"shape": [8], "dtype": "integer"}}}, "unknown dtype 'integer'"),
        ({"solver": {"gap": 1.5}}, "gap"),
        ({"solver": {"time_limit_s": 0}}, "time_limit_s"),
        ({"replan": {"after_steps": 0}}, "after_steps"),
        ({"replan": True}, "replan"),
        ({"replan": {}, "micro_batch": [1, 2]}, "remove one"),
        ({"plan": "nowhere.json"}, "no file 'nowhere.json'"),
        ({"cluster": "nowhere.json"}, "no file 'nowhere.json'"),
        ({"cluster": {"format": "x"}}, "osdp.cluster"),
        ({"plan": "pyproject.toml", "rules": [{"match": "*", "stage": 0}]}, "remove osdp.rules"),
        (3, "must be an object"),
        ("auto", "must be an object"),
    ],
)
def test_bad_sections(section: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_section({"osdp": section})


ZERO3: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}


@pytest.mark.parametrize("stage", [0, 1, 2, None, "3"])
def test_only_stage_3(stage: object) -> None:
    with pytest.raises(ConfigError, match=r"zero_optimization\.stage"):
        refuse_unsupported({"zero_optimization": {"stage": stage}})


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}, "offload_optimizer"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "offload_param"),
        ({"zero_optimization": {"stage": 3, "cpu_offload": True}}, "offload_optimizer"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}, "hpZ"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "ZeRO[+][+]"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}}, "ZeRO[+][+]"),
        ({"zero_optimization": {"stage": 3, "zenflow": {"topk_ratio": 0.1}}}, "ZenFlow"),
        ({"zero_optimization": {"stage": 3, "stage3_module_granularity_threshold": 5}}, "granularity"),
        ({"compile": {"deepcompile": True}}, "DeepCompile"),
        ({"expert_parallel": {"enabled": True}}, "AutoEP"),
        ({"tensor_parallel": {"autotp_size": 4}}, "AutoTP"),
        ({"sequence_parallel_size": 2}, "sequence_parallel"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast"),
        ({"hybrid_engine": {"enabled": True}}, "hybrid_engine"),
        ({"optimizer": {"type": "Muon"}}, "Muon"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "bf16_master"),
        ({"gradient_predivide_factor": 2.0}, "predivide"),
        ({"prescale_gradients": True}, "prescale"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op"),
        ({"optimizer": {"type": "Lamb"}}, "Lamb"),
        ({"amp": {"enabled": True}}, "amp"),
        ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, "fp16_master"),
        ({"compile": {"passes": ["autosp"]}}, "passes"),
        ({"compression_training": {"weight_quantization": {}}}, "compression_training"),
        ({"quantize_training": {"enabled": True}}, "quantize_training"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True}}, "nontrainable"),
        ({"zero_optimization": {"stage": 3, "stage3_use_all_reduce_for_fetch_params": True}}, "all_reduce_for_fetch"),
        ({"zero_optimization": {"stage": 3, "memory_efficient_linear": False}}, "memory_efficient_linear"),
        ({"zero_optimization": {"stage": 3, "cpu_offload_param": True}}, "offload_param"),
    ],
)
def test_refused_by_name(change: dict[str, Any], name: str) -> None:
    with pytest.raises(UnsupportedError, match=name):
        refuse_unsupported({**ZERO3, **change})


def test_an_optimizer_object_that_looks_at_whole_tensors_is_refused() -> None:
    class Adafactor:
        pass

    with pytest.raises(UnsupportedError, match="Adafactor"):
        refuse_unsupported(ZERO3, optimizer=Adafactor())


@pytest.mark.parametrize(
    "harmless",
    [
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none"}, "zero_hpz_partition_size": 1}},
        {"compile": {"deepcompile": False}, "torch_autocast": {"enabled": False}, "amp": {"enabled": False}},
    ],
)
def test_switched_off_is_not_refused(harmless: dict[str, Any]) -> None:
    refuse_unsupported({**ZERO3, **harmless})


@pytest.mark.parametrize(
    ("batch", "micro", "accumulation"),
    [
        ({"train_batch_size": 32}, 8, 1),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 2}, 4, 2),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}, 2, 4),
        ({"train_micro_batch_size_per_gpu": 3}, 3, 1),
        ({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5}, 3, 5),
    ],
)
def test_batch_sizes_are_completed_as_deepspeed_does(batch: dict[str, int], micro: int, accumulation: int) -> None:
    job = job_from_config(batch, 4)
    assert (job.micro_batch, job.accumulation) == (micro, accumulation)


@pytest.mark.parametrize(
    "batch",
    [
        {},
        {"train_batch_size": 30},
        {"train_batch_size": 2},
        {"train_micro_batch_size_per_gpu": 0},
        {"train_micro_batch_size_per_gpu": "auto"},
        {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2},
    ],
)
def test_batch_sizes_that_do_not_add_up(batch: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"batch|number"):
        job_from_config(batch, 4)


def test_precision_and_optimizer() -> None:
    job = job_from_config({**ZERO3, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, 2)
    assert (job.parameter_dtype, job.gradient_dtype, job.communication_dtype) == ("bfloat16", "float32", "bfloat16")
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    read = {
        torch.optim.AdamW(parameters): (2, 2),
        torch.optim.AdamW(parameters, amsgrad=True, fused=True): (3, 0),
        torch.optim.SGD(parameters, lr=1.0): (0, 0),
        torch.optim.SGD(parameters, lr=1.0, momentum=0.9): (1, 0),
        torch.optim.Adagrad(parameters): (1, 1),
        torch.optim.AdamW([{"params": []}, {"params": parameters}], fused=True): (2, 0),
        torch.optim.Adafactor: (1, 2),
    }
    for optimizer, memory in read.items():
        assert optimizer_memory(optimizer) == memory
        job = job_from_config({**ZERO3, "optimizer": {"type": "Lion"}}, 2, optimizer=optimizer_memory(optimizer))
        assert (job.optimizer_states, job.optimizer_temporaries) == memory
    assert job_from_config({**ZERO3, "optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}, 2).optimizer_states == 1


@pytest.mark.parametrize("key", ["reduce_bucket_size", "stage3_max_reuse_distance", "sub_group_size"])
def test_a_size_left_to_hugging_face_is_an_error(key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        job_from_config({**ZERO3, "zero_optimization": {"stage": 3, key: "auto"}}, 2)
