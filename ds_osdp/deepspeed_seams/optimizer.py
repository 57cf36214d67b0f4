"""DeepSpeed's stage-3 optimizer for a module in which some parameters are replicated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.utils import get_norm_dtype

from ds_osdp.deepspeed_seams import layout
from ds_osdp.deepspeed_seams.placement import is_replicated
from ds_osdp.deepspeed_seams.replicas import GradientSlot, ReplicaReducer
from ds_osdp.errors import RankMismatchError

__all__ = ["PlannedStage3Optimizer", "planned_optimizer_class"]


class PlannedStage3Optimizer(DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    """Stage 3 for what the plan shards; whole parameters, gradients and states for what it replicates.

    Two settings come with the plan and are bound by :func:`planned_optimizer_class`.
    """

    osdp_replica_bucket_bytes: int
    osdp_check_replicas_every: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # The plan says what is kept; a size threshold beside it would keep more than the memory prediction knows.
        kwargs["param_persistence_threshold"] = 0
        self._osdp_reducer: ReplicaReducer | None = None
        self._osdp_steps = 0
        super().__init__(*args, **kwargs)
        self._osdp_replicated = [p for group in self.fp16_groups for p in group if is_replicated(p)]
        self._osdp_keep = [p for p in self.module.parameters() if is_replicated(p)]
        for parameter in self._osdp_keep:
            # DeepSpeed's coordinator does not release what persists, once it knows the order of modules.
            parameter.ds_persist = True
        if self._osdp_replicated:
            slots = [GradientSlot(p.ds_id, self._gradient_partition(p)) for p in self._osdp_replicated]
            self._osdp_reducer = ReplicaReducer(
                slots,
                self.grad_partitions_flat_buffer,
                bucket_bytes=self.osdp_replica_bucket_bytes,
                group=self.dp_process_group,
                wire_dtype=self.communication_data_type,
            )
        self._make_replicas_available()

    # -- the stock order of parameters, before it is split by partition group

    def _get_trainable_parameter_groups(self) -> list[dict[str, Any]]:
        self.osdp_stock_groups = layout.stock_groups(self.optimizer.param_groups)
        return super()._get_trainable_parameter_groups()  # type: ignore[no-any-return]

    # -- gradients

    def _gradient_partition(self, parameter: torch.Tensor) -> torch.Tensor:
        view, _ = self._get_fp32_grad_state_partition(parameter, release_swap_buffers=False)
        return view  # type: ignore[no-any-return]

    def reduce_independent_p_g_buckets_and_remove_grads(self, param: Any) -> None:
        """Called by DeepSpeed when autograd has finished the gradient of one parameter."""
        if self._osdp_reducer is None or not is_replicated(param):
            super().reduce_independent_p_g_buckets_and_remove_grads(param)
            return
        if not getattr(param, "ds_grad_is_ready", True):
            return  # DeepSpeed's tiled computations call once per tile and set this with the last
        with self._on_reduce_stream(param.grad):
            self._osdp_reducer.add(
                param.ds_id,
                param.grad,
                first_micro_step=self.micro_step_id == 0,
                last_micro_step=self._is_last_micro_step(),
            )
        param.grad = None

    def independent_gradient_partition_epilogue(self) -> None:
        """Called by DeepSpeed at the end of every backward."""
        if self._osdp_reducer is not None:
            if self._is_last_micro_step():
                self._finish_reductions(self._osdp_reducer)
            else:
                self._osdp_reducer.begin_micro_step()
        super().independent_gradient_partition_epilogue()

    def finalize_gradient_accumulation_boundary(self) -> None:
        """Called by ``engine.step()`` when the caller owns the accumulation: only now is the last micro-step known."""
        if self._osdp_reducer is not None:
            self._finish_reductions(self._osdp_reducer)
        super().finalize_gradient_accumulation_boundary()

    def _is_last_micro_step(self) -> bool:
        boundary = self.is_gradient_accumulation_boundary  # a method since 0.19.8, before that a flag
        return bool(boundary() if callable(boundary) else boundary)

    def _finish_reductions(self, reducer: ReplicaReducer) -> None:
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

    # -- norms

    def get_grad_norm_direct(self, gradients: Any, params: Any, norm_type: float = 2) -> torch.Tensor:
        """The norm of one sub-group's gradient.  Every rank holds a replicated one whole: no collective is due, and the
        group of one would cost a communicator of its own on a GPU.
        """
        if norm_type != 2 or not is_replicated(params[0]):
            return super().get_grad_norm_direct(gradients, params, norm_type)  # type: ignore[no-any-return]
        norm = torch.stack([g.to(get_norm_dtype()).norm(2) for g in gradients]).norm(2)
        # DeepSpeed's mark of a gradient that overflowed.
        return torch.where(norm.isfinite(), norm, torch.full_like(norm, -1.0))

    # -- after the step

    def _post_step(self, timer_names: Any) -> None:
        super()._post_step(timer_names)
        self._make_replicas_available()
        self._osdp_steps += 1
        if self.osdp_check_replicas_every and self._osdp_steps % self.osdp_check_replicas_every == 0:
            self.check_replicas()

    def _make_replicas_available(self) -> None:
        """Let the replicated parameters alias their own storage again: a gather over a group of one copies nothing.

        Left to the first use in the next forward, they would take the prefetcher's budget from those that need it.
        """
        released = [p for p in self._osdp_keep if p.ds_status is ZeroParamStatus.NOT_AVAILABLE]
        if released:
            released[0].all_gather_coalesced(released).wait()

    def check_replicas(self) -> None:
        """Compare a checksum of every replicated parameter and its optimizer states between ranks, bit for bit.

        Raises:
            RankMismatchError: on all ranks, naming parameters that differ.
        """
        names, sums = [], []
        for name, tensor in self._replicated_tensors():
            names.append(name)
            sums.append(_checksum(tensor))
        if not sums:
            return
        least = torch.stack(sums)
        most = least.clone()
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self.dp_process_group)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.dp_process_group)
        differing = [name for name, same in zip(names, (least == most).tolist(), strict=True) if not same]
        if differing:
            raise RankMismatchError(
                f"replicated state differs between ranks after {self._osdp_steps} steps, in {len(differing)} of {len(names)} "
                f"tensors, such as {', '.join(differing[:3])}. Something changed it on some ranks only (a parameter written "
                "outside GatheredParameters, or a faulty device): restart from the last checkpoint"
            )

    def _replicated_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for parameter in self._osdp_keep:
            yield self.param_names[parameter], parameter.ds_tensor
        for group, master in zip(self.fp16_groups, self.fp32_partitioned_groups_flat, strict=True):
            if group and is_replicated(group[0]):
                first = self.param_names[group[0]]
                yield f"the master weights from {first}", master
                for key, value in self.optimizer.state[master].items():
                    if torch.is_tensor(value) and value.numel() == master.numel():
                        yield f"{key} from {first}", value

    # -- checkpoints: what is saved is what stock ZeRO-3 saves

    def _rigid_state_dict(self) -> dict[str, Any]:
        return layout.to_stock(self, super()._rigid_state_dict())

    def _rigid_load_state_dict(self, state_dict: dict[str, Any], load_optimizer_states: bool = True) -> None:
        super()._rigid_load_state_dict(layout.from_stock(self, state_dict, load_optimizer_states), load_optimizer_states)

    def load_hp_checkpoint_state_from_checkpoint_dir_stage3(self, checkpoint_dir: str) -> None:
        """Load a universal checkpoint."""
        super().load_hp_checkpoint_state_from_checkpoint_dir_stage3(checkpoint_dir)
        # DeepSpeed gives all sub-groups one `step` tensor, which each then advances: Adam's bias correction would be
        # that of several times as many steps.
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()


def planned_optimizer_class(*, replica_bucket_bytes: int, check_replicas_every: int) -> type[PlannedStage3Optimizer]:
    """The optimizer class for one engine, with its plan's settings bound: DeepSpeed calls the constructor itself."""
    return type(
        "PlannedStage3Optimizer",
        (PlannedStage3Optimizer,),
        {"osdp_replica_bucket_bytes": replica_bucket_bytes, "osdp_check_replicas_every": check_replicas_every},
    )


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A 64-bit sum of the bits of ``tensor``, weighted by position so that swapped values show."""
    bits = (
        tensor.detach().reshape(-1).view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    )
    weights = torch.arange(bits.numel(), device=bits.device, dtype=torch.int64) % 8191 + 1
    return (bits * weights).sum()
