from __future__ import annotations

import pytest
import torch
from launch import on_ranks
from observed import EXPECTED, SAMPLES, TOKENS, WIDTH, Model, plain
from test_measure_trace import hugging_face
from torch import nn

from ds_osdp.cluster import Device
from ds_osdp.errors import ProfileError
from ds_osdp.measure import InputTensor, Sample, observe, profile_model, sample_for
from ds_osdp.measure.linear import deepspeed_linear
from ds_osdp.prices import work_seconds
from ds_osdp.profile import ModelProfile, UnitProfile, Work
from ds_osdp.remedies import with_micro_batch

X = Sample((InputTensor("x", (SAMPLES, TOKENS, WIDTH), torch.float32),))


def seconds(profile: ModelProfile) -> dict[str, tuple[float | None, float | None]]:
    return {u.name: (u.forward.seconds, u.backward.seconds) for u in profile.units if u.forward != Work()}


@pytest.mark.parametrize("reentrant", [True, False])
def test_seconds_are_those_of_the_unit_at_work(reentrant: bool) -> None:
    profile, hooks_left = plain(reentrant)
    # Without reentrance it stops as soon as all that backward needs is there: before the last layer takes its time again.
    assert seconds(profile) == EXPECTED | ({} if reentrant else {"block.2": (64.0, 128.0)})
    assert [u.name for u in profile.units] == [*EXPECTED, "never"]
    assert {u.name for u in profile.units if u.recomputes} == {"block.0", "block.2"}
    assert profile.units[-1] == UnitProfile(name="never", parameters=profile.units[-1].parameters)
    assert {p.name for u in profile.units for p in u.parameters if not p.trainable} == {
        "frozen.weight",
        "frozen.bias",
        "frozen.size",
    }
    assert hooks_left == 0


def test_a_profile_survives_its_file(tmp_path: object) -> None:
    profile, _ = plain(True)
    assert ModelProfile.from_dict(profile.to_dict()) == profile


@pytest.mark.ranks
def test_engines_show_what_the_plain_module_shows() -> None:
    results = on_ranks(2, "observed:in_engine")
    _, unobserved_losses, _ = results["unobserved"]
    with deepspeed_linear():
        expected, _ = plain(True)
    for kind in ("stock", "planned"):
        profile, losses, hooks_left = results[kind]
        assert seconds(profile) == EXPECTED  # though fetches, releases and reductions took a thousand seconds each
        assert profile.model_copy(update={"units": ()}) == expected.model_copy(update={"units": ()})
        for unit, alike in zip(profile.units, expected.units, strict=True):
            transient = {"transient_bytes": 0, "backward_transient_bytes": 0}
            assert unit.model_copy(update=transient) == alike.model_copy(update=transient)
            assert unit.transient_bytes == alike.transient_bytes
            assert unit.backward_transient_bytes == pytest.approx(alike.backward_transient_bytes, abs=4)  # the loss, divided
        assert hooks_left == 0
        assert losses == pytest.approx(unobserved_losses, rel=0 if kind == "stock" else 1e-5)


