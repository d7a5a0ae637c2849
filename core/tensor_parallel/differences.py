"""What is said where tensor ranks hold different values of what should be the same on all."""

import warnings
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from core.autograd.graph import nodes_behind
from core.parallel_state.collectives import Group, all_gather
from core.parallel_state.collectives.checks import checksum, fingerprint
from core.parallel_state.collectives.groups import ranks_of_sum
from core.parallel_state.layout import layout_of

BATCH = "the batch"
# gradients over one group, in its first backwards
_COMPARED = 64


def has_full_memory(parameter: Tensor) -> bool:
    """Whether it is no other kind of tensor (FSDP2's), and its memory is there (ZeRO-3 frees it)."""
    plain = type(parameter).__torch_dispatch__ is Parameter.__torch_dispatch__
    # asking must not gather it
    with torch._C.DisableTorchFunctionSubclass():
        return (
            plain and parameter.untyped_storage().nbytes() >= parameter.numel() * parameter.itemsize
        )


def _layout_of_parts(shape: Sequence[int], ranks: int) -> str:
    """How a program says that a parameter of `shape` is this rank's part."""
    # the first that may be channels: not the 1 of a scale that is broadcast
    dim = next((place for place, size in enumerate(shape) if size > 1), 0)
    sizes = [size * ranks if place == dim else size for place, size in enumerate(shape)]
    whole = ", ".join(map(str, sizes)) if shape else "n"
    comma = "," if len(shape) < 2 else ""
    return (
        "core.parallel_state.layout.set_layout(parameter, "
        f'core.parallel_state.layout.Layout(({whole}{comma}), {{"tp": {dim}}})) where it is made'
    )


def difference_message(
    group: Group, labels: str, other: int, forwards: int, shape: Sequence[int] = ()
) -> str:
    """Of what differs between the first rank of a group and its `other`th, in forward number `forwards`.

    shape: of the parameter that `labels` names, on this rank.
    """
    ranks = f"ranks {group.ranks[0]} and {group.ranks[other]}"
    if labels == BATCH:
        return (
            f"tokens, positions, mask or labels differ between {ranks}, which share one model (tensor "
            "parallelism) and must read one batch: give the sampler "
            "rank=parallel_state.get_data_parallel_rank() and "
            "num_replicas=parallel_state.get_data_parallel_world_size(); sample tokens from gathered "
            "logits (gather_logits), with one seed"
        )
    if forwards == 1:
        return (
            f"{labels} should be the same on all tensor ranks, and differs between {ranks} before a step; call "
            "torch.manual_seed with one seed on all before the model is made (s + rank is not), or load one "
            "checkpoint. If it is split: ColumnParallelLinear and RowParallelLinear make halves that "
            "are split alike (docs/concepts/tensor_parallel.md); a parameter of this rank's own channels: "
            f"{_layout_of_parts(shape, group.size)}"
        )
    return (
        f"{labels} should be the same on all tensor ranks, and differs between {ranks} after an update, in "
        f"forward {forwards}. torch.nn.utils.clip_grad_norm_ takes the norm of one rank's part: use "
        "core.optimizer.clip_grad_norm_; torch.amp.GradScaler skips on one rank alone: use "
        "core.optimizer.GradScaler; LBFGS takes products of parts: use AdamW, SGD; a parameter of this rank's own "
        f"channels or heads (PReLU's, Mamba's A_log) wants {_layout_of_parts(shape, group.size)}; "
        "one that all ranks hold alike and apply to their own heads or columns (a norm of each head), or rows under "
        "sequence parallelism, wants core.tensor_parallel.sum_gradient(parameter, group) in forward (Megatron's mark "
        "p.sequence_parallel = True under its DistributedDataParallel); F.linear by hand with a column linear's "
        "weight wants copy_to_tensor_region(x, group) before it; random numbers that a forward draws (noise, "
        "DropPath) want one seed on all tensor ranks; an adapter around a "
        "linear that is split needs its halves split alike (docs/concepts/tensor_parallel.md)"
    )


@torch.no_grad()
def refuse_other_ids(ids: Tensor, group: Group) -> None:
    """Raise ValueError, on every rank: a table's ids are not the same on all. One small all-gather."""
    if torch._C._are_functorch_transforms_active():
        return
    sums = all_gather(checksum(ids)[None], group)
    unlike = (sums != sums[0]).nonzero()
    if len(unlike):
        raise ValueError(
            f"VocabParallelEmbedding got other ids {list(ids.shape)} on rank {group.ranks[int(unlike[0])]} than on "
            f"rank {group.ranks[0]}, which holds another part of the table: read one batch on all tensor ranks, and "
            "sample tokens of gathered logits with one seed on all (torch.manual_seed(seed), not seed + rank)"
        )


