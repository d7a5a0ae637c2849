"""Before the first step, and later: ranks of a data group must train the same parameters, from the same values."""

import warnings
from collections.abc import Collection, Sequence
from hashlib import blake2b

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from core.data_parallel.weights.weights import without_memory
from core.parallel_state.by_hand.batches import HOOKED
from core.parallel_state.by_hand.functions import program_level
from core.parallel_state.collectives import all_gather_objects, broadcast
from core.parallel_state.collectives.checks import checksum
from core.parallel_state.flat import Bucket
from core.parallel_state.layout import has_layout, layout_of
from core.parallel_state.modules import Modules, modules_of, named_parameters
from core.parallel_state.state import ParallelState


def check_parts(module: Modules, ps: ParallelState) -> None:
    """Raise ValueError for a parameter that is not the part of its tensor that a rank of `ps` holds.

    A layer made without `place` is whole on every tensor rank; norms and checkpoints would take it for a part.
    """
    wrong = []
    for name, parameter in named_parameters(module):
        if not has_layout(parameter):
            continue
        part = layout_of(parameter).local_shape(ps.sizes)
        if tuple(parameter.shape) != part:
            wrong.append((name, list(parameter.shape), list(part)))
    if wrong:
        name, shape, held_part = wrong[0]
        raise ValueError(
            f"{name} (and {len(wrong) - 1} more) is {shape}, and a rank of this layout (tp={ps.size('tp')}) holds "
            f"{held_part} of it; build the layer with place=Placement.of(ps) of core.tensor_parallel"
        )


def same_on_all(module: Modules, table: Sequence[Bucket], ps: ParallelState) -> None:
    """Compare the bucket tables over the data group, then take its first rank's parameters and buffers.

    A script that seeds each rank differently, or not at all, would otherwise average gradients of different models.
    One all-gather of hashes (where they differ, of names and sizes); one broadcast per tensor. Raises ValueError, on
    every rank of the group: a parameter that is trained on some ranks only, or is of another size there.
    """
    group = ps.group("dp-cp")
    local_sizes = {}
    for bucket in table:
        for slot in bucket.slots:
            local_sizes[slot.name] = slot.stop - slot.start
    # as a list: the order of the buckets must be equal too
    digest = blake2b(repr(list(local_sizes.items())).encode(), digest_size=16).hexdigest()
    parts = [part for stage in modules_of(module).values() for part in stage.modules()]
    facts = all_gather_objects((digest, any(hasattr(part, HOOKED) for part in parts)), group)
    hashes, were_hooked = zip(*facts, strict=True)
    if len(set(hashes)) > 1:
        # names only where they are needed for the message
        everyone = all_gather_objects(local_sizes, group)
    else:
        everyone = [local_sizes]
    first, *others = everyone
    for rank, sizes in enumerate(others, 1):
        if list(sizes.items()) != list(first.items()):
            assert group is not None
            different = sorted(
                name for name in first.keys() | sizes.keys() if first.get(name) != sizes.get(name)
            )
            raise ValueError(
                f"DataParallel: ranks {group.ranks[0]} and {group.ranks[rank]} do not train the same parameters: "
                f"{', '.join(different[:3]) or 'their order'} ({len(different)} of {len(first)}) frozen, missing or "
                "of another size on one of them; build the same model on every rank"
            )
    if len(hashes) > 1:
        _broadcast_first(module, ps, was_hooked=any(were_hooked))


def new_parameters(stages: Sequence[nn.Module], known: Collection[int]) -> list[Parameter]:
    """Trainable parameters that nobody sums (whose ids are not known): unfrozen, replaced or added since.

    It runs in every step: no function call per module.
    """
    new: dict[int, Parameter] = {}
    modules = list(stages)
    for module in modules:  # the list grows while it is walked
        for child in module._modules.values():
            if child is not None:
                modules.append(child)  # noqa: PERF401
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in known and parameter.requires_grad:
                new[id(parameter)] = parameter
    return list(new.values())


@torch.no_grad()
def _broadcast_first(module: Modules, ps: ParallelState, *, was_hooked: bool) -> None:
    """was_hooked: hooks were given rows of one rank before, of which weights may have been made."""
    tensors: list[tuple[str, str, Tensor]] = [
        (name, layout_of(p).gradient_groups[0], p) for name, p in named_parameters(module)
    ]
    for stage in modules_of(module).values():
        tensors += [("", "dp-cp", buffer) for buffer in stage.buffers()]
    changed = []
    for name, group_name, tensor in tensors:
        group = ps.group(group_name)
        # built on meta: every rank will draw the same values
        if without_memory(tensor):
            continue
        if group is not None and tensor.numel() and tensor.layout is torch.strided:
            values = tensor.detach().contiguous()
            own = checksum(values) if was_hooked and name else None
            # as bytes: backends do not send every dtype
            broadcast(values.reshape(-1).view(torch.uint8), group)
            if own is not None and not torch.equal(own, checksum(values)):
                changed.append(name)
            if not tensor.is_contiguous():
                tensor.copy_(values)
    if was_hooked:
        _tell_of_calibration(changed, ps)


def _tell_of_calibration(changed: list[str], ps: ParallelState) -> None:
    """Warn where ranks have made other weights of the rows that hooks were given. An all-gather of names."""
    if names := sorted(
        {name for some in all_gather_objects(changed, ps.group("dp-cp")) for name in some}
    ):
        warnings.warn(
            f"context parallelism: ranks hold other values of {names[0]} ({len(names)} in all); the first's are "
            "taken. Hooks were given each rank's own rows before: statistics of them (calibration, pruning, "
            "scales) are of a part of each sequence. Sum them over the ranks before weights are made of them: "
            "torch.distributed.all_reduce(x, group=parallel_state.get_data_parallel_group("
            "with_context_parallel=True))",
            stacklevel=program_level(),
        )
