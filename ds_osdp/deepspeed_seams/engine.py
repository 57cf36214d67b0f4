"""Where a plan enters DeepSpeed: the patches, and one planned engine."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from zipfile import is_zipfile

import deepspeed.runtime.zero.stage3 as stage3
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.utils import is_optimized_parameter
from deepspeed.runtime.zero.parameter_offload import ZeROOrderedDict
from deepspeed.runtime.zero.partition_parameters import GatheredParameters

from ds_osdp.deepspeed_seams import layout
from ds_osdp.deepspeed_seams.access import gathered_enter, gathered_exit, gathered_init, parameter_access
from ds_osdp.deepspeed_seams.guard import Guard
from ds_osdp.deepspeed_seams.metrics import watch_steps
from ds_osdp.deepspeed_seams.optimizer import PlannedStage3Optimizer, planned_optimizer_class
from ds_osdp.deepspeed_seams.placement import Groups, full_shapes, place, verify
from ds_osdp.deepspeed_seams.ranks import on_every_rank, same_on_every_rank
from ds_osdp.deepspeed_seams.seams import Patch, check_seams, patches_installed
from ds_osdp.deepspeed_seams.slices import join_consolidated, open_leaves
from ds_osdp.deepspeed_seams.streamed import StreamedFile
from ds_osdp.errors import DocumentError, UnsupportedError
from ds_osdp.plan import CommunicationSizes, Plan
from ds_osdp.split import unsplit_name

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "PlannedEngine",
    "applying",
    "attach",
    "install",
    "installed",
    "is_destroyed",
    "state_bytes",
    "state_tensors",
    "uninstall",
]


@dataclass(frozen=True, slots=True)
class _Pending:
    """A plan on its way into the engine that is being made."""

    plan: Plan
    check_replicas_every: int


_pending: ContextVar[_Pending | None] = ContextVar("ds_osdp_pending_plan", default=None)


@contextmanager
def applying(plan: Plan, *, check_replicas_every: int = 0) -> Iterator[None]:
    """Engines made inside take ``plan``.  Every rank must hold the same one."""
    install()
    token = _pending.set(_Pending(plan, check_replicas_every))
    try:
        yield
    finally:
        _pending.reset(token)


def install() -> None:
    """Check all seams, then put all patches in place; a second call changes nothing.

    Raises:
        SeamError: this DeepSpeed does not have them; nothing was patched.
    """
    check_seams()
    for patch in _PATCHES:
        patch.install()


def uninstall() -> None:
    """Put DeepSpeed back as it was.  Engines that hold a plan must not be used afterwards."""
    for patch in _PATCHES:
        patch.undo()


def installed() -> list[str]:
    """Names of the patches in place now."""
    return list(patches_installed(_PATCHES))


class PlannedEngine:
    """What a user may ask of an engine that holds a plan: ``engine.osdp``."""

    def __init__(self, engine: Any, plan: Plan) -> None:
        self._engine = engine
        self.plan = plan
        self.after_step: list[Callable[[], None]] = []
        """Called on every rank after each optimizer step, in order."""
        self._guard: Guard | None = None
        self._give_way: Callable[[], Plan] | None = None

    def apply(self, plan: Plan) -> None:
        """Move the engine to another plan, with its optimizer states; every rank must call it, between two optimizer steps.

        Nothing is written to disk.  The memory held meanwhile is within what a step of either plan holds at its peak and one
        unit.  Training goes on as if it had been started under ``plan`` from this state; hooks, parameters and their names
        stay the objects they are.

        Raises:
            RankMismatchError: on all ranks, if they were given different plans.
            PlanMismatchError: the plan is for another model or another number of ranks, and nothing was moved.
            UnsupportedError: the engine cannot be moved now, and nothing was.
        """
        same_on_every_rank("the plan", {"units": plan.plan_hash})
        on_every_rank(lambda: self._check_movable(plan))
        self._move(plan)

    def guard(self, give_way: Callable[[], Plan] | None) -> None:
        """Survive allocations that fail from now on; every rank must call it.

        If one fails on any rank (``torch.OutOfMemoryError``), all ranks leave the step, move to another plan and go on: the
        forward is repeated; the optimizer step is skipped if gradients were lost.  Steps are slower meanwhile.

        Args:
            give_way: called then, on all ranks, for the plan to move to; None ends the guard, and so does the first failure.
        """
        if give_way is not None and self._guard is None:
            self._guard = Guard()
        self._give_way = give_way

    @property
    def guarded(self) -> bool:
        """Whether the guard is up."""
        return self._give_way is not None

    def attempt(self, run: Callable[[], Any], *, loses_gradients: bool) -> tuple[bool, Any]:
        """Run a part of a step, which may fail together with all ranks if the guard is up: then (False, None)."""
        if self._guard is None or self._give_way is None:
            return True, run()
        passed, result = self._guard.together(run)
        if not passed:
            give_way, self._give_way = self._give_way, None
            optimizer = self._engine.optimizer
            optimizer.osdp_skips_step |= loses_gradients or bool(optimizer.micro_step_id)
            optimizer.osdp_leave_step()
            for timer in self._engine.timers.get_timers().values():
                timer.started_ = False
            get_accelerator().empty_cache()
            self._move(give_way())
        return passed, result

    def try_update(self) -> None:
        """If the guard is up, allocate what the optimizer needs for its largest flat tensor, before it changes anything."""
        masters = self._engine.optimizer.fp32_partitioned_groups_flat

        def allocate() -> None:
            largest = max(masters, key=torch.numel)
            torch.empty(2 * largest.numel(), dtype=largest.dtype, device=largest.device)  # gradients and a temporary

        if self.guarded:
            self.attempt(allocate, loses_gradients=True)

    def _move(self, plan: Plan) -> None:
        self._engine.optimizer.osdp_move(plan, _sizes(plan), self._engine.osdp_groups)
        verify(self._engine.module.named_parameters(), plan)
        self.plan = plan

    def _check_movable(self, plan: Plan) -> None:
        optimizer = self._engine.optimizer
        plan.check_belongs(full_shapes(self._engine.module), self.plan.world_size)
        if _module_changes(plan) != _module_changes(self.plan):
            raise UnsupportedError("the plan splits or recomputes other units, which changes modules: start the job with it")
        if optimizer.micro_step_id or optimizer._epilogue_ran_this_backward:
            raise UnsupportedError("gradients are being accumulated: apply a plan after engine.step() has used them")
        if optimizer.offloaded_states:
            raise UnsupportedError("the engine's states are offloaded: call engine.reload_states() before a plan is applied")
        frozen = [optimizer.param_names[p] for group in optimizer.fp16_groups for p in group if not p.requires_grad]
        if frozen:
            raise UnsupportedError(
                f"{len(frozen)} parameters were frozen after the engine was made, such as {frozen[0]!r}: a move would lose "
                "their optimizer states. Unfreeze them, apply the plan, and freeze them again"
            )

    def check_replicas(self) -> None:
        """Compare what several ranks hold copies of, bit for bit; every rank must call it.

        Raises:
            RankMismatchError: on all ranks, naming what differs.
        """
        self._engine.optimizer.check_replicas()


def _module_changes(plan: Plan) -> dict[str, tuple[int, bool]]:
    """What a plan asks of modules, beside where their parameters are placed."""
    return {unit.name: (unit.slices, unit.recompute) for unit in plan.units if unit.slices > 1 or unit.recompute}


def state_bytes(engine: Any) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer states this rank holds between steps, counted from the tensors.

    Works on any ZeRO-3 engine, planned or stock.
    """
    if isinstance(engine.optimizer, PlannedStage3Optimizer):
        engine.optimizer.osdp_whole.wait(engine.optimizer.osdp_whole.parameters)
    return {kind: _storage_bytes(tensors) for kind, tensors in state_tensors(engine).items() if kind != "buckets"}


