"""DeepSpeed's stage-3 optimizer for a module whose parameters each have their own stage and degree."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.constants import OPTIMIZER_STATE_DICT, PARAM
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from ds_osdp.deepspeed_seams import layout
from ds_osdp.deepspeed_seams.buckets import GroupBuckets
from ds_osdp.deepspeed_seams.copies import copies, differing
from ds_osdp.deepspeed_seams.deferred import DeferredReducer, GradientSlot, Route
from ds_osdp.deepspeed_seams.hooks import ModuleHooks
from ds_osdp.deepspeed_seams.moving import MovableStage3Optimizer
from ds_osdp.deepspeed_seams.placement import accumulates_whole, is_replicated, is_whole, peers
from ds_osdp.deepspeed_seams.whole import WholeParameters
from ds_osdp.errors import DocumentError, RankMismatchError
from ds_osdp.plan import CommunicationSizes
from ds_osdp.split import sliced, unsplit_name

__all__ = ["PlannedStage3Optimizer", "planned_optimizer_class"]


class PlannedStage3Optimizer(MovableStage3Optimizer):
    """Stage 3 for what the plan shards; whole parameters, gradients and states for what it keeps whole.

    Its settings come with the plan and are bound by :func:`planned_optimizer_class`.
    """

    osdp_check_replicas_every: int
    micro_step_id: int
    """DeepSpeed's: of the micro-step at work, in the optimizer step."""
    osdp_skips_step = False
    """Whether the gradients of the coming step are lost."""
    osdp_join: layout.Join = staticmethod(layout.joined)
    """What makes the flat tensors of the stock layout; another while a checkpoint is written."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.update(self.osdp_sizes.model_dump())
        # The plan says what is kept; a size threshold beside it would keep more than the memory prediction knows.
        kwargs["param_persistence_threshold"] = 0
        self._osdp_steps = 0
        super().__init__(*args, **kwargs)
        self.osdp_arrange()

    def osdp_arrange(self) -> None:
        """Keep whole what the plan keeps whole, reduce once per step what it reduces so, and hang hooks as that needs.

        All that depends on the stages of parameters is made here, and undone by :meth:`osdp_disarrange`.
        """
        optimized = [p for group in self.fp16_groups for p in group]
        self.osdp_whole = WholeParameters(
            [p for p in self.module.parameters() if is_whole(p)],
            optimized,
            self.module.ds_inflight_param_registry,
            bucket_bytes=self.osdp_deferred_bucket_bytes,
        )
        slots = self._gradient_slots(optimized)
        self._osdp_reducer = None
        if slots:
            self._osdp_reducer = DeferredReducer(
                slots,
                self.grad_partitions_flat_buffer,
                bucket_bytes=self.osdp_deferred_bucket_bytes,
                wire_dtype=self.communication_data_type,
            )
        # DeepSpeed's ids of the parameters whose gradient of this backward is in a bucket, and of those whose was scattered.
        self._osdp_waiting: set[int] = set()
        self._osdp_scattered: set[int] = set()
        self._osdp_buckets = GroupBuckets(self, [p for p in optimized if not self._defers(p)])
        self.osdp_whole.gather()
        self.osdp_whole.wait(self.osdp_whole.parameters)
        self.osdp_hooks = ModuleHooks(self.module, self.parameter_offload, self.osdp_whole)
        self.osdp_hooks.follow_plan()
        coordinator = self._get_param_coordinator()
        self._osdp_stock_reset_step = coordinator.reset_step
        coordinator.reset_step = self._begin_forward

    def osdp_disarrange(self) -> None:
        """Leave parameters, gradients and hooks as DeepSpeed keeps them, and free what was kept beside."""
        del self._get_param_coordinator().reset_step  # which is the method of its class again
        self.osdp_hooks.put_back()
        self.osdp_whole.forget()
        self._osdp_reducer = None
        del self._osdp_buckets

    def destroy(self) -> None:
        """Let go of the module."""
        self.osdp_disarrange()
        super().destroy()

    # -- the stock order of parameters, before it is split by partition group

    def _get_trainable_parameter_groups(self) -> list[dict[str, Any]]:
        self.osdp_stock_groups = layout.stock_groups(self.optimizer.param_groups)
        return super()._get_trainable_parameter_groups()  # type: ignore[no-any-return]

    # -- forward

    def clear_backward_seen_flag(self) -> None:
        """Called by the engine at the beginning of every forward: forget the backward before, which may have failed."""
        super().clear_backward_seen_flag()
        self._osdp_waiting.clear()
        self._osdp_scattered.clear()
        self._osdp_buckets.drop()
        if self._osdp_reducer is not None:
            with self._on_reduce_stream():
                self._osdp_reducer.begin_micro_step()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin_forward(self) -> None:
        """In the place of the coordinator's ``reset_step``."""
        with self.osdp_whole.left_in_flight():
            self._osdp_stock_reset_step()
        # Whatever freed them (``empty_partition_cache``): modules without DeepSpeed's hooks rely on what they use.
        self.osdp_whole.gather()
        self.osdp_hooks.begin_forward()

    # -- gradients

    def _gradient_slots(self, parameters: list[Any]) -> list[GradientSlot]:
        """Where the gradients end up that are reduced once per optimizer step."""
        routes: dict[tuple[bool, int], Route] = {}
        slots = []
        for parameter in parameters:
            degree = parameter.ds_zero_partition_world_size
            scatters = accumulates_whole(parameter) and degree > 1
            if not scatters and peers(parameter) is None:
                continue
            if (scatters, degree) not in routes:
                routes[scatters, degree] = self._route(parameter, scatters)
            slots.append(GradientSlot(parameter.ds_id, self._gradient_part(parameter), routes[scatters, degree]))
        return slots

    def _gradient_part(self, parameter: Any) -> torch.Tensor:
        """What this rank keeps of the parameter's gradient, in DeepSpeed's flat buffer."""
        part, _ = self._get_fp32_grad_state_partition(parameter, release_swap_buffers=False)
        return part  # type: ignore[no-any-return]

    def _route(self, parameter: Any, scatters: bool) -> Route:
        # Among all ranks through the optimizer's own group: gathers and scatters of stage 3 go through another, and one
        # group does one collective after the other.
        world, degree = self.dp_process_group, parameter.ds_zero_partition_world_size
        scatter = (world if peers(parameter) is None else parameter.ds_process_group) if scatters else None
        return Route(scatter, world if degree == 1 else peers(parameter))

    def _defers(self, parameter: Any) -> bool:
        """Whether the parameter's gradient goes past DeepSpeed's buckets: not in a job of one rank, which reduces nothing."""
        return self._osdp_reducer is not None and accumulates_whole(parameter)

    def reduce_independent_p_g_buckets_and_remove_grads(self, param: Any) -> None:
        """Called by DeepSpeed when autograd has finished the gradient of one parameter."""
        if self._osdp_reducer is None or not self._defers(param):
            # A second gradient in one backward, while the first is still in the bucket: autograd has added it there.
            if param.ds_id not in self._osdp_waiting:
                if getattr(param, "ds_grad_is_ready", True):
                    self._osdp_waiting.add(param.ds_id)
                with self._osdp_buckets.of(param):
                    super().reduce_independent_p_g_buckets_and_remove_grads(param)
            return
        if not getattr(param, "ds_grad_is_ready", True):
            return  # DeepSpeed's tiled computations call once per tile and set this with the last
        with self._on_reduce_stream(param.grad):
            self._accumulate(self._osdp_reducer, param, param.grad)
        param.grad = None

    def partition_grads(self, params_to_release: list[Any], grad_partitions: list[torch.Tensor]) -> Any:
        """Called by DeepSpeed on its reduce stream, with this rank's share of gradients of one partition group."""
        self._osdp_waiting.difference_update(parameter.ds_id for parameter in params_to_release)
        pairs = list(zip(params_to_release, grad_partitions, strict=True))
        if self._osdp_reducer is None or peers(params_to_release[0]) is None:
            return self._add_shares(pairs)
        for parameter, share in pairs:
            self._accumulate(self._osdp_reducer, parameter, share)
            if not get_accelerator().is_synchronized_device():
                parameter.grad.record_stream(get_accelerator().current_stream())
            parameter.grad = None
        return []

    def _add_shares(self, pairs: list[tuple[Any, torch.Tensor]]) -> list[Any]:
        """Have DeepSpeed keep shares of gradients: those of a parameter's first gradient in this backward, then others."""
        again = [pair for pair in pairs if pair[0].ds_id in self._osdp_scattered]
        first = [pair for pair in pairs if pair[0].ds_id not in self._osdp_scattered]
        self._osdp_scattered.update(parameter.ds_id for parameter, _ in first)
        buffers: list[Any] = []
        micro_step_id = self.micro_step_id
        for some, adds in ((first, False), (again, True)):
            if some:
                # In the first micro-step DeepSpeed overwrites what it has of a parameter, also of the same backward.
                self.micro_step_id = micro_step_id + adds
                buffers += super().partition_grads([p for p, _ in some], [share for _, share in some]) or []
        self.micro_step_id = micro_step_id
        return buffers

    def _accumulate(self, reducer: DeferredReducer, parameter: Any, gradient: torch.Tensor) -> None:
        reducer.add(
            parameter.ds_id,
            gradient,
            first_micro_step=self.micro_step_id == 0,
            last_micro_step=self._is_last_micro_step(),
        )

    def independent_gradient_partition_epilogue(self) -> None:
        """Called by DeepSpeed at the end of every backward."""
        # First, since it flushes DeepSpeed's own buckets, and these may hold what is averaged over the nodes.
        self._osdp_buckets.for_each(super().independent_gradient_partition_epilogue)
        if self._osdp_reducer is not None and self._is_last_micro_step():
            self._finish_reductions(self._osdp_reducer)

    def finalize_gradient_accumulation_boundary(self) -> None:
        """Called by ``engine.step()`` when the caller owns the accumulation: only now is the last micro-step known."""
        if self._osdp_reducer is not None:
            self._finish_reductions(self._osdp_reducer)
        super().finalize_gradient_accumulation_boundary()

    def _is_last_micro_step(self) -> bool:
        boundary = self.is_gradient_accumulation_boundary  # a method since 0.19.8, before that a flag
        return bool(boundary() if callable(boundary) else boundary)

    def _finish_reductions(self, reducer: DeferredReducer) -> None:
        with self._on_reduce_stream():
            reducer.finish()
        if not get_accelerator().resolves_data_dependency():
            get_accelerator().current_stream().wait_stream(self.reduce_and_partition_stream)

    @contextmanager
    def _on_reduce_stream(self, gradient: torch.Tensor | None = None) -> Iterator[None]:
        """Run beside backward, on the stream DeepSpeed reduces on; ``gradient`` stays allocated until it is read."""
        accelerator = get_accelerator()
        if not accelerator.resolves_data_dependency():
            self.reduce_and_partition_stream.wait_stream(accelerator.current_stream())
        with accelerator.stream(self.reduce_and_partition_stream):
            yield
            if gradient is not None and not accelerator.is_synchronized_device():
                gradient.record_stream(accelerator.current_stream())

    def _pre_step(self) -> None:
        """Called by DeepSpeed at the beginning of a step: drops what a failed backward left in the buckets."""
        self._osdp_buckets.for_each(super()._pre_step)

    # -- norms

    def get_grad_norm_direct(self, gradients: Any, params: Any, norm_type: float = 2) -> torch.Tensor:
        """The norm of one sub-group's gradient.  Every rank holds a replicated one whole: no collective is due, and the
        group of one would cost a communicator of its own on a GPU.
        """
        if norm_type != 2 or not is_replicated(params[0]):
            return super().get_grad_norm_direct(gradients, params, norm_type)  # type: ignore[no-any-return]
        together = self._side_by_side(gradients)
        parts = gradients if together is None else [together]
        norm = torch.stack([torch.linalg.vector_norm(part, dtype=_norm_dtype()) for part in parts]).norm(2)
        # DeepSpeed's mark of a gradient that overflowed.
        return torch.where(norm.isfinite(), norm, torch.full_like(norm, -1.0))

    # -- the step, and what comes after it

    def step(self, closure: Any = None) -> None:
        """Update what this rank holds, and begin to make whole again what is kept whole."""
        if self.osdp_skips_step:
            self.osdp_skips_step = False
            self.zero_grad()
            self.overflow = True
            return
        with self.osdp_whole.through_step():
            super().step(closure)
        self._osdp_steps += 1
        if self.osdp_check_replicas_every and self._osdp_steps % self.osdp_check_replicas_every == 0:
            self.check_replicas()

    def _create_fp32_partitions(self) -> None:
        """Let an fp32 parameter be its own master weight, as DeepSpeed means to: it compares a device with its name."""
        super()._create_fp32_partitions()
        for flat, master in zip(self.fp16_partitioned_groups_flat, self.fp32_partitioned_groups_flat, strict=True):
            if (flat.dtype, flat.device) == (master.dtype, master.device):
                master.data = flat.data

    def _partition_all_parameters(self) -> None:
        """Called by DeepSpeed before a step and a checkpoint."""
        if self.osdp_whole.stepping:
            self.osdp_whole.free_for_step(self.module.parameters())
        else:
            super()._partition_all_parameters()

    def _prepare_fp32_grad_for_sub_group(self, sub_group_id: int) -> None:
        """Give the optimizer the gradient of one sub-group where it lies; DeepSpeed copies it together from its parts."""
        gradient = self._side_by_side(self.averaged_gradients[sub_group_id])
        if gradient is None:
            super()._prepare_fp32_grad_for_sub_group(sub_group_id)
            return
        master = self.fp32_partitioned_groups_flat[sub_group_id]
        master.grad = gradient.to(master.dtype)
        self.averaged_gradients[sub_group_id] = None

    def _side_by_side(self, gradients: list[torch.Tensor]) -> torch.Tensor | None:
        """The gradients of a sub-group as one, if they are all in DeepSpeed's flat buffer: there they are neighbours.

        Not so if a parameter was frozen after the engine was made: its gradient is then a zero of its own.
        """
        flat = self.grad_partitions_flat_buffer
        if any(gradient.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr() for gradient in gradients):
            return None
        return flat.narrow(0, gradients[0].storage_offset() - flat.storage_offset(), sum(g.numel() for g in gradients))  # type: ignore[no-any-return]

    def unscale_and_clip_grads(self, sub_group_id: int, total_norm: torch.Tensor) -> None:
        """Scale the gradient of one sub-group; into a copy where it lies in the accumulators.

        Those must stay: a parameter without a new gradient is updated with its last, as in stock DeepSpeed.
        """
        combined_scale: Any = self.loss_scale
        if self.clip_grad > 0.0:
            combined_scale = torch.clamp((total_norm / self.loss_scale + 1e-6) / self.clip_grad, min=1.0) * self.loss_scale
        master = self.fp32_partitioned_groups_flat[sub_group_id]
        if layout.share_memory(master.grad, self.grad_partitions_flat_buffer):
            master.grad = master.grad * (1.0 / combined_scale)
        else:
            master.grad.mul_(1.0 / combined_scale)

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id: int) -> None:
        """Copy the updated master weights to where parameters lie, unless they are the same memory (fp32)."""
        flat, master = self.fp16_partitioned_groups_flat[sub_group_id], self.fp32_partitioned_groups_flat[sub_group_id]
        if flat.data_ptr() != master.data_ptr():
            flat.data.copy_(master.data)

    def checkpoint_event_epilogue(self) -> None:
        """Called by DeepSpeed after a checkpoint was saved or loaded, for which it has freed all whole parameters."""
        super().checkpoint_event_epilogue()
        self.osdp_whole.gather()

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what ``offload_states`` has moved; gradients get other memory."""
        super().reload_states(non_blocking)
        if self._osdp_reducer is not None:
            parts = {p.ds_id: self._gradient_part(p) for group in self.fp16_groups for p in group}
            self._osdp_reducer.rebind(parts, self.grad_partitions_flat_buffer)

    def osdp_leave_step(self) -> None:
        """After forward or backward was left in the middle: wait for what is on the wire, and forget the rest.

        The gradients of this optimizer step are lost: the step is skipped, as one that overflows.
        """
        if self._osdp_reducer is not None:
            self._osdp_reducer.abandon()
            self._osdp_reducer = None
        # All ranks have begun the gathers that are under way, and they end; but to take one in, DeepSpeed allocates.
        get_accelerator().synchronize()
        self.module.ds_inflight_param_registry.clear()
        for parameter in self.module.parameters():
            parameter.grad = None
            if parameter.ds_status is ZeroParamStatus.INFLIGHT:
                parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE
                parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        for module in self.module.modules():
            module.ds_grads_remaining = module.applied_pre_backward_ref_cnt = 0
        self.clear_backward_seen_flag()
        self._backward_active_depth = self._remaining_grad_acc_hooks = 0
        self._get_param_coordinator().release_backward_leftovers()
        self.zero_grad()

    def check_replicas(self) -> None:
        """Compare a checksum of everything that several ranks hold, bit for bit.

        Raises:
            RankMismatchError: on all ranks, naming what differs.
        """
        self.osdp_whole.gather()
        self.osdp_whole.wait(self.osdp_whole.parameters)
        different = differing(copies(self), self.dp_process_group)
        if different:
            raise RankMismatchError(
                f"what ranks hold copies of differs between them after {self._osdp_steps} steps, in {len(different)} "
                f"tensors, such as {', '.join(different[:3])}. Something changed it on some ranks only (a parameter written "
                "outside GatheredParameters, or a faulty device): restart from the last checkpoint"
            )

    def osdp_held(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What is held beside DeepSpeed's own buffers: whole parameters, and accumulators of gradients."""
        return [p.data for p in self.osdp_whole.parameters], self._osdp_reducer.buffers if self._osdp_reducer else []

    # -- checkpoints: what is saved is what stock ZeRO-3 saves

    def _rigid_state_dict(self) -> dict[str, Any]:
        return layout.to_stock(self, super()._rigid_state_dict(), self.osdp_join)

    def _rigid_load_state_dict(self, state_dict: dict[str, Any], load_optimizer_states: bool = True) -> None:
        # The engine has freed whole parameters by now; a caller of the optimizer alone has not.
        super()._partition_all_parameters()
        super()._rigid_load_state_dict(layout.from_stock(self, state_dict, load_optimizer_states), load_optimizer_states)

    def load_hp_checkpoint_state(self, folder: str, key: str, param: Any = None) -> torch.Tensor:
        """Read this rank's part of one state of one parameter from a universal checkpoint."""
        whole = sliced(param)
        if whole is None:
            return super().load_hp_checkpoint_state(folder, key, param)  # type: ignore[no-any-return]
        parent, name = os.path.split(folder)
        name, index = unsplit_name(name)
        assert index is not None
        saved = torch.load(os.path.join(parent, name, f"{key}.pt"), weights_only=False)
        saved = saved[PARAM] if isinstance(saved, dict) else saved
        return layout.own_part(param, whole.cut(saved)[index].reshape(-1))

    def load_hp_checkpoint_state_from_checkpoint_dir_stage3(self, checkpoint_dir: str) -> None:
        """Load a universal checkpoint.

        Raises:
            DocumentError: it was saved with another number of optimizer groups.
        """
        super().load_hp_checkpoint_state_from_checkpoint_dir_stage3(checkpoint_dir)
        # Two defects of DeepSpeed's (docs/upstream): all sub-groups share one `step` tensor, which each then advances, so
        # that Adam's bias correction is that of several times as many steps;
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()
        # and all optimizer groups get the hyperparameters of the first.
        path = os.path.join(checkpoint_dir, "zero", "optimizer_state.pt")
        saved = torch.load(path, map_location="cpu", weights_only=False)[OPTIMIZER_STATE_DICT]["param_groups"]
        groups = self.optimizer.param_groups
        if len(saved) != len(groups):
            raise DocumentError(f"{path} has {len(saved)} optimizer groups, and this job's optimizer has {len(groups)}")
        for group, values in zip(groups, saved, strict=True):
            group.update({key: value for key, value in values.items() if key != "params"})


def _norm_dtype() -> torch.dtype:
    """DeepSpeed's choice (``get_norm_dtype``, which 0.19.3 lacks): double precision, where the device has it."""
    supported = getattr(get_accelerator(), "is_fp64_supported", None)
    return torch.double if supported is None or supported() else torch.float


def planned_optimizer_class(
    *, sizes: CommunicationSizes, deferred_bucket_bytes: int, check_replicas_every: int
) -> type[PlannedStage3Optimizer]:
    """The optimizer class for one engine, with its plan's settings bound: DeepSpeed calls the constructor itself."""
    return type(
        "PlannedStage3Optimizer",
        (PlannedStage3Optimizer,),
        {
            "osdp_sizes": sizes,
            "osdp_deferred_bucket_bytes": deferred_bucket_bytes,
            "osdp_check_replicas_every": check_replicas_every,
        },
    )