@torch.no_grad()
def compare_gradients(gradient: Tensor, group: Group) -> None:
    """Tell, on all ranks, of a gradient of gathered columns that is not the same on each. One small all-gather."""
    if group.compared == _COMPARED:
        return
    group.compared += 1
    rank = fingerprint(gradient)
    numbers = all_gather(rank[None].contiguous(), group)
    tolerance = 1e-6 if gradient.dtype in (torch.float32, torch.float64) else 1e-2
    off = (numbers - numbers[:1]).abs().amax()
    if not numbers.isfinite().all() or off <= tolerance * numbers.abs().amax():
        return
    group.compared = _COMPARED
    warnings.warn(
        f"gather_from_tensor_region got another gradient on each of tensor ranks {list(group.ranks)}, of "
        f"{list(gradient.shape)}, all columns: backward takes a rank's own columns of it, and loses what the others "
        "have there. What is whole goes on alike on all ranks; core.tensor_parallel.scatter_to_tensor_region(x, "
        "group) takes a rank's columns of it, in the place of `x.chunk(place.tp, -1)[place.rank]`",
        stacklevel=2,
    )


def follow_sums(output: Tensor, group: Group) -> None:
    """In the backward of `output`: tell where torch's own differentiable all-reduce sums what is whole on each rank.

    Its backward adds up the ranks' gradients. That is right for what each rank uses in its own columns, a statistic
    say; the sum of a row linear by hand goes on alike on all ranks, and its gradient is then as often too large. One
    small all-gather for each such sum.
    """
    for node in nodes_behind([output.grad_fn]):
        name = node.name()  # of most nodes no more: there are thousands
        if ("AllReduce" in name or "all_reduce" in name) and ranks_of_sum(node) == group.ranks:
            node.register_prehook(partial(_compare_summed, group))


def compare_copied(gradient: Tensor, group: Group, function: str) -> None:
    """Tell, on all ranks, of a gradient behind `function`, which sums, that each rank has whole. One small all-gather
    in the first backwards."""
    if group.compared_copies == _COMPARED:
        return
    group.compared_copies += 1
    if not _is_alike(gradient, group):
        return
    group.compared_copies = _COMPARED
    warnings.warn(
        f"{function} got one gradient on all of tensor ranks {list(group.ranks)}, of "
        f"{list(gradient.shape)}, and adds it up: gradients before it are {group.size} times too large. It stands "
        "where ranks go on with parts of their own (F.linear with a column linear's weight); what goes on alike on "
        "all of them (a whole head, a norm) takes x as it is, or gather_from_sequence_region(x, group, "
        "to_tensor_region=False) (Megatron's tensor_parallel_output_grad=False)",
        stacklevel=3,
    )


@torch.no_grad()
def _is_alike(gradient: Tensor, group: Group) -> bool:
    """Whether it is the same on all ranks, and not zero: parts of a sum would differ, at least in the last places."""
    numbers = all_gather(fingerprint(gradient)[None].contiguous(), group)
    return bool(numbers.any()) and not bool((numbers != numbers[0]).any())


def _compare_summed(group: Group, gradients: tuple[Tensor | None, ...]) -> None:
    if gradients[0] is None or not _is_alike(gradients[0], group):
        return
    warnings.warn(
        f"torch's differentiable all-reduce over tensor ranks {list(group.ranks)} gets one gradient on all of them, "
        f"of {list(gradients[0].shape)}, and adds it up: gradients before it are {group.size} times too large. "
        "core.tensor_parallel.reduce_from_tensor_region(x, group) is the sum whose result all ranks go on with",
        stacklevel=2,
    )


def compare_experts(group: Group, module: nn.Module) -> None:
    """Raise ValueError, on every rank: all hold the same experts, one rank's, where each has its own."""
    experts = [p for p in module.parameters() if "ep" in layout_of(p).split]
    if not experts or not all(has_full_memory(p) for p in experts):
        return
    gathered = all_gather(torch.stack([checksum(p) for p in experts])[None], group).cpu()
    if gathered[0].any() and (gathered == gathered[0]).all():
        raise ValueError(
            f"all {len(experts)} stacks of experts are the same on the {group.size} expert ranks "
            f"{list(group.ranks)}, which hold different experts. One rank's state_dict() loaded on all: use "
            "dist_checkpointing.load. DistributedDataParallel broadcasts one rank's: use core.data_parallel."
            "DataParallel. model.apply(...) draws the same on each: use the model's own initial weights, or a "
            "generator per rank"
        )