@pytest.mark.parametrize("kind", ["gpt2", "t5", "mixtral"])
def test_a_hugging_face_model_shows_what_its_trace_says(kind: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("the trace is that of CUDA, the step below that of the CPU")
    model = hugging_face(kind, device="cpu")
    sample = sample_for(model, 2, sequence_length=16)
    assert sample is not None
    traced = profile_model(model, sample)
    inputs = {t.name: torch.randint(0, 100, t.shape) for t in sample.tensors}
    with observe(model, micro_batch=2) as observer:
        for _ in range(2):
            model(**inputs).loss.backward()
            model.zero_grad()
    measured = observer.profile()
    assert measured.sample == traced.sample
    same = ("name", "parameters", "viewed_bytes", "output_bytes", "recomputes")
    assert [[getattr(u, key) for key in same] for u in measured.units] == [
        [getattr(u, key) for key in same] for u in traced.units
    ]
    kept, measured_peak, traced_peak = 0, 0, 0
    for unit, expected in zip(measured.units, traced.units, strict=True):
        # The loss itself, 4 bytes, is alive while a real backward runs.
        assert 0 <= unit.activation_bytes - expected.activation_bytes <= 4
        # What a node of the graph frees before it ends is not seen, but where it matters.
        assert unit.transient_bytes <= expected.transient_bytes + 16
        assert unit.backward_transient_bytes <= expected.backward_transient_bytes + 16
        kept += expected.activation_bytes
        measured_peak = max(measured_peak, kept + unit.transient_bytes, kept + unit.backward_transient_bytes)
        traced_peak = max(traced_peak, kept + expected.transient_bytes, kept + expected.backward_transient_bytes)
        if expected.forward != Work():
            assert unit.forward.seconds
            assert unit.backward.seconds
    assert measured_peak == pytest.approx(traced_peak, abs=16)


def test_units_that_differ_in_name_only_share_their_median() -> None:
    model = hugging_face("mixtral", device="cpu")
    ids = torch.randint(0, 100, (2, 16))
    with observe(model, micro_batch=2) as observer:
        for _ in range(3):
            model(input_ids=ids, labels=ids).loss.backward()
    unit = {u.name: u for u in observer.profile().units}
    first, second = (unit[f"model.layers.{i}.self_attn.o_proj"] for i in range(2))
    assert (first.forward, first.backward) == (second.forward, second.backward)
    assert first.forward != first.backward


def test_an_error_in_backward_leaves_the_next_step_whole() -> None:
    model = Model()

    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("lost")

    with observe(model, micro_batch=SAMPLES) as observer:
        handle = model.last.weight.register_hook(fail)
        with pytest.raises(RuntimeError, match="lost"):
            model(torch.ones(X.tensors[0].shape)).backward()
        with pytest.raises(TypeError):
            model(None)
        handle.remove()
        for _ in range(2):
            model(torch.ones(X.tensors[0].shape)).backward()
    assert observer.micro_steps == 1
    assert observer.profile().units[0].activation_bytes > 0


def test_a_trace_that_fails_names_the_operator_and_the_way_out() -> None:
    with pytest.raises(ProfileError, match=r"operator aten\._local_scalar_dense.*ds_osdp\.measure\.observe"):
        profile_model(Model(), X)


def test_too_few_steps_say_how_many_it_takes() -> None:
    model = Model()
    with observe(model, micro_batch=SAMPLES) as observer:
        model(torch.ones(X.tensors[0].shape)).backward()
    assert observer.micro_steps == 0
    with pytest.raises(ProfileError, match="at least two"):
        observer.profile()


def test_what_cannot_be_observed_is_refused() -> None:
    with pytest.raises(ProfileError, match="ReLU has no parameters"):
        observe(nn.ReLU(), micro_batch=1)
    layer = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(ProfileError, match="OptimizedModule is compiled"):
        observe(torch.compile(layer), micro_batch=1)
    layer.compile()
    with pytest.raises(ProfileError, match="Linear is compiled"):
        observe(layer, micro_batch=1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_seconds_on_cuda_are_those_of_the_stream() -> None:
    layers = [nn.Linear(4096, 4096, device="cuda"), nn.Tanh(), nn.Linear(4096, 64, device="cuda")]
    model = nn.Sequential(*layers)
    with observe(model, micro_batch=4096) as observer:
        for _ in range(5):
            model(torch.ones(4096, 4096, device="cuda")).sum().backward()
    large, small = observer.profile().units
    assert large.forward.seconds > small.forward.seconds > 0
    assert large.backward.seconds > small.backward.seconds > 0


def test_measured_seconds_are_the_price() -> None:
    device = Device(flops_per_second=1.0, bytes_per_second=1.0)
    assert work_seconds(Work(flops=3, bytes_moved=4), device) == 7.0
    assert work_seconds(Work(flops=3, bytes_moved=4, seconds=0.5), device) == 0.5
    unit = UnitProfile(name="", parameters=(), forward=Work(seconds=0.5), output_bytes=6)
    profile = ModelProfile(model="M", micro_batch=2, sample="", units=(unit,))
    (halved,) = with_micro_batch(profile, 1).units
    assert (halved.forward, halved.output_bytes) == (Work(seconds=0.25), 3)
