from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ds_osdp.config import TensorSpec
from ds_osdp.errors import ProfileError
from ds_osdp.measure import InputTensor, Sample, sample_for

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def build(model: str, config: str, **keys: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        return getattr(transformers, model)(getattr(transformers, config)(**keys))


def described(model: nn.Module, sequence_length: int | None = None) -> str:
    sample = sample_for(model, 2, sequence_length)
    assert sample is not None
    assert sample.micro_batch == 2
    return sample.describe()


def test_sample_from_the_configuration() -> None:
    spec = {"ids": TensorSpec(shape=(16,)), "image": TensorSpec(shape=(3, 8, 8), dtype="float32")}
    sample = Sample.from_config(spec, 4)
    assert sample.tensors == (
        InputTensor("ids", (4, 16), torch.int64),
        InputTensor("image", (4, 3, 8, 8), torch.float32),
    )
    assert sample.micro_batch == 4
    assert sample.describe() == "ids int64[4, 16], image float32[4, 3, 8, 8]"
    assert sample.cast(torch.bfloat16).describe() == "ids int64[4, 16], image bfloat16[4, 3, 8, 8]"


def test_a_sample_without_tensors_is_refused() -> None:
    with pytest.raises(ProfileError, match=r"at least one tensor.*osdp\.input"):
        Sample.from_config({}, 4)


@pytest.mark.parametrize(
    ("model", "config", "keys", "expected"),
    [
        ("GPT2LMHeadModel", "GPT2Config", {"n_layer": 1}, "input_ids int64[2, 8], labels int64[2, 8]"),
        ("LlamaForCausalLM", "LlamaConfig", SMALL, "input_ids int64[2, 8], labels int64[2, 8]"),
        ("LlamaModel", "LlamaConfig", SMALL, "input_ids int64[2, 8]"),
        ("MixtralForCausalLM", "MixtralConfig", SMALL, "input_ids int64[2, 8], labels int64[2, 8]"),
        ("BertForMaskedLM", "BertConfig", SMALL, "input_ids int64[2, 8], labels int64[2, 8]"),
        ("BertForTokenClassification", "BertConfig", SMALL, "input_ids int64[2, 8], labels int64[2, 8]"),
        ("BertForSequenceClassification", "BertConfig", SMALL, "input_ids int64[2, 8], labels int64[2]"),
        (
            "BertForSequenceClassification",
            "BertConfig",
            {**SMALL, "num_labels": 1},
            "input_ids int64[2, 8], labels float32[2]",
        ),
        ("BertForQuestionAnswering", "BertConfig", SMALL, "input_ids int64[2, 8]"),
        ("T5ForConditionalGeneration", "T5Config", {"num_layers": 1}, "input_ids int64[2, 8], labels int64[2, 8]"),
        ("T5Model", "T5Config", {"num_layers": 1}, "input_ids int64[2, 8], decoder_input_ids int64[2, 8]"),
        (
            "ViTForImageClassification",
            "ViTConfig",
            {**SMALL, "image_size": 32},
            "pixel_values float32[2, 3, 32, 32], labels int64[2]",
        ),
        ("ViTModel", "ViTConfig", {**SMALL, "image_size": [32, 16]}, "pixel_values float32[2, 3, 32, 16]"),
    ],
)
def test_hugging_face_models_tell_their_input(model: str, config: str, keys: dict[str, Any], expected: str) -> None:
    assert described(build(model, config, **keys), sequence_length=8) == expected


def test_a_users_subclass_has_the_labels_of_its_base() -> None:
    transformers = pytest.importorskip("transformers")

    class Mine(transformers.GPT2LMHeadModel):
        pass

    with torch.device("meta"):
        model = Mine(transformers.GPT2Config(n_layer=1))
    assert described(model, 8) == "input_ids int64[2, 8], labels int64[2, 8]"


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft uses a name that transformers 5 is about to drop
def test_a_peft_model_takes_what_its_base_takes() -> None:
    peft = pytest.importorskip("peft")
    base = build("LlamaForCausalLM", "LlamaConfig", **SMALL)
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    assert described(model, 8) == "input_ids int64[2, 8], labels int64[2, 8]"


@pytest.mark.parametrize(
    ("model", "config", "keys", "length"),
    [
        ("GPT2Model", "GPT2Config", {"n_layer": 1, "n_positions": 96}, 96),
        ("LlamaModel", "LlamaConfig", {**SMALL, "max_position_embeddings": 8192}, 1024),
        ("MptModel", "MptConfig", {"n_layers": 1, "d_model": 32, "n_heads": 2, "max_seq_len": 64}, 64),
        ("BloomModel", "BloomConfig", {"n_layer": 1}, 1024),
    ],
)
def test_sequences_are_as_long_as_the_model_takes_up_to_1024(model: str, config: str, keys: Any, length: int) -> None:
    assert described(build(model, config, **keys)) == f"input_ids int64[2, {length}]"


class WithDummies(nn.Module):
    def __init__(self, dummies: Any) -> None:
        super().__init__()
        self.dummy_inputs = dummies


def test_dummy_inputs_tell_the_input_of_any_module() -> None:
    model = WithDummies({"x": torch.zeros(7, 3, 5), "mask": torch.ones(7, 3, dtype=torch.bool)})
    assert described(model) == "x float32[2, 3, 5], mask bool[2, 3]"


@pytest.mark.parametrize(
    "model",
    [
        lambda: nn.Linear(2, 2),
        lambda: WithDummies({}),
        lambda: WithDummies({"scale": torch.zeros(())}),
        lambda: WithDummies({"text": "a"}),
        lambda: build("ResNetForImageClassification", "ResNetConfig", depths=[1], hidden_sizes=[8], layer_type="basic"),
        lambda: build("Wav2Vec2Model", "Wav2Vec2Config", **SMALL),
        lambda: build("CLIPModel", "CLIPConfig", text_config=SMALL, vision_config=SMALL),
        lambda: build("VideoMAEModel", "VideoMAEConfig", **SMALL),
    ],
    ids=["plain", "no dummies", "scalar", "text", "unknown size", "speech", "image and text", "video"],
)
def test_models_that_cannot_tell_are_not_guessed(model: Callable[[], nn.Module]) -> None:
    assert sample_for(model(), 2) is None
