from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ds_osdp.errors import ProfileError
from ds_osdp.measure import InputTensor, Sample, profile_model, sample_for
from ds_osdp.profile import ModelProfile, UnitProfile, Work

BATCH, TOKENS, IN, OUT = 2, 3, 8, 16
ROWS = BATCH * TOKENS
X = Sample((InputTensor("x", (BATCH, TOKENS, IN), torch.float32),))
IDS = Sample((InputTensor("ids", (BATCH, TOKENS), torch.int64),))
FLOAT = 4


class Chain(nn.Module):
    """Runs its layers in the order ``order``; ``names`` is the order of definition."""

    def __init__(self, layers: dict[str, nn.Module], order: list[str]) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.order:
            x = getattr(self, name)(x)
        return x


def unit(profile: ModelProfile, name: str) -> UnitProfile:
    (found,) = (u for u in profile.units if u.name == name)
    return found


def linear_flops(times: int, rows: int = ROWS, inputs: int = IN, outputs: int = OUT) -> int:
    return times * 2 * rows * inputs * outputs


def names(profile: ModelProfile) -> list[str]:
    return [u.name for u in profile.units]


# --- one layer, by hand


def test_linear_by_hand() -> None:
    model = Chain({"layer": nn.Linear(IN, OUT)}, ["layer"])
    profile = profile_model(model, X)
    layer = unit(profile, "layer")
    assert profile.model == "Chain"
    assert profile.micro_batch == BATCH
    assert profile.sample == "x float32[2, 3, 8]"
    assert [(p.name, p.shape, p.dtype, p.trainable) for p in layer.parameters] == [
        ("layer.weight", (OUT, IN), "float32", True),
        ("layer.bias", (OUT,), "float32", True),
    ]
    # DeepSpeed's linear adds the bias to what it has multiplied.
    assert layer.forward == Work(flops=linear_flops(1), bytes_moved=(2 * ROWS * OUT + OUT) * FLOAT)
    # The input needs no gradient: backward is the weight's product and the sum of the (expanded) gradient for the bias.
    assert layer.backward.flops == linear_flops(1)
    assert layer.activation_bytes == ROWS * IN * FLOAT
    # Only the output is alive beside it; the gradients are the layer's own.
    assert layer.transient_bytes == ROWS * OUT * FLOAT


def test_a_model_can_be_its_only_unit() -> None:
    profile = profile_model(nn.Linear(IN, OUT), Sample((InputTensor("input", (ROWS, IN), torch.float32),)))
    assert names(profile) == [""]
    assert [p.name for p in profile.parameters] == ["weight", "bias"]


def test_second_layer_also_makes_the_gradient_of_its_input() -> None:
    model = Chain({"a": nn.Linear(IN, OUT, bias=False), "b": nn.Linear(OUT, IN, bias=False)}, ["a", "b"])
    profile = profile_model(model, X)
    a, b = unit(profile, "a"), unit(profile, "b")
    assert a.backward.flops == linear_flops(1)
    assert b.backward.flops == linear_flops(2)
    assert a.activation_bytes == ROWS * IN * FLOAT
    assert b.activation_bytes == ROWS * OUT * FLOAT
    # The outputs, and in backward the gradient of the weight beside that of b's input, which is a's output.
    assert (a.transient_bytes, b.transient_bytes) == (ROWS * OUT * FLOAT, ROWS * IN * FLOAT)
    gradients = (ROWS * OUT + IN * OUT) * FLOAT
    assert 0 <= b.backward_transient_bytes - gradients <= FLOAT  # and the scalar that was expanded to b's own gradient
    assert a.backward_transient_bytes == gradients