def state_tensors(engine: Any) -> dict[str, list[torch.Tensor]]:
    """What this rank holds between steps, by kind, DeepSpeed's reduce buckets among it; of whole parameters, those that have
    arrived.
    """
    optimizer = engine.optimizer
    whole, accumulators = optimizer.osdp_held() if isinstance(optimizer, PlannedStage3Optimizer) else ([], [])
    flats, masters = optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat
    # An fp32 parameter is its own master weight.
    own = [master for flat, master in zip(flats, masters, strict=True) if not layout.share_memory(flat, master)]
    states = [v for m in masters for v in optimizer.optimizer.state[m].values() if torch.is_tensor(v)]
    return {
        "parameters": [*(p.ds_tensor for p in engine.module.parameters()), *whole],
        "gradients": [optimizer.grad_partitions_flat_buffer, *accumulators],
        "optimizer_states": [*own, *states],
        "buckets": [bucket.buffer for bucket in optimizer.ipg_buckets.values() if bucket.buffer is not None],
    }


def is_destroyed(engine: Any) -> bool:
    """Whether ``engine.destroy()`` was called: it holds nothing any more, even if somebody still holds it."""
    return not engine.optimizer.ipg_buckets


def attach(engine: Any, plan: Plan) -> None:
    """Compare the engine with the plan and hang the plan's handle on it.

    Raises:
        PlanMismatchError: the engine was partitioned otherwise.
    """
    verify(engine.module.named_parameters(), plan)
    engine.osdp = PlannedEngine(engine, plan)
    watch_steps(engine)


