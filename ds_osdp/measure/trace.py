"""Profile a model without its weights: what each unit computes, moves and keeps in one forward and backward."""

from __future__ import annotations

import torch
from torch import nn

from ds_osdp.errors import ProfileError
from ds_osdp.measure.fake import ShapeRunner
from ds_osdp.measure.sample import InputTensor, Sample
from ds_osdp.measure.tracer import Tracer
from ds_osdp.measure.units import owned_parameters
from ds_osdp.profile import ModelProfile

__all__ = ["profile_model"]


def profile_model(model: nn.Module, sample: Sample, *, dtype: torch.dtype | None = None) -> ModelProfile:
    """Profile ``model`` by tracing one forward and one backward of ``sample`` on a copy that has shapes and no data.

    No weight and no activation is allocated, the random generators keep their state, and ``model`` is not touched.  It may be
    on any device, on the meta device, or built under ``deepspeed.zero.Init``.  The trace pretends to run where this process
    would train, on CUDA if there is one: which attention kernel runs, and what it saves, depends on it.

    A unit is a module that directly owns a parameter.  A tied parameter belongs to the first module that has it, in the order
    of ``named_parameters``; a module that is left with none counts as one without parameters.  Units come in the order of their
    first forward; those whose forward never ran follow in the order of definition, without work.  An operator counts with the
    unit whose forward began last, and before the first one with the first; calls after a unit's first add to its work.

    ``backward`` holds no work for gradients that nobody needs (of frozen parameters, of inputs), and does hold what activation
    checkpointing computes again.  Backward starts at the output's ``loss``, or else at the sum of all outputs that need a
    gradient; the outputs are not alive during it.

    ``activation_bytes`` counts each storage once, with the unit that saved it first, views of parameters and buffers excluded;
    ``viewed_bytes`` counts the parameters of which views were saved.  Linear layers save what DeepSpeed's own do.
    ``transient_bytes`` and ``backward_transient_bytes`` are the most that is alive while the unit is at work, beyond what it
    and the units before it keep for backward: adding the activations up to the unit gives the true peak.  A gradient is alive
    from when it is made to when it is complete.  What
    a kernel allocates inside itself is not seen.

    Args:
        model: the model in the mode (``train`` or ``eval``) it will train in.
        sample: its input.  Integers and booleans in it are all one.
        dtype: of floating-point parameters, buffers and inputs, if DeepSpeed will cast them (bf16, fp16); None leaves them.

    Raises:
        ProfileError: the forward cannot be traced: it needs values of tensors, does not take ``sample``, or cannot be copied.
    """
    sample = sample if dtype is None else sample.cast(dtype)
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    runner = ShapeRunner("cuda" if devices else "cpu")
    tracer: Tracer | None = None
    try:
        twin = runner.copy(model, dtype)
        owned = owned_parameters(twin)
        tracer = Tracer(twin, tuple(owned), runner)
        with torch.random.fork_rng(devices), torch.enable_grad():
            tracer.run({tensor.name: _input(tensor, runner) for tensor in sample.tensors})
    except Exception as error:
        at = f", in or after {list(tracer.order)[tracer.ledger.unit]!r}" if tracer and tracer.order else ""
        raise ProfileError(
            f"{type(model).__name__} cannot be traced with {sample.describe()}{at}: {_reason(error)}. Check osdp.input, keep "
            "the forward free of decisions on tensor values, measure real steps (ds_osdp.measure.observe) in place of the "
            "trace, or give osdp.plan, a saved plan: then nothing is traced."
        ) from error
    return ModelProfile(
        model=type(model).__name__,
        micro_batch=sample.micro_batch,
        sample=sample.describe(),
        units=tuple(tracer.profiles(owned)),
        buffer_bytes=sum(t.numel() * t.element_size() for t in twin.buffers()),
    )


def _input(tensor: InputTensor, runner: ShapeRunner) -> torch.Tensor:
    # Ones are a token that every vocabulary has, and a mask that hides nothing.
    if tensor.dtype.is_floating_point:
        return runner.empty(tensor.shape, tensor.dtype)
    return torch.ones(tensor.shape, dtype=tensor.dtype, device=runner.device)


def _reason(error: Exception) -> str:
    """What stopped the trace, in one line."""
    operator = getattr(error, "func", None)
    if isinstance(operator, torch._ops.OpOverload):
        return f"operator {operator} needs the values of a tensor, and a trace has shapes only"
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