def test_operators_between_units_count_with_the_one_that_ran_last() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(IN, IN, bias=False), nn.Linear(IN, IN, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 2  # before the first unit: with the first
            return self.b(torch.sin(self.a(x)))

    profile = profile_model(Residual(), X)
    tensor = ROWS * IN * FLOAT
    assert unit(profile, "a").forward == Work(flops=linear_flops(1, outputs=IN), bytes_moved=2 * tensor + 2 * tensor)
    assert unit(profile, "b").forward == Work(flops=linear_flops(1, outputs=IN))
    # The backward of sin: its own cos, and the product.
    assert unit(profile, "a").backward == Work(flops=linear_flops(1, outputs=IN), bytes_moved=2 * tensor + 3 * tensor)
    # b's input is sin's output; sin saved a's output.
    assert unit(profile, "a").activation_bytes == 2 * tensor
    assert unit(profile, "b").activation_bytes == tensor


def test_depthwise_convolution_is_not_priced_as_a_dense_one() -> None:
    convolution = nn.Conv1d(IN, IN, 3, padding=1, groups=IN, bias=False)
    model = Chain({"first": nn.Conv1d(IN, IN, 1, bias=False), "depthwise": convolution}, ["first", "depthwise"])
    depthwise = unit(profile_model(model, Sample((InputTensor("x", (BATCH, IN, TOKENS), torch.float32),))), "depthwise")
    assert depthwise.forward.flops == 2 * BATCH * TOKENS * IN * 3
    assert depthwise.backward.flops == 2 * depthwise.forward.flops


# --- which units there are, and in which order


def test_units_come_in_the_order_of_their_first_forward_and_unused_ones_last() -> None:
    layers = {name: nn.Linear(IN, IN) for name in ("unused", "c", "b", "a", "idle")}
    profile = profile_model(Chain(layers, ["a", "b", "a", "c"]), X)
    assert names(profile) == ["a", "b", "c", "unused", "idle"]
    for name in ("unused", "idle"):
        assert unit(profile, name) == UnitProfile(name=name, parameters=unit(profile, name).parameters)
        assert [p.name for p in unit(profile, name).parameters] == [f"{name}.weight", f"{name}.bias"]


def test_repeated_calls_add_up() -> None:
    twice = profile_model(Chain({"a": nn.Linear(IN, IN), "b": nn.Linear(IN, IN)}, ["a", "b", "a"]), X)
    assert unit(twice, "a").forward.flops == linear_flops(2, outputs=IN)
    # Backward of the first call needs no gradient of the input, that of the second does.
    assert unit(twice, "a").backward.flops == linear_flops(3, outputs=IN)
    assert unit(twice, "a").activation_bytes == 2 * ROWS * IN * FLOAT


def test_parameters_used_without_any_forward_keep_their_work() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(IN, OUT), nn.Linear(OUT, IN)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(nn.functional.linear(x, self.a.weight), self.b.weight)

    profile = profile_model(Functional(), X)
    assert names(profile) == ["a", "b"]
    assert unit(profile, "a").forward.flops == linear_flops(2)
    assert unit(profile, "a").backward.flops == linear_flops(3)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(OUT, IN), nn.Linear(IN, IN), nn.Linear(IN, OUT, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(ids)))


def test_tied_parameter_is_listed_once_under_its_first_name() -> None:
    profile = profile_model(Tied(), IDS)
    assert names(profile) == ["embed", "body"]
    assert [p.name for p in profile.parameters] == ["embed.weight", "body.weight", "body.bias"]
    # The head owns nothing: its work is that of the unit that ran before it.
    assert unit(profile, "body").forward.flops == linear_flops(1, outputs=IN) + linear_flops(1)
    assert unit(profile, "body").backward.flops == linear_flops(2, outputs=IN) + linear_flops(2)
    # The head's part of the gradient waits for the embedding's, and is nobody's own meanwhile.
    assert unit(profile, "embed").backward_transient_bytes >= 2 * OUT * IN * FLOAT


def test_a_tied_module_with_a_parameter_of_its_own_stays_a_unit() -> None:
    model = Tied()
    model.head.bias = nn.Parameter(torch.zeros(OUT))
    profile = profile_model(model, IDS)
    assert [p.name for p in unit(profile, "head").parameters] == ["head.bias"]
    assert unit(profile, "head").forward.flops == linear_flops(1)


# --- what needs a gradient


@pytest.mark.parametrize(
    ("frozen", "a_times", "b_times"),
    [((), 1, 2), (("a",), 0, 1), (("b",), 1, 1), (("a", "b"), 0, 0)],
)
def test_frozen_parameters_cost_no_weight_gradient(frozen: tuple[str, ...], a_times: int, b_times: int) -> None:
    model = Chain({"a": nn.Linear(IN, OUT, bias=False), "b": nn.Linear(OUT, IN, bias=False)}, ["a", "b"])
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    profile = profile_model(model, X)
    assert unit(profile, "a").backward.flops == linear_flops(a_times)
    assert unit(profile, "b").backward.flops == linear_flops(b_times)
    assert [p.trainable for p in profile.parameters] == [name not in frozen for name in ("a", "b")]


def test_a_frozen_linear_layer_keeps_its_input_as_deepspeeds_own_does() -> None:
    model = Chain({"a": nn.Linear(IN, OUT), "b": nn.Linear(OUT, IN).requires_grad_(False)}, ["a", "b"])
    assert unit(profile_model(model, X), "b").activation_bytes == ROWS * OUT * FLOAT