def _sizes(plan: Plan) -> CommunicationSizes:
    """DeepSpeed's limits for what it gathers: slices are gathered without it, and what they leave free stays free."""
    split = sum(unit.elements for unit in plan.units if unit.slices > 1)
    return plan.sizes.model_copy(
        update={
            "max_live_parameters": max(0, plan.sizes.max_live_parameters - split),
            "max_reuse_distance": max(0, plan.sizes.max_reuse_distance - 2 * split),
        }
    )


def _storage_bytes(tensors: list[torch.Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}.values())


# -- patches: each is stock DeepSpeed for whatever this package did not mark


def _configure_zero_optimizer(original: Callable[..., Any]) -> Callable[..., Any]:
    def configure(self: Any, optimizer: Any) -> Any:
        pending = _pending.get()
        if pending is None:
            return original(self, optimizer)
        if self.has_moe_layers:
            raise UnsupportedError("DeepSpeed MoE layers cannot be combined with osdp yet: set osdp.enabled to false")
        open_leaves(self.module)
        self.osdp_groups = Groups()
        place(self.module, pending.plan, self.osdp_groups)
        stock = stage3.DeepSpeedZeroOptimizer_Stage3
        stage3.DeepSpeedZeroOptimizer_Stage3 = planned_optimizer_class(
            sizes=_sizes(pending.plan),
            deferred_bucket_bytes=pending.plan.deferred_bucket_bytes,
            check_replicas_every=pending.check_replicas_every,
        )
        try:
            return original(self, optimizer)
        finally:
            stage3.DeepSpeedZeroOptimizer_Stage3 = stock

    return configure


def _planned(engine: Any) -> PlannedEngine | None:
    # Not an attribute of the module's, which engines pass on.
    return engine.__dict__.get("osdp")  # type: ignore[no-any-return]


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        planned = _planned(self)
        # A forward without gradients may be of one rank only, where nothing is gathered.
        if planned is not None and torch.is_grad_enabled():
            passed, output = planned.attempt(lambda: original(self, *inputs, **kwargs), loses_gradients=False)
            if passed:
                return output
        return original(self, *inputs, **kwargs)

    return forward


