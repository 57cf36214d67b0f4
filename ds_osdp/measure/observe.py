"""Measure a model while it trains: hooks around real steps give the profile that a trace computes.

Time is charged to the unit at work, by the rule of the trace: in forward to the unit whose forward began last, in backward to
the one that was at work when autograd recorded the node that now runs.  The clock stands still while hooks of others run,
DeepSpeed's fetches, releases and reductions among them: a hook of ours lies on either side of them, and a node that they put
into the graph is known by not having been there before them.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ds_osdp.errors import ProfileError
from ds_osdp.measure.fake import tensors_in
from ds_osdp.measure.sample import InputTensor
from ds_osdp.measure.stopwatch import AtWork, MicroStep, Stopwatch
from ds_osdp.measure.units import owned_parameters
from ds_osdp.profile import ModelProfile, UnitProfile, Work

__all__ = ["Observer", "observe"]


def observe(module: nn.Module, *, micro_batch: int) -> Observer:
    """Start to measure ``module`` in the steps that it trains from now on.

    ::

        with observe(engine.module, micro_batch=job.micro_batch) as observer:
            for batch in batches:  # at least two; each one more makes the medians better
                engine.backward(engine(batch))
                engine.step()
        profile = observer.profile()

    The profile has the units of ``profile_model`` in the same order, and seconds in place of floating-point operations.  No
    sample needs to be described, and what the forward decides on does not matter.

    Args:
        module: what is called once per micro-step: a plain module, or ``engine.module`` of a DeepSpeed engine (after
            ``initialize``: hooks must lie on both sides of DeepSpeed's).
        micro_batch: samples of a micro-step.

    Raises:
        ProfileError: the module has no parameters, or it is compiled: no hook runs inside.
    """
    owned = owned_parameters(module)
    if not owned:
        raise ProfileError(f"{type(module).__name__} has no parameters: there is nothing to plan")
    if any(m._compiled_call_impl is not None for m in module.modules()):
        raise ProfileError(f"{type(module).__name__} is compiled: no hook runs inside. Observe it before compile() is called")
    return Observer(module, micro_batch)


class Observer:
    """Hooks on a module, and what they have seen; made by :func:`observe`, and a context manager that ends with ``close``.

    A micro-step is one forward of the module with gradients, and the backward behind it; a forward without either is not
    counted.  The first one is sampled for memory, and takes a few times as long; those behind it are timed.
    """

    def __init__(self, module: nn.Module, micro_batch: int) -> None:
        self._module = module
        self._micro_batch = micro_batch
        self._owned = owned_parameters(module)
        self._sample = ""
        self._order: dict[str, int] = {}
        self._recomputed: set[int] = set()
        self._watch = Stopwatch(cuda=any(p.is_cuda for p in module.parameters()))
        self._seen: list[MicroStep] = []
        # Of the backward that runs now: the micro-steps it goes through.
        self._in_backward: list[MicroStep] = []
        self._handles = [*self._hook_modules(), *self._hook_parameters()]

    @property
    def micro_steps(self) -> int:
        """How many have been timed."""
        return len(self._seen)

    def profile(self) -> ModelProfile:
        """What has been seen so far: per unit the median over the micro-steps it ran in.

        Units that are equal in all that can be counted share one median: what is left between them is noise.

        Raises:
            ProfileError: no micro-step has been timed yet.
        """
        if not self._seen:
            raise ProfileError("no micro-step has been timed: run at least two forwards with their backwards")
        order = self._order or dict.fromkeys(list(self._owned)[:1], 0)
        units = [self._unit(name, number) for name, number in order.items()]
        seconds = _seconds(self._seen, self._sorts(units))
        measured = [
            unit.model_copy(update={"forward": _work(seconds[False, number]), "backward": _work(seconds[True, number])})
            for number, unit in enumerate(units)
        ]
        idle = [UnitProfile(name=name, parameters=self._owned[name]) for name in self._owned if name not in order]
        return ModelProfile(
            model=type(self._module).__name__,
            micro_batch=self._micro_batch,
            sample=self._sample,
            units=(*measured, *idle),
        )

    def close(self) -> None:
        """Take all hooks off the module.  What has been seen stays."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._watch.leave()

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _unit(self, name: str, number: int) -> UnitProfile:
        return UnitProfile(name=name, parameters=self._owned[name], recomputes=number in self._recomputed)

    def _sorts(self, units: list[UnitProfile]) -> list[int]:
        """Per unit, the number of its sort: units of one sort differ in their names only."""
        sorts: dict[object, int] = {}
        kinds = ((type(self._module.get_submodule(unit.name)), _anonymous(unit)) for unit in units)
        return [sorts.setdefault(kind, len(sorts)) for kind in kinds]

    # --- hooks

    def _hook_modules(self) -> Iterator[RemovableHandle]:
        for name, module in self._module.named_modules():
            enter = self._enter(name if name in self._owned else None)
            yield module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
            yield module.register_forward_pre_hook(enter, with_kwargs=True)
            yield module.register_forward_hook(self._computed, prepend=True)
            # Also when the forward raises: non-reentrant checkpointing ends a repeated one that way.
            yield module.register_forward_hook(self._after, always_call=True)

    def _hook_parameters(self) -> Iterator[RemovableHandle]:
        for parameter in self._module.parameters():
            if parameter.requires_grad:
                yield parameter.register_hook(lambda gradient: self._watch.pause())  # type: ignore[no-untyped-call]
                yield parameter.register_post_accumulate_grad_hook(lambda _: self._watch.resume())  # type: ignore[no-untyped-call]

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Before all other hooks: the inputs are the model's own."""
        if module is self._module and not _backward_runs():
            self._begin(args, kwargs)
        if self._watch.at_work is not None:
            self._watch.pause()
            self._follow((*args, *kwargs.values()))

    def _enter(self, unit: str | None) -> Callable[[nn.Module, Any, Any], None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            """Behind all other hooks: what they made of the inputs is theirs."""
            at_work = self._watch.at_work
            if at_work is None:
                return
            self._follow((*args, *kwargs.values()), foreign=True)
            if unit is None:
                self._watch.resume()
                return
            number = self._order.setdefault(unit, len(self._order))
            at_work.step.began(at_work.backward).append((torch._C._autograd._get_sequence_nr(), number))
            if at_work.backward:
                self._recomputed.add(number)
            self._watch.enter(at_work._replace(unit=number))

        return enter

    def _computed(self, module: nn.Module, args: Any, output: Any) -> None:
        """Before all other hooks: the outputs are the model's own."""
        if self._watch.at_work is not None:
            self._watch.pause()
            self._follow((output,))

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Behind all other hooks: what they made of the outputs is theirs."""
        if self._watch.at_work is not None:
            self._follow((output,), foreign=True)
            if module is self._module and not _backward_runs():
                self._watch.leave()
            else:
                self._watch.resume()

    def _begin(self, args: Any, kwargs: Any) -> None:
        """A forward of the whole module begins."""
        self._watch.leave()
        self._in_backward.clear()  # of a backward that raised
        if torch.is_grad_enabled():
            self._sample = self._sample or _describe(self._module, args, kwargs)
            self._watch.enter(AtWork(MicroStep(), backward=False, unit=None))

    def _follow(self, values: Iterable[Any], *, foreign: bool = False) -> None:
        """Know when backward reaches the nodes that made ``values``; those known already stay as they are."""
        at_work = self._watch.at_work
        assert at_work is not None
        step, again = at_work.step, at_work.backward
        for tensor in _tensors(values):
            node: Any = tensor.grad_fn
            if node is None or self in node.metadata:
                continue
            node.metadata[self] = True
            node.register_prehook(self._reached(step, again, None if foreign else node._sequence_nr()))

    def _reached(self, step: MicroStep, again: bool, sequence_number: int | None) -> Callable[[Any], None]:
        def reached(_: Any) -> None:
            if not self._handles:
                return
            if not self._in_backward:
                torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            if step not in self._in_backward:
                self._in_backward.append(step)
            if sequence_number is None:
                self._watch.pause()
            else:
                self._watch.enter(AtWork(step, backward=True, unit=step.unit_at(sequence_number, again)))

        return reached

    def _end_backward(self) -> None:
        self._watch.leave()
        self._seen += [step for step in self._in_backward if step not in self._seen]
        self._in_backward.clear()


def _backward_runs() -> bool:
    """Whether autograd calls us: what computes now computes again."""
    return torch._C._current_graph_task_id() != -1


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif value is not None and not isinstance(value, (bool, int, float, str)):
            yield from tensors_in(value)


def _describe(module: nn.Module, args: Any, kwargs: Any) -> str:
    given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    tensors = ((name, tensor) for name, value in given.items() for tensor in tensors_in(value))
    return ", ".join(str(InputTensor(name, tuple(tensor.shape), tensor.dtype)) for name, tensor in tensors)


def _anonymous(unit: UnitProfile) -> UnitProfile:
    parameters = tuple(parameter.model_copy(update={"name": ""}) for parameter in unit.parameters)
    return unit.model_copy(update={"name": "", "parameters": parameters})


def _seconds(steps: list[MicroStep], sorts: list[int]) -> Mapping[tuple[bool, int], float]:
    """Per phase (whether it is backward) and unit, the median over all runs of units of its sort."""
    runs: dict[tuple[bool, int], list[float]] = defaultdict(list)
    for step in steps:
        for (backward, number), seconds in step.seconds().items():
            runs[backward, sorts[number]].append(seconds)
    return {
        (backward, number): median(runs[backward, sort]) if runs[backward, sort] else 0.0
        for backward in (False, True)
        for number, sort in enumerate(sorts)
    }


def _work(seconds: float) -> Work:
    return Work(seconds=seconds)