def test_parameters_of_which_views_are_saved_are_told_from_those_saved_themselves() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.ones(IN))
            self.grouped = nn.Parameter(torch.ones(2, OUT, IN))
            self.single = nn.Parameter(torch.ones(2, OUT, OUT))
            self.whole = nn.Parameter(torch.ones(OUT, IN))
            self.added = nn.Parameter(torch.ones(2, OUT))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = (x + self.shift) @ self.grouped.transpose(-2, -1)
            return F.linear(F.linear(x, self.single[1]) + self.added[0], self.whole.t()) @ self.whole.t()

    before = F.linear
    saved = unit(profile_model(Chain({"experts": Experts()}, ["experts"]), X), "experts")
    assert F.linear is before
    assert saved.viewed_bytes == FLOAT * (2 * OUT * IN + 2 * OUT * OUT + OUT * IN)
    assert unit(profile_model(Chain({"a": nn.Linear(IN, OUT)}, ["a"]), X), "a").viewed_bytes == 0
    attention = nn.MultiheadAttention(IN, 2, batch_first=True)
    profile = profile_model(attention, Sample(tuple(replace(X.tensors[0], name=n) for n in ("query", "key", "value"))))
    # Three different inputs: a part of the weight and of the bias for each.
    assert sum(u.viewed_bytes for u in profile.units) == 3 * IN * (IN + 1) * FLOAT


def test_nothing_is_kept_for_a_backward_that_never_comes() -> None:
    profile = profile_model(Chain({"a": nn.Linear(IN, OUT)}, ["a"]).requires_grad_(False), X)
    assert profile.units[0].backward == Work()
    assert profile.units[0].activation_bytes == 0
    assert profile.units[0].forward.flops == linear_flops(1)


@pytest.mark.parametrize("with_loss", [True, False])
def test_backward_starts_at_the_loss_or_at_every_output(with_loss: bool) -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(IN, OUT, bias=False), nn.Linear(IN, OUT, bias=False)

        def forward(self, x: torch.Tensor) -> object:
            a, b = self.a(x), self.b(x)
            return SimpleNamespace(loss=a.mean(), logits=b) if with_loss else {"a": a, "b": (b, a.argmax(-1))}

    profile = profile_model(TwoHeads(), X)
    assert unit(profile, "a").backward.flops == linear_flops(1)
    assert unit(profile, "b").backward.flops == linear_flops(0 if with_loss else 1)
    # What the graph of an unused output had saved died with it.
    assert unit(profile, "a").activation_bytes == ROWS * IN * FLOAT


