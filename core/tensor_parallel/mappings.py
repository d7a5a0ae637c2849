"""The conjugate pairs of tensor parallelism (Megatron-LM, arXiv 1909.08053; 2205.05198 for sequences).

Each forward's collective is the other's backward. All of them are the identity for a group of None.
The linear layers have these built in; the functions are for modules of a user's own.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from core.autograd.gradients import has_main_grad, no_second_derivative
from core.parallel_state import ParallelState, current_state, layout_of
from core.parallel_state.collectives import Group, all_gather, all_reduce, reduce_scatter
from core.parallel_state.layout import true_part
from core.tensor_parallel.differences import compare_copied, compare_gradients
from core.tensor_parallel.reduced_by_hand import ReducedByHand
from core.tensor_parallel.summed_gradients import counted_once


def sequence_shard(x: Tensor, group: Group) -> Tensor:
    """This rank's rows of x [s, ...]: [s/tp, ...], a view.

    Raises ValueError: s does not divide over the group.
    """
    if x.shape[0] % group.size:
        raise ValueError(
            f"sequence length {x.shape[0]} does not divide over {group.size} tensor-parallel ranks; pad it to "
            f"{-(-x.shape[0] // group.size) * group.size}, or turn sequence_parallel off"
        )
    rows = x.shape[0] // group.size
    return x[group.rank * rows : (group.rank + 1) * rows]


def check_group(group: Any, function: str) -> None:
    """Raise ValueError: it is no group of ours, and not None."""
    if group is not None and not isinstance(group, Group):
        raise ValueError(
            f'{function} takes a group of ours, or None, not {type(group).__name__}: ps.group("tp") of a '
            "ParallelState (parallel_state.current_state(), model.parallel), or place.group of Placement.of(ps)"
        )


def outside_graphs(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A graph break: collectives cannot be traced. With a group of None there is none, and no break.

    The function raises ValueError: its group is none of ours.
    """
    without_compiler = torch.compiler.disable(function)

    @wraps(function)
    def call(x: Tensor, group: Group | None, *args: Any, **options: Any) -> Tensor:
        if group is not None:
            check_group(group, function.__name__)
        # asked at every call: the group of a layer may be None, and then compiled graphs go through
        breaks_graph = group is not None and torch.compiler.is_compiling()
        if breaks_graph:
            return without_compiler(x, group, *args, **options)
        return function(x, group, *args, **options)

    return call


def _gather_last(x: Tensor, group: Group) -> Tensor:
    return all_gather(x.movedim(-1, 0), group).movedim(0, -1)


