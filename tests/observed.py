"""A model whose layers say how long they take, and what an observer sees of it: on a plain module, and in an engine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_osdp.measure import observe, stopwatch
from ds_osdp.profile import ModelProfile

WIDTH, TOKENS, SAMPLES = 7, 5, 2
"""Odd on purpose: partitions need padding."""
FOREIGN_SECONDS = 1000.0
"""What DeepSpeed takes for a fetch, a release or a reduction; more than all layers together."""


class Clock:
    """Stands still unless told otherwise."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


CLOCK = Clock()


@contextmanager
def own_clock() -> Iterator[None]:
    """A stopwatch that is made here reads ``CLOCK``."""
    with mock.patch.object(stopwatch, "time", CLOCK):
        yield


class Takes(torch.autograd.Function):
    """Takes so many seconds in forward, and twice as many in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        CLOCK.now += seconds
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        CLOCK.now += 2 * ctx.seconds
        return gradient.clone(), None


class Slow(nn.Linear):
    def __init__(self, seconds: float) -> None:
        super().__init__(WIDTH, WIDTH)
        self.seconds = seconds
        self.size = nn.Parameter(torch.zeros(int(seconds)))  # Layers that look alike share their seconds: these do not.

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Takes.apply(super().forward(x), self.seconds)


class Model(nn.Module):
    """Runs in another order than it is defined, one layer twice, one never, one every other time, one block again."""

    def __init__(self) -> None:
        super().__init__()
        self.never, self.last, self.first, self.twice, self.sometimes = (Slow(s) for s in (1.0, 2.0, 4.0, 8.0, 16.0))
        self.block = nn.Sequential(Slow(32.0), nn.Tanh(), Slow(64.0))
        self.frozen = Slow(128.0).requires_grad_(False)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.first.weight
        self.forwards = 0

    def forward(self, x: torch.Tensor, reentrant: bool = True) -> torch.Tensor:
        x = self.twice(torch.sin(Takes.apply(self.first(x), 0.5)))
        x = checkpoint(self.block, x, use_reentrant=reentrant)
        self.forwards += 1
        if self.forwards % 2:
            x = self.sometimes(x)
        x = self.frozen(x)
        if x.sum() > 1e9:  # It must not be traced: the forward decides on data.
            x = -x
        return self.tied(self.last(self.twice(x))).square().sum()


EXPECTED = {
    "first": (4.5, 9.0),
    "twice": (16.0, 32.0),
    "block.0": (32.0, 96.0),
    "block.2": (64.0, 192.0),
    "sometimes": (16.0, 32.0),
    "frozen": (128.0, 256.0),
    "last": (2.0, 4.0),
}
"""In order: seconds in forward and backward, computing again included."""


def sample(number: int) -> torch.Tensor:
    return torch.randn(SAMPLES, TOKENS, WIDTH, generator=torch.Generator().manual_seed(number))


def hooks(model: nn.Module) -> int:
    """How many there are."""
    modules = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) + len(m._backward_hooks) for m in model.modules())
    return modules + sum(len(p._backward_hooks or ()) + len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


def plain(reentrant: bool) -> tuple[ModelProfile, int]:
    """What is seen of a plain module, and how many hooks are left."""
    torch.manual_seed(0)
    model = Model()
    with own_clock(), observe(model, micro_batch=SAMPLES) as observer:
        for step in range(5):
            model(sample(step), reentrant).backward()
            with torch.no_grad():
                model(sample(step), reentrant)
                model.forwards -= 1
            model.eval()(sample(step), reentrant)  # with a graph that no backward goes through
            model.train().forwards -= 1
            CLOCK.now += FOREIGN_SECONDS  # the optimizer
    assert observer.micro_steps == 4
    return observer.profile(), hooks(model)


def in_engine() -> dict[str, tuple[ModelProfile | None, list[float], int]]:
    """What is seen of engines, their losses, and how many hooks are left; one is not observed, to compare the losses."""
    import deepspeed
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    import ds_osdp

    slow_down(PartitionedParameterCoordinator, "fetch_sub_module")
    slow_down(PartitionedParameterCoordinator, "release_sub_module")
    slow_down(DeepSpeedZeroOptimizer_Stage3, "reduce_ready_partitions_and_remove_grads")
    deepspeed.init_distributed("gloo")
    results = {}
    for kind in ("unobserved", "stock", "planned"):
        torch.manual_seed(0)
        model = Model()
        initialize, config = (ds_osdp.initialize, planned(model)) if kind == "planned" else (deepspeed.initialize, CONFIG)
        engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=config)
        before = hooks(engine.module)
        with own_clock():
            observer = observe(engine.module, micro_batch=SAMPLES)
        if kind == "unobserved":
            observer.close()
        losses = []
        for step in range(6):
            loss = engine(sample(step))
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
            if step % 2:
                with torch.no_grad():
                    engine.eval()
                    engine(sample(step))
                engine.train()
                model.forwards -= 1
        observer.close()
        results[kind] = (None if kind == "unobserved" else observer.profile(), losses, hooks(engine.module) - before)
    return results


def planned(model: nn.Module) -> dict[str, Any]:
    """A configuration with a plan in which some of every layer is whole."""
    from training import make_plan

    path = [tempfile.mkdtemp() + "/plan.json"]
    if torch.distributed.get_rank() == 0:
        make_plan(model, {"*weight": (0, 1), "*": (2, None)}, CONFIG).save(path[0])
    torch.distributed.broadcast_object_list(path)
    return {**CONFIG, "osdp": {"plan": path[0]}}


CONFIG = {
    "train_micro_batch_size_per_gpu": SAMPLES,
    "gradient_accumulation_steps": 2,
    "steps_per_print": 10**9,
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 0,
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}


def slow_down(owner: type, name: str) -> None:
    original = getattr(owner, name)

    def slow(*args: Any, **kwargs: Any) -> Any:
        CLOCK.now += FOREIGN_SECONDS
        return original(*args, **kwargs)

    setattr(owner, name, slow)
