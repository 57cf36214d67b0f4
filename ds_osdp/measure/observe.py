"""Measure a model while it trains: hooks around real steps give the profile that a trace computes.

Time is charged to the unit at work, by the rule of the trace: in forward to the unit whose forward began last, in backward to
the one that was at work when autograd recorded the node that now runs.  The clock stands still while hooks of others run,
DeepSpeed's fetches, releases and reductions among them: a hook of ours lies on either side of them, and a node that they put
into the graph is known by not having been there before them.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ds_osdp.errors import ProfileError
from ds_osdp.measure.fake import tensors_in
from ds_osdp.measure.memory_sample import MemorySample
from ds_osdp.measure.sample import InputTensor
from ds_osdp.measure.stopwatch import AtWork, MicroStep, Stopwatch
from ds_osdp.measure.units import owned_parameters, viewed_bytes
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
    if any(m._compiled_call_impl is not None or hasattr(m, "_orig_mod") for m in module.modules()):
        raise ProfileError(f"{type(module).__name__} is compiled: no hook runs inside. Observe it before compile() is called")
    return Observer(module, micro_batch)


class Observer:
    """Hooks on a module, and what they have seen; made by :func:`observe`, and a context manager that ends with ``close``.

    A micro-step is one forward of the module with gradients, and the backward behind it; a forward without either is not
    counted.  The first one is sampled for memory, and takes a few times as long; those behind it are timed, and kept call by
    call: close the observer when it has seen enough.
    """

    def __init__(self, module: nn.Module, micro_batch: int) -> None:
        self._module = module
        self._micro_batch = micro_batch
        self._owned = owned_parameters(module)
        self._units = {module.get_submodule(name): name for name in self._owned}
        self._input = ""
        self._order: dict[str, int] = {}
        self._recomputed: set[int] = set()
        self._watch = Stopwatch(cuda=any(p.is_cuda for p in module.parameters()))
        self._sampled: MemorySample | None = None
        self._timed: list[MicroStep] = []
        # Of the backward that runs now: the micro-steps it goes through.
        self._in_backward: list[MicroStep] = []
        self._handles = [*self._hook_modules(), *self._hook_parameters()]

    @property
    def micro_steps(self) -> int:
        """How many have been timed."""
        return len(self._timed)

    def profile(self) -> ModelProfile:
        """What has been seen so far: per unit the median over the micro-steps it ran in.

        Units that are alike in class, parameters and bytes share one median: what is left between them is noise.

        Raises:
            ProfileError: no micro-step has been timed yet.
        """
        if self._sampled is None or not self._timed:
            raise ProfileError("no micro-step has been timed yet: it takes at least two forwards, each with its backward")
        order = self._order or dict.fromkeys(list(self._owned)[:1], 0)
        idle = [UnitProfile(name=name, parameters=self._owned[name]) for name in self._owned if name not in order]
        untimed = ModelProfile(
            model=type(self._module).__name__,
            micro_batch=self._micro_batch,
            sample=self._input,
            units=(*(self._bytes_of(name, number) for name, number in order.items()), *idle),
        )
        classes = [type(self._module.get_submodule(unit.name)) for unit in untimed.units]
        sorts = list(zip(untimed.alike, classes, strict=True))
        medians = _medians(self._timed, sorts)
        timed = (
            unit.model_copy(update={"forward": _work(medians, False, sort), "backward": _work(medians, True, sort)})
            for unit, sort in zip(untimed.units, sorts, strict=True)
        )
        return untimed.model_copy(update={"units": tuple(timed)})

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

    def _bytes_of(self, name: str, number: int) -> UnitProfile:
        assert self._sampled is not None
        return UnitProfile(
            name=name,
            parameters=self._owned[name],
            activation_bytes=self._sampled.kept[number],
            transient_bytes=self._sampled.transient[number],
            backward_transient_bytes=self._sampled.backward_transient[number],
            viewed_bytes=viewed_bytes(self._owned[name], self._sampled.viewed),
            output_bytes=self._sampled.output_bytes[number],
            recomputes=number in self._recomputed,
        )

    # --- hooks

    def _hook_modules(self) -> Iterator[RemovableHandle]:
        for module in self._module.modules():
            yield module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
            yield module.register_forward_pre_hook(self._enter, with_kwargs=True)
            yield module.register_forward_hook(self._computed, prepend=True)
            # Also when the forward raises: non-reentrant checkpointing ends a repeated one that way.
            yield module.register_forward_hook(self._after, always_call=True)

    def _hook_parameters(self) -> Iterator[RemovableHandle]:
        for parameter in self._module.parameters():
            if parameter.requires_grad:
                yield parameter.register_hook(self._gradient)  # type: ignore[no-untyped-call]
                yield parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Before all other hooks: the inputs are the model's own."""
        if module is self._module and not _backward_runs():
            self._begin(args, kwargs)
        at_work = self._watch.at_work
        if at_work is None:
            return
        self._watch.pause()
        self._follow(_nodes(_tensors((*args, *kwargs.values()))))
        sample = at_work.step.sample
        if sample is not None and sample.outermost is None:
            sample.open(module, again=at_work.backward)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Behind all other hooks: what they made of the inputs is theirs."""
        at_work = self._watch.at_work
        if at_work is None:
            return
        self._follow(_nodes(_tensors((*args, *kwargs.values()))), foreign=True)
        unit = self._units.get(module)
        if unit is None:
            self._watch.resume()
            return
        number = self._order.setdefault(unit, len(self._order))
        at_work.step.began(at_work.backward).append((torch._C._autograd._get_sequence_nr(), number))
        if at_work.backward:
            self._recomputed.add(number)
        self._go_on(at_work._replace(unit=number))

    def _computed(self, module: nn.Module, args: Any, output: Any) -> None:
        """Before all other hooks: the outputs are the model's own."""
        at_work = self._watch.at_work
        if at_work is None:
            return
        self._watch.pause()
        outputs = list(_tensors((output,)))
        self._follow(_nodes(outputs))
        if at_work.step.sample is not None and module in self._units and not at_work.backward:
            at_work.step.sample.returned(self._order[self._units[module]], outputs)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Behind all other hooks: what they made of the outputs is theirs."""
        at_work = self._watch.at_work
        if at_work is None:
            return
        outputs = list(_tensors((output,)))
        self._follow(_nodes(outputs), foreign=True)
        sample = at_work.step.sample
        if sample is not None and sample.outermost is module:
            sample.close()
            self._follow(_graph(outputs))
        if module is self._module and not at_work.backward:
            self._watch.leave()
        else:
            self._watch.resume()

    def _begin(self, args: Any, kwargs: Any) -> None:
        """A forward of the whole module begins."""
        self._watch.leave()
        self._in_backward.clear()  # of a backward that raised
        if torch.is_grad_enabled():
            step = MicroStep()
            if self._sampled is None:
                self._input = _describe(self._module, args, kwargs)
                step.sample = MemorySample(self._module, tensors_in((args, kwargs)), lambda: self._watch.running)
            self._go_on(AtWork(step, backward=False, unit=None))

    def _go_on(self, at_work: AtWork) -> None:
        self._watch.enter(at_work)
        if at_work.step.sample is not None:
            at_work.step.sample.enter(at_work.unit or 0)

    def _follow(self, nodes: Iterable[Any], *, foreign: bool = False) -> None:
        """Know when backward reaches ``nodes``; those known already stay what they are."""
        at_work = self._watch.at_work
        assert at_work is not None
        for node in nodes:
            if self in node.metadata:
                continue
            node.metadata[self] = True
            node.register_prehook(self._reached(at_work, None if foreign else node._sequence_nr()))
            sample = at_work.step.sample
            if sample is not None:
                node.register_hook(lambda inputs, _, sample=sample: sample.given(inputs))

    def _reached(self, recorded: AtWork, sequence_number: int | None) -> Callable[[Any], None]:
        step, again = recorded.step, recorded.backward

        def reached(gradients: Any) -> None:
            if not self._handles:
                return
            if not self._in_backward:
                torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            if step not in self._in_backward:
                self._in_backward.append(step)
                if step.sample is not None and self._sampled is None:
                    step.sample.begin_backward()
            if sequence_number is None:
                self._watch.pause()
                return
            self._go_on(AtWork(step, backward=True, unit=step.unit_at(sequence_number, again)))
            if step.sample is not None:
                step.sample.taken(gradients)

        return reached

    def _gradient(self, gradient: torch.Tensor) -> None:
        """Before the gradient of a parameter is added up, and others take it away."""
        self._watch.pause()
        at_work = self._watch.at_work
        if at_work is not None and at_work.step.sample is not None:
            at_work.step.sample.accumulated(gradient)

    def _accumulated(self, _: torch.Tensor) -> None:
        self._watch.resume()

    def _end_backward(self) -> None:
        self._watch.leave()
        for step in self._in_backward:
            if step.sample is None:
                self._timed += [step] if step not in self._timed else []
            elif self._sampled is None:
                step.sample.end()
                self._sampled = step.sample
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


def _nodes(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    """The autograd nodes that made ``tensors``."""
    return (tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None)


def _graph(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    """All nodes that backward from ``tensors`` goes through, but those that add up a parameter's gradient."""
    waiting = list(_nodes(tensors))
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            continue
        yield node
        behind = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= behind
        waiting += behind


def _describe(module: nn.Module, args: Any, kwargs: Any) -> str:
    given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    tensors = ((name, tensor) for name, value in given.items() for tensor in tensors_in(value))
    return ", ".join(str(InputTensor(name, tuple(tensor.shape), tensor.dtype)) for name, tensor in tensors)


def _medians(steps: list[MicroStep], sorts: Sequence[Hashable]) -> Mapping[tuple[bool, Hashable], float]:
    """Per phase (whether it is backward) and sort, the median over all runs of all units of that sort."""
    runs: dict[tuple[bool, Hashable], list[float]] = defaultdict(list)
    for step in steps:
        for (backward, number), seconds in step.seconds().items():
            runs[backward, sorts[number]].append(seconds)
    return {key: median(seconds) for key, seconds in runs.items()}


def _work(medians: Mapping[tuple[bool, Hashable], float], backward: bool, sort: Hashable) -> Work:
    return Work(seconds=medians.get((backward, sort)))