def test_mode_of_the_model_is_kept() -> None:
    model = Chain({"a": nn.Linear(IN, OUT, bias=False), "drop": nn.Dropout(0.5), "b": nn.Linear(OUT, IN)}, ["a", "drop", "b"])
    train, evaluate = profile_model(model.train(), X), profile_model(model.eval(), X)
    assert not model.training
    assert unit(evaluate, "a").activation_bytes == ROWS * IN * FLOAT
    assert unit(train, "a").activation_bytes > unit(evaluate, "a").activation_bytes  # the mask
    assert unit(train, "a").forward.bytes_moved > unit(evaluate, "a").forward.bytes_moved == 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_block_keeps_its_input_and_computes_again(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(IN, IN, bias=False)
            self.block = nn.Sequential(nn.Linear(IN, OUT, bias=False), nn.Tanh(), nn.Linear(OUT, OUT, bias=False))
            self.last = nn.Linear(OUT, IN, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(checkpoint(self.block, self.first(x), use_reentrant=reentrant))

    profile = profile_model(Checkpointed(), X)
    assert names(profile) == ["first", "block.0", "block.2", "last"]
    assert unit(profile, "block.0").backward.flops == linear_flops(3)
    assert unit(profile, "first").backward.flops == linear_flops(1, outputs=IN)
    assert unit(profile, "last").backward.flops == linear_flops(2)
    # Early stopping does not spare the last product of the block: DeepSpeed's linear saves when it has computed.
    assert unit(profile, "block.2").backward.flops == linear_flops(3, inputs=OUT)
    kept = sum(u.activation_bytes for u in profile.units)
    assert kept == (ROWS * IN + ROWS * IN + ROWS * OUT) * FLOAT  # inputs of first, of the block, of last
    assert unit(profile, "block.2").backward_transient_bytes >= 2 * ROWS * OUT * FLOAT  # what is computed again lives here


# --- models without data


class Positions(nn.Module):
    """As Hugging Face does: looks at position numbers to see whether a mask is needed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(OUT, IN)
        self.cheap, self.dear = nn.Linear(IN, OUT), nn.Linear(IN, OUT)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        packed = bool((torch.arange(ids.shape[1], device=ids.device).diff() != 1).any())
        padded = not bool(ids.all())
        return (self.dear if packed or padded else self.cheap)(self.embed(ids))


def test_decisions_on_positions_and_masks_are_those_of_a_full_micro_batch() -> None:
    assert names(profile_model(Positions(), IDS)) == ["embed", "cheap", "dear"]


def test_large_integer_tables_are_not_computed() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(OUT, IN)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            side = torch.arange(1 << 18)
            return self.embed(ids) * (side[:, None] - side[None, :]).sum()  # 512 GiB, were it computed

    assert unit(profile_model(Table(), IDS), "embed").forward.bytes_moved > 1 << 39


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Tied()


def as_zero_init_leaves_it() -> nn.Module:
    model = Tied()
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0, dtype=parameter.dtype)
    return model


@pytest.mark.parametrize("build", [on_meta, as_zero_init_leaves_it])
def test_models_without_data_profile_like_any_other(build: Callable[[], nn.Module]) -> None:
    assert profile_model(build(), IDS) == profile_model(Tied(), IDS)


def test_the_models_own_tensors_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(IN, OUT), nn.Dropout(0.5), nn.BatchNorm1d(OUT))
    model.register_buffer("steps", torch.zeros((), dtype=torch.int64))
    state = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    random = torch.get_rng_state()
    profile_model(model, Sample((InputTensor("input", (ROWS, IN), torch.float32),)), dtype=torch.bfloat16)
    after = model.state_dict(keep_vars=True)
    assert all(after[name] is tensor and torch.equal(tensor, copy) for name, (tensor, copy) in state.items())
    assert all(p.grad is None and not p._post_accumulate_grad_hooks for p in model.parameters())
    assert all(not module._forward_pre_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), random)


def test_dtype_casts_what_deepspeed_casts() -> None:
    model = Chain({"a": nn.Linear(IN, OUT), "norm": nn.BatchNorm1d(TOKENS)}, ["a", "norm"])
    profile = profile_model(model, X, dtype=torch.bfloat16)
    assert {p.dtype for p in profile.parameters} == {"bfloat16"}
    assert profile.sample == "x bfloat16[2, 3, 8]"
    assert unit(profile, "a").activation_bytes == ROWS * IN * 2


# --- what cannot be traced


def test_data_dependent_forward_is_refused_by_name() -> None:
    class Choosy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(IN, OUT)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            return y if y.sum() > 0 else -y

    with pytest.raises(ProfileError, match=r"Choosy .*after 'a': operator aten\._local_scalar_dense.*osdp\.plan"):
        profile_model(Choosy(), X)


def test_wrong_input_is_refused_by_name() -> None:
    with pytest.raises(ProfileError, match=r"ids int64\[2, 3\]: TypeError: .*'ids'.*osdp\.input"):
        profile_model(Chain({"a": nn.Linear(IN, OUT)}, ["a"]), IDS)


def test_model_that_cannot_be_copied_is_refused() -> None:
    model = nn.Linear(IN, OUT)
    model.lock = threading.Lock()
    with pytest.raises(ProfileError, match=r"Linear cannot be traced .*lock"):
        profile_model(model, X)


# --- Hugging Face models


def hugging_face(kind: str, device: str = "meta") -> nn.Module:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    gqa = {**small, "num_key_value_heads": 2, "vocab_size": 128, "use_cache": False}
    gpt2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128, "attn_pdrop": 0.0, "use_cache": False}
    t5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": 128}
    model, config = {
        "gpt2": (transformers.GPT2LMHeadModel, transformers.GPT2Config(**gpt2)),
        "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**gqa)),
        "bert": (transformers.BertForMaskedLM, transformers.BertConfig(**small, vocab_size=128)),
        "t5": (transformers.T5ForConditionalGeneration, transformers.T5Config(**t5, decoder_start_token_id=0)),
        "vit": (transformers.ViTForImageClassification, transformers.ViTConfig(**small, image_size=32, patch_size=8)),
        "mixtral": (transformers.MixtralForCausalLM, transformers.MixtralConfig(**gqa, num_local_experts=4)),
    }[kind]
    with torch.device(device):
        return model(config).train()


def profile_hugging_face(kind: str, dtype: torch.dtype | None = None) -> tuple[nn.Module, ModelProfile]:
    model = hugging_face(kind)
    sample = sample_for(model, BATCH, sequence_length=16)
    assert sample is not None
    return model, profile_model(model, sample, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "t5", "vit", "mixtral"])
def test_hugging_face_models_profile(kind: str, dtype: torch.dtype) -> None:
    model, profile = profile_hugging_face(kind, dtype)
    expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert {p.name: p.shape for p in profile.parameters} == expected
    assert len(profile.parameters) == len(expected)
    matrices = [u for u in profile.units if u.forward.flops and u.name not in ("transformer.ln_f", "cls.predictions")]
    assert len(matrices) >= 8
    # Every product of forward has two in backward, save for the attention (two and a half if fused) and the first layer.
    forward, backward = (
        sum(w.flops for w in phase) for phase in zip(*((u.forward, u.backward) for u in profile.units), strict=True)
    )
    assert 1.8 < backward / forward < 2.2


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft uses a name that transformers 5 is about to drop
def test_peft_wrapper_trains_its_adapters_only() -> None:
    peft = pytest.importorskip("peft")
    base = hugging_face("llama")
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["v_proj"], task_type="CAUSAL_LM"))
    sample = sample_for(model, BATCH, sequence_length=16)
    assert sample is not None
    profile = profile_model(model, sample)
    rows, width, key_width = BATCH * 16, 64, 32
    frozen = unit(profile, "base_model.model.model.layers.1.self_attn.v_proj.base_layer")
    adapter = unit(profile, "base_model.model.model.layers.1.self_attn.v_proj.lora_A.default")
    assert not any(p.trainable for p in frozen.parameters)
    assert frozen.backward.flops == frozen.forward.flops == linear_flops(1, rows, width, key_width)
    assert adapter.forward.flops == linear_flops(1, rows, width, 4)
    assert adapter.backward.flops == linear_flops(2, rows, width, 4)
    # Nothing before the first adapter has a backward.
    assert unit(profile, "base_model.model.model.layers.0.self_attn.q_proj").backward == Work()


def test_gpt2_flops_by_hand() -> None:
    _, profile = profile_hugging_face("gpt2")
    width, layers, vocabulary, tokens = 64, 2, 128, 16
    products = 2 * BATCH * tokens * (layers * 12 * width**2 + width * vocabulary)
    attention = layers * 2 * 2 * BATCH * tokens**2 * width
    assert sum(u.forward.flops for u in profile.units) == products + attention
    # The fused attention multiplies twice in forward and five times in backward.
    assert sum(u.backward.flops for u in profile.units) == 2 * products + attention * 5 // 2


def test_mixture_of_experts_flops_by_hand() -> None:
    _, profile = profile_hugging_face("mixtral")
    experts = unit(profile, "model.layers.0.mlp.experts")
    tokens, experts_per_token, hidden, intermediate = BATCH * 16, 2, 64, 96
    assert experts.forward.flops == 2 * tokens * experts_per_token * 3 * hidden * intermediate
    assert experts.backward.flops == 2 * experts.forward.flops


@pytest.mark.parametrize("kind", ["gpt2", "llama", "t5"])
def test_peak_is_that_of_a_real_step(kind: str) -> None:
    tracker = pytest.importorskip("torch.distributed._tools.mem_tracker").MemTracker()
    if torch.cuda.is_available():
        pytest.skip("the trace is that of CUDA, the step below that of the CPU")
    model = hugging_face(kind).to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    sample = sample_for(model, BATCH, sequence_length=64)
    assert sample is not None
    kept, predicted = 0, 0
    for u in profile_model(model, sample).units:
        kept += u.activation_bytes
        predicted = max(predicted, kept + max(u.transient_bytes, u.backward_transient_bytes))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    inputs = {t.name: torch.ones(t.shape, dtype=t.dtype) for t in sample.tensors}
    tracker.track_external(model, *inputs.values())
    with tracker:
        model(**inputs).loss.backward()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    resident = sum(t.numel() * t.element_size() for t in {*model.parameters(), *model.buffers()})
    real = peak["Total"] - resident
    # Apart from the inputs, which are no activations until they are saved, and the scalar loss.
    slack = sum(t.numel() * t.element_size() for t in inputs.values()) + FLOAT
    assert real - slack <= predicted <= real


def test_wide_model_is_profiled_without_its_weights() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8, vocab_size=128256,
        num_hidden_layers=2,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).train()
    sample = sample_for(model, 1, sequence_length=4096)
    assert sample is not None
    before = psutil.Process().memory_info().rss
    profile = profile_model(model, sample, dtype=torch.bfloat16)
    assert sum(u.numel for u in profile.units) * 2 > 7 << 30
    assert psutil.Process().memory_info().rss - before < 512 << 20
