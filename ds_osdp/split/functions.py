"""One slice of an operator as one autograd node, so that backward, too, has one slice at a time.

Slices write side by side into one output, which is handed from node to node: nothing is concatenated, and the gradient of
the output passes through all nodes as it is.  A node gathers its slice again in backward, and autograd reduces the gradient
of the slice before it runs the next node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import Function, once_differentiable

__all__ = ["EmbeddingSlice", "ExpertsSlice", "JoinSlice", "LinearSlice", "Place"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where the rows of one slice stand in the whole."""

    begin: int
    end: int
    total: int
    axis: int
    """Of the weight, along which it is sliced: the output's."""
    gathered: Callable[[nn.Parameter], AbstractContextManager[None]]
    """Inside, the parameter has its values.  It must have them when a node is made."""

    @contextmanager
    def with_values(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Inside, all of them have.  Each is gathered by itself: together they would arrive in one tensor, and be copied."""
        with ExitStack() as stack:
            for parameter in parameters:
                stack.enter_context(self.gathered(parameter))
            yield


class LinearSlice(Function):
    """``out[..., begin:end] = x @ weight + bias`` for the columns of one slice."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        out: torch.Tensor | None,
        weight: nn.Parameter,
        bias: torch.Tensor | None,
        place: Place,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Compute one slice.

        Args:
            ctx: autograd's.
            x: [..., in features].
            out: [..., out features], with the slices before this one filled in; None for the first.
            weight: [rows, in features], or [in features, rows] if sliced along axis 1.
            bias: [rows].
            place: of the slice.
            dtype: to compute in.
        """
        ctx.save_for_backward(x if weight.requires_grad else None)
        ctx.weight, ctx.place, ctx.dtype = weight, place, dtype
        if out is None:
            out = x.new_empty(*x.shape[:-1], place.total)
        else:
            ctx.mark_dirty(out)
        columns = _columns(out, place)
        matrix = _as_matrix(weight.detach().to(dtype), place)
        if bias is None:
            torch.mm(_rows(x), matrix, out=columns)
        else:
            torch.addmm(bias.to(dtype), _rows(x), matrix, out=columns)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of ``x``, ``out``, ``weight`` and ``bias``."""
        needs_x, needs_out, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        place, weight = ctx.place, ctx.weight
        columns = _columns(gradient, place)
        of_x = of_weight = of_bias = None
        if needs_x:
            with place.gathered(weight):
                matrix = _as_matrix(weight.detach().to(ctx.dtype), place)
                of_x = (columns @ matrix.t()).view(*gradient.shape[:-1], -1)
        if needs_weight:
            x = _rows(ctx.saved_tensors[0])
            of_weight = (columns.t() @ x if place.axis == 0 else x.t() @ columns).to(weight.dtype)
        if needs_bias:
            of_bias = columns.sum(0)
        return of_x, gradient if needs_out else None, of_weight, of_bias, None, None


class EmbeddingSlice(Function):
    """``out[i] = weight[ids[i] - begin]`` for the ids of one slice."""

    @staticmethod
    def forward(
        ctx: Any, ids: torch.Tensor, out: torch.Tensor | None, weight: nn.Parameter, place: Place, padding_idx: int | None
    ) -> torch.Tensor:
        """Look up the rows of one slice.

        Args:
            ctx: autograd's.
            ids: [...].
            out: [..., columns], with the slices before this one filled in; None for the first.
            weight: [rows, columns].
            place: of the slice.
            padding_idx: the id whose row gets no gradient.

        Raises:
            IndexError: an id is out of range (on CPU; CUDA asserts).
        """
        ctx.save_for_backward(ids)
        ctx.place, ctx.padding_idx = place, padding_idx
        inside = _inside(ids, place)
        found = F.embedding((ids - place.begin).where(inside, 0), weight.detach())
        inside = inside.unsqueeze(-1)
        if out is None:
            return found.masked_fill_(~inside, 0)
        ctx.mark_dirty(out)
        return out.copy_(found.where(inside, out))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of ``out`` and ``weight``."""
        (ids,) = ctx.saved_tensors
        place, rows = ctx.place, ctx.place.end - ctx.place.begin
        of_weight = None
        if ctx.needs_input_grad[2]:
            wanted = _inside(ids, place)
            if ctx.padding_idx is not None:
                wanted &= ids != ctx.padding_idx
            # What is not of this slice goes to one more row, which is dropped.
            local = (ids - place.begin).where(wanted, rows)
            of_weight = torch.ops.aten.embedding_dense_backward(gradient, local, rows + 1, rows, False)[:rows]
        return None, gradient if ctx.needs_input_grad[1] else None, of_weight, None, None


class ExpertsSlice(Function):
    """``out + run(hidden, chosen, scores, *weights)`` for the experts of one slice.

    What ``run`` saves for backward would be that of all experts, for each slice: it runs again in backward instead, on the
    tensors that all slices save together.  It must not be random.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        chosen: torch.Tensor,
        scores: torch.Tensor,
        out: torch.Tensor | None,
        run: Callable[..., torch.Tensor],
        place: Place,
        *weights: nn.Parameter,
    ) -> torch.Tensor:
        """Add what the experts of one slice say.

        Args:
            ctx: autograd's.
            hidden: [tokens, features].
            chosen: [tokens, choices], experts.
            scores: [tokens, choices].
            out: [tokens, features], the sum over the slices before this one; None for the first.
            run: computes with the weights of the slice.
            place: of the slice.
            weights: [experts, ...] each.
        """
        ctx.save_for_backward(hidden, chosen, scores)
        ctx.run, ctx.place, ctx.weights = run, place, weights
        device = hidden.device.type
        ctx.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        own = run(hidden, chosen, scores, *(weight.detach() for weight in weights))
        if out is None:
            return own
        ctx.mark_dirty(out)
        return out.add_(own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of ``hidden``, ``scores``, ``out`` and ``weights``."""
        hidden, chosen, scores = ctx.saved_tensors
        needs_out = ctx.needs_input_grad[3]
        needed = [i for i, needs in enumerate(ctx.needs_input_grad) if needs and i != 3]
        gradients: list[torch.Tensor | None] = [None] * len(ctx.needs_input_grad)
        gradients[3] = gradient if needs_out else None
        with ctx.place.with_values(ctx.weights), torch.enable_grad(), torch.autocast(*ctx.autocast):
            inputs = {i: t.detach() for i, t in ((0, hidden), (2, scores), *enumerate(ctx.weights, 6))}
            for i in needed:
                inputs[i].requires_grad_()
            own = ctx.run(inputs[0], chosen, inputs[2], *(inputs[i] for i in range(6, len(gradients))))
            for i, found in zip(needed, torch.autograd.grad(own, [inputs[i] for i in needed], gradient), strict=True):
                gradients[i] = found
        return tuple(gradients)


class JoinSlice(Function):
    """The whole parameter out of its slices, for code that asks for it."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor | None, weight: nn.Parameter, place: Place) -> torch.Tensor:
        """Copy one slice to its place in ``out``, which is made for the first."""
        ctx.place = place
        if out is None:
            shape = [place.total if axis == place.axis else size for axis, size in enumerate(weight.shape)]
            out = weight.new_empty(shape)
        else:
            ctx.mark_dirty(out)
        out.narrow(place.axis, place.begin, weight.shape[place.axis]).copy_(weight)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of ``out`` and ``weight``."""
        place = ctx.place
        own = gradient.narrow(place.axis, place.begin, place.end - place.begin) if ctx.needs_input_grad[1] else None
        return gradient if ctx.needs_input_grad[0] else None, own, None


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _columns(tensor: torch.Tensor, place: Place) -> torch.Tensor:
    return _rows(tensor)[:, place.begin : place.end]


def _as_matrix(weight: torch.Tensor, place: Place) -> torch.Tensor:
    """[in features, rows]."""
    return weight.t() if place.axis == 0 else weight


def _inside(ids: torch.Tensor, place: Place) -> torch.Tensor:
    """Which ids are of this slice.  Those below the first and above the last are theirs, so that they are noticed."""
    inside = torch.ones_like(ids, dtype=torch.bool)
    if place.begin > 0:
        inside &= ids >= place.begin
    if place.end < place.total:
        inside &= ids < place.end
    return inside