def _backward(original: Callable[..., Any]) -> Callable[..., Any]:
    def backward(self: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        planned = _planned(self)
        if planned is None:
            return original(self, loss, *args, **kwargs)
        passed, scaled = planned.attempt(lambda: original(self, loss, *args, **kwargs), loses_gradients=True)
        return scaled if passed else loss.detach()

    return backward


def _step(original: Callable[..., Any]) -> Callable[..., Any]:
    def step(self: Any, lr_kwargs: Any = None) -> Any:
        planned = _planned(self)
        if planned is None:
            return original(self, lr_kwargs)
        taken = self.global_steps
        if self.is_gradient_accumulation_boundary() or not self.managed_gradient_accumulation():
            planned.try_update()
        result = original(self, lr_kwargs)
        if self.global_steps > taken:
            for call in planned.after_step:
                call()
        return result

    return step


def _get_zero_param_shapes(original: Callable[..., Any]) -> Callable[..., Any]:
    def shapes(self: Any) -> Any:
        if not isinstance(self.optimizer, PlannedStage3Optimizer):
            return original(self)
        return [
            OrderedDict((layout.saved_name(p, self.param_names), p.ds_shape) for p in parameters)
            for _, parameters in layout.stock_sub_groups(self.optimizer)
        ]

    return shapes


def _save_zero_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    def save(self: Any, save_path: str, tag: str) -> None:
        optimizer = self.optimizer
        if not isinstance(optimizer, PlannedStage3Optimizer):
            original(self, save_path, tag)
            return
        # DeepSpeed's rank 0 writes `latest` when its own files are there: those of the others must be, too.
        on_every_rank(lambda: _write_zero_checkpoint(self, original, save_path, str(tag)))

    return save


def _write_zero_checkpoint(engine: Any, stock_save: Callable[..., Any], folder: str, tag: str) -> None:
    optimizer, stock = engine.optimizer, engine.checkpoint_engine
    # Other checkpoint engines write when and where they like, and need all of it.
    if type(stock) is TorchCheckpointEngine and stock.zipfile_serialization:
        file = StreamedFile()
        engine.checkpoint_engine, optimizer.osdp_join = file, file.join
    try:
        stock_save(engine, folder, tag)
        if engine.global_rank == 0:
            engine.osdp.plan.save(os.path.join(folder, tag, "osdp_plan.json"))
    except (OSError, RuntimeError) as error:
        raise DocumentError(f"checkpoint {tag!r} cannot be written to {folder}: {error}. 'latest' is as before") from error
    finally:
        engine.checkpoint_engine, optimizer.osdp_join = stock, layout.joined


def _load_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    def load(
        self: Any,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        reads_own_files = load_optimizer_states and not load_module_only and not self.load_universal_checkpoint()
        if reads_own_files and isinstance(self.optimizer, PlannedStage3Optimizer):
            # Found by one rank in the middle, it would leave the others waiting for that rank.
            on_every_rank(lambda: _check_files(self, load_dir, tag))
        what = load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only
        return original(self, load_dir, tag, *what, *args, **kwargs)

    return load


def _check_files(engine: Any, folder: str, tag: str | None) -> None:
    """Raise if a file that this rank will read is missing or ends too early."""
    if tag is None:
        latest = os.path.join(folder, "latest")
        if not os.path.isfile(latest):
            return  # DeepSpeed says so, on all ranks
        with open(latest) as file:
            tag = file.read().strip()
    for path in (engine._get_ckpt_name(folder, tag), engine._get_zero_ckpt_name(folder, tag)):
        if not os.path.isfile(path):
            raise DocumentError(
                f"there is no {path}, which this rank of {engine.dp_world_size} must read. A checkpoint of another number of "
                "ranks must be made universal first (ds_to_universal); otherwise load an older one"
            )
        with open(path, "rb") as file:
            cut = file.read(2) == b"PK" and not is_zipfile(path)
        if cut or not os.path.getsize(path):
            raise DocumentError(f"{path} is incomplete ({os.path.getsize(path)} bytes): load an older checkpoint")


def _get_zero_frozen_param_attributes(original: Callable[..., Any]) -> Callable[..., Any]:
    def attributes(self: Any, attr_func: Callable[[Any], Any]) -> Any:
        if not isinstance(self.optimizer, PlannedStage3Optimizer):
            return original(self, attr_func)
        saved = layout.saved_parameters(self.module.parameters())
        return OrderedDict(
            (layout.saved_name(p, self.param_names), attr_func(p)) for p in saved if not is_optimized_parameter(p)
        )

    return attributes


def _get_param_fragment_func(original: Callable[..., Any]) -> Callable[..., Any]:
    def fragment(self: Any, param: Any) -> Any:
        if not isinstance(self.optimizer, PlannedStage3Optimizer):
            return original(self, param)
        slices: Any = param.sliced.slices if isinstance(param, layout.SavedWhole) else [param]
        return layout.stock_part(self.optimizer, param, {p.ds_id: p.ds_tensor.detach() for p in slices}).cpu()

    return fragment


def _get_shared_params(original: Callable[..., Any]) -> Callable[..., Any]:
    def shared(self: Any) -> Any:
        return {unsplit_name(name)[0]: unsplit_name(first)[0] for name, first in original(self).items()}

    return shared


def _zero3_consolidated_16bit_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    def consolidated(self: Any, *args: Any, **kwargs: Any) -> Any:
        state_dict = original(self, *args, **kwargs)
        return state_dict if state_dict is None else join_consolidated(self.module, state_dict)

    return consolidated


def _load_module_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    def load(self: Any, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        fragments = checkpoint.get("frozen_param_fragments")
        if fragments and isinstance(self.optimizer, PlannedStage3Optimizer):
            saved = {layout.saved_name(p, self.param_names): p for p in layout.saved_parameters(self.module.parameters())}
            names = {parameter.ds_id: name for parameter, name in self.param_names.items()}
            device = self.optimizer.fp32_partitioned_groups_flat[0].device
            parts: dict[int, torch.Tensor] = {}
            for name, part in fragments.items():
                parts |= layout.planned_parts(self.optimizer, saved[name], part.to(device))
            checkpoint = {**checkpoint, "frozen_param_fragments": {names[ds_id]: part for ds_id, part in parts.items()}}
        return original(self, checkpoint, *args, **kwargs)

    return load


_PATCHES = [
    Patch(DeepSpeedEngine, "_configure_zero_optimizer", _configure_zero_optimizer),
    Patch(DeepSpeedEngine, "forward", _forward),
    Patch(DeepSpeedEngine, "backward", _backward),
    Patch(DeepSpeedEngine, "step", _step),
    Patch(DeepSpeedEngine, "_get_zero_param_shapes", _get_zero_param_shapes),
    Patch(DeepSpeedEngine, "_save_zero_checkpoint", _save_zero_checkpoint),
    Patch(DeepSpeedEngine, "load_checkpoint", _load_checkpoint),
    Patch(DeepSpeedEngine, "_get_zero_frozen_param_attributes", _get_zero_frozen_param_attributes),
    Patch(DeepSpeedEngine, "_get_param_fragment_func", _get_param_fragment_func),
    Patch(DeepSpeedEngine, "_get_shared_params", _get_shared_params),
    Patch(DeepSpeedEngine, "_zero3_consolidated_16bit_state_dict", _zero3_consolidated_16bit_state_dict),
    Patch(DeepSpeedEngine, "load_module_state_dict", _load_module_state_dict),
    Patch(GatheredParameters, "__init__", gathered_init),
    Patch(GatheredParameters, "__enter__", gathered_enter),
    Patch(GatheredParameters, "__exit__", gathered_exit),
    Patch(ZeROOrderedDict, "__getitem__", parameter_access),
]