def _split_last(x: Tensor, group: Group) -> Tensor:
    if x.shape[-1] % group.size:
        raise ValueError(
            f"last dim of {tuple(x.shape)} does not divide over {group.size} tensor-parallel ranks"
        )
    return x.chunk(group.size, -1)[group.rank]


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():
            raise no_second_derivative("a collective of tensor parallelism")
        compare_copied(gradient, ctx.group, "copy_to_tensor_region")
        return all_reduce(gradient.clone(memory_format=torch.contiguous_format), ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return all_reduce(x.clone(memory_format=torch.contiguous_format), group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():
            raise no_second_derivative("a collective of tensor parallelism")
        return gradient, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _split_last(x, group).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():
            raise no_second_derivative("a collective of tensor parallelism")
        return _gather_last(gradient, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _gather_last(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():
            raise no_second_derivative("a collective of tensor parallelism")
        compare_gradients(gradient, ctx.group)
        return _split_last(gradient, ctx.group).contiguous(), None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return sequence_shard(x, group).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():
            raise no_second_derivative("a collective of tensor parallelism")
        return all_gather(gradient, ctx.group), None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, to_tensor_region: bool) -> Tensor:
        ctx.group = group
        ctx.partial = to_tensor_region
        return all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():
            raise no_second_derivative("a collective of tensor parallelism")
        if ctx.partial:
            compare_copied(
                gradient, ctx.group, "gather_from_sequence_region(to_tensor_region=True)"
            )
            return reduce_scatter(gradient, ctx.group), None, None
        return sequence_shard(gradient, ctx.group).contiguous(), None, None


class _GatherExperts(torch.autograd.Function):
    """The last dim of a stack of experts, from all expert ranks; data ranks among them have losses of their own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Group, tensor_ranks: int) -> Tensor:
        ctx.weight = weight
        ctx.group = group
        ctx.tensor_ranks = tensor_ranks
        return _gather_last(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        if torch.is_grad_enabled():
            raise no_second_derivative("a collective of expert parallelism")
        summed = reduce_scatter(gradient.movedim(-1, 0).contiguous(), ctx.group).movedim(0, -1)
        # tensor ranks compute one loss; a DataParallel sums over the other ranks with these experts as well
        is_summed = has_main_grad(ctx.weight) or hasattr(ctx.weight, "take_main_grad")
        return summed / (ctx.tensor_ranks if is_summed else ctx.group.size), None, None, None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        # for its error, which names the remedy
        sequence_shard(x, group)
        return reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():
            raise no_second_derivative("a collective of tensor parallelism")
        return all_gather(gradient, ctx.group), None


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Parameter, group: Group) -> Tensor:
        ctx.weight = weight
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():
            raise no_second_derivative("a collective of tensor parallelism")
        if has_main_grad(ctx.weight) and "tp" in layout_of(ctx.weight).partial:
            # the owner of main_grad sums once per step, where the layout says so
            return gradient, None
        return all_reduce(gradient.clone(memory_format=torch.contiguous_format), ctx.group), None


class _CountedOnce(torch.autograd.Function):
    """A replicated parameter, whole on each rank, whose gradient is added up over the ranks afterwards."""

    @staticmethod
    def forward(ctx: Any, weight: Parameter, ranks: int) -> Tensor:
        ctx.weight = weight
        ctx.ranks = ranks
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return counted_once(ctx.weight, gradient, ctx.ranks), None


@outside_graphs
def copy_to_tensor_region(x: Tensor, group: Group | None) -> Tensor:
    """Identity forward; backward all-reduces over `group`. Shape unchanged."""
    if group is None:
        return x
    return _Copy.apply(x, group)


@outside_graphs
def reduce_from_tensor_region(x: Tensor, group: Group | None) -> Tensor:
    """All-reduce over `group` forward; identity backward. Shape unchanged."""
    if group is None:
        return x
    if group.reduced_by_hand is None:
        group.reduced_by_hand = ReducedByHand(group)
    group.reduced_by_hand.meet(x)
    return _Reduce.apply(x, group)


@outside_graphs
def scatter_to_tensor_region(x: Tensor, group: Group | None) -> Tensor:
    """[..., h] the same on every rank -> [..., h/tp], this rank's columns; backward all-gathers."""
    if group is None:
        return x
    return _Scatter.apply(x, group)


@outside_graphs
def gather_from_tensor_region(x: Tensor, group: Group | None) -> Tensor:
    """[..., h/tp] -> [..., h] by all-gather; backward takes this rank's columns."""
    if group is None:
        return x
    return _Gather.apply(x, group)


@outside_graphs
def scatter_to_sequence_region(x: Tensor, group: Group | None) -> Tensor:
    """[s, b, h] the same on every rank -> [s/tp, b, h]; backward all-gathers."""
    if group is None:
        return x
    return _ScatterSequence.apply(x, group)


@outside_graphs
def gather_from_sequence_region(
    x: Tensor, group: Group | None, *, to_tensor_region: bool = True
) -> Tensor:
    """[s/tp, b, h] -> [s, b, h] by all-gather.

    Backward reduce-scatters when a tensor region follows (each rank's gradient is a partial sum), else
    takes this rank's rows.
    """
    if group is None:
        return x
    return _GatherSequence.apply(x, group, to_tensor_region)


@outside_graphs
def reduce_scatter_to_sequence_region(x: Tensor, group: Group | None) -> Tensor:
    """[s, b, h], a partial sum on each rank -> [s/tp, b, h]; backward all-gathers."""
    if group is None:
        return x
    return _ReduceScatterSequence.apply(x, group)


def dropout_in_tensor_region(
    x: Tensor, p: float, group: Group | None, *, dim: int = -1, training: bool = True
) -> Tensor:
    """`F.dropout` of x [..., h/tp], this rank's part of `dim`: the mask that one process would draw of [..., h].

    Every rank draws all of it from torch's generator, which must have one seed on all, and keeps its part. No
    collective. Shape unchanged.
    """
    check_group(group, "dropout_in_tensor_region")
    if group is None or p == 0 or not training:
        return F.dropout(x, p, training)
    shape = list(x.shape)
    shape[dim] *= group.size
    # the whole mask on each rank: the same draws from the generator, whatever tp is
    mask = F.dropout(x.new_ones(shape), p)
    return x * mask.narrow(dim, group.rank * x.shape[dim], x.shape[dim])


@outside_graphs
def sum_gradient(weight: Parameter, group: Group | None) -> Tensor:
    """The parameter itself; its gradient, partial on each rank, is all-reduced over `group` in backward.

    For replicated parameters applied to sequence shards, in plain use. With a `main_grad`, and a layout that is
    `partial` over tp, the sum is left to its owner, once per step.
    """
    if group is None:
        return weight
    return _SumGradient.apply(weight, group)


def full_tensor(
    parameter: Tensor, *, like: Parameter | None = None, parallel: ParallelState | None = None
) -> Tensor:
    """All of a split parameter, in its true shape, on every rank; for penalties, norms, inspection; with a gradient.

    like: the parameter whose gradient, data or moment is given instead: `full_tensor(p.grad, like=p)`.
    One all-gather per axis that splits it; backward takes this rank's shard, so every tensor rank must compute the
    same from it; over expert ranks, each with a loss of its own, it reduce-scatters. A parameter that is not split is
    returned as it is, or, under sequence parallelism, with a backward that counts it once over the ranks.
    Raises ValueError: a tensor that is no parameter (nobody knows how it is split), or not of the shape of `like`.
    """
    if like is None and not isinstance(parameter, Parameter):
        raise ValueError(
            f"full_tensor: a tensor of shape {list(parameter.shape)} that is no parameter does not say how it is "
            "split; give the parameter itself, or like=parameter (p.data, p.detach() and p.grad are such tensors)"
        )
    if like is not None and like.shape != parameter.shape:
        raise ValueError(
            f"full_tensor: {list(parameter.shape)} is not like the parameter, {list(like.shape)}"
        )
    layout = layout_of(parameter if like is None else like)
    ps = parallel if parallel is not None else current_state()
    full = parameter
    # on one dim the first named axis is outermost
    for axis, dim in reversed(list(layout.split.items())):
        moved = full.transpose(dim, -1)
        group = ps.group(axis)
        if axis == "ep" and group is not None:
            whole = _GatherExperts.apply(moved, parameter, group, ps.size("tp"))
        else:
            whole = gather_from_tensor_region(moved, group)
        full = whole.transpose(dim, -1)
    if like is None and torch.is_grad_enabled() and "tp" in layout.partial and ps.size("tp") > 1:
        return _CountedOnce.apply(parameter, ps.size("tp"))
    if not layout.padding:
        return full
    return full[tuple(slice(0, size) for size in layout.shape)]


@torch.no_grad()
def fill_from_full(
    parameter: Parameter, full: Tensor, *, parallel: ParallelState | None = None
) -> None:
    """Write this rank's part of `full`, the same on every rank, into a parameter: initial values of your own.

    full: of the true shape, or one with the same elements in order ([3 h, h] for (3, h, h)). Padded rows become 0.
    Before `DataParallel`, which takes the weights over. No collective. Raises ValueError: another number of elements.
    """
    layout = layout_of(parameter)
    ps = parallel if parallel is not None else current_state()
    if full.numel() != layout.numel:
        raise ValueError(
            f"fill_from_full: {list(full.shape)} has {full.numel()} elements, the parameter is {list(layout.shape)}, "
            f"{layout.numel}; give all of it, not this rank's part"
        )
    box = layout.box(ps.coordinate, ps.sizes)
    parameter.zero_()
    true_part(parameter, layout, ps.coordinate, ps.sizes).copy_(full.reshape(layout.shape)[box])
