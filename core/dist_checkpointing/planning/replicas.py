"""Ranks that hold the same box of an array must hold the same values: compared before every save.

Which of them writes is a matter of balance, cell by cell: of replicas that have parted a checkpoint would have some
of each.
"""

import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from core.dist_checkpointing.planning.exchange import gather_json
from core.dist_checkpointing.planning.plan import Replicas
from core.dist_checkpointing.state.catalog import LocalState
from core.dist_checkpointing.state.mapping import Shard
from core.parallel_state import ParallelState
from core.parallel_state.collectives.checks import block_sums, mixed_words
from core.parallel_state.flat import Box


def compare_replicas(
    replicas: Replicas, shards: Mapping[str, Sequence[Shard]], ps: ParallelState
) -> None:
    """Collective where any box lies on several ranks: 16 bytes of each rank for each set of ranks.

    Raises ValueError, on all ranks alike: the first box whose values differ, with two of its ranks.
    """
    if not replicas:
        return
    # the same on all ranks, as the plan is
    numbered = list(enumerate(replicas.items()))
    data = {(key, shard.box): shard.data for key, held in shards.items() for shard in held}
    own = [(number, parts) for number, (ranks, parts) in numbered if ps.rank in ranks]
    words = [_words([data[part] for part in parts], ps) for _, parts in own]
    # one read for all: on an accelerator each would wait
    numbers = torch.stack(words).tolist() if words else []
    digests_by_rank = gather_json(
        {str(number): digest for (number, _), digest in zip(own, numbers, strict=True)},
        ps.world,
        ps.device,
    )
    for number, (ranks, parts) in numbered:
        digests = [digests_by_rank[rank][str(number)] for rank in ranks]
        if any(digest != digests[0] for digest in digests):
            _raise_first_difference(ranks, parts, data, ps)


def buffer_words(local: LocalState, ps: ParallelState) -> dict[str, list[int]]:
    """key -> two numbers of the bits of each buffer of which the first rank's is saved; none without tensor ranks."""
    if ps.size("tp") == 1 or not local.from_first:
        return {}
    keys = sorted(local.from_first)
    words = [_words([shard.shard.data for shard in local.shards[key]], ps) for key in keys]
    # one read for all
    return dict(zip(keys, torch.stack(words).tolist(), strict=True))


def tell_of_buffers(words_by_rank: Sequence[Mapping[str, list[int]]], ps: ParallelState) -> None:
    """Warn of the first buffer that differs between tensor ranks; data ranks have statistics of their own batches."""
    first_of: dict[tuple[str, int], int] = {}
    for rank, words in enumerate(words_by_rank):
        for key in words:
            first = first_of.setdefault((key, ps.grid.members(rank, "tp")[0]), rank)
            if words_by_rank[first][key] != words[key]:
                warnings.warn(
                    f"{key} differs between tensor ranks {first} and {rank}, and the checkpoint has the first's for "
                    "all: a buffer of a rank's own channels, or of its own rows. Save the parts, state[name] = "
                    f"ShardedTensor.from_rank_offsets({key!r}, buffer, (dim, tensor_rank, tensor_ranks)), or bring "
                    "the buffer to one value on all tensor ranks before a save",
                    stacklevel=6,
                )
                return


def _words(tensors: Sequence[Tensor], ps: ParallelState) -> Tensor:
    """[2] int64 for the bits of all of them."""
    # some may be offloaded
    return mixed_words(torch.cat([block_sums(tensor).to(ps.device) for tensor in tensors]))


def _raise_first_difference(
    ranks: Sequence[int],
    parts: Sequence[tuple[str, Box]],
    data: Mapping[tuple[str, Box], Tensor],
    ps: ParallelState,
) -> None:
    """Collective over the world: every rank has seen that these ranks differ."""
    own: list[list[int]] = []
    if ps.rank in ranks:
        own = [_words([data[part]], ps).tolist() for part in parts]
    digests_by_rank = gather_json(own, ps.world, ps.device)
    for number, (key, box) in enumerate(parts):
        for rank in ranks[1:]:
            if digests_by_rank[rank][number] != digests_by_rank[ranks[0]][number]:
                is_integer = ps.rank in ranks and not data[key, box].is_floating_point()
                raise ValueError(_difference(key, box, (ranks[0], rank), ps, is_integer=is_integer))


def _difference(
    key: str, box: Box, ranks: tuple[int, int], ps: ParallelState, *, is_integer: bool
) -> str:
    first, second = ranks
    told = (
        f"{key} at {list(box)} differs between rank {first} and rank {second}, which both hold it"
    )
    stages = [ps.grid.coordinate(rank)["pp"] for rank in ranks]
    if stages[0] != stages[1]:
        return (
            f"{told}. Of a pipeline's stages with equal names give a mapping {{stage number: module}} to "
            "DataParallel and sharded_state_dict; a layer that several stages share needs one gradient, summed over "
            "them"
        )
    if is_integer:
        return (
            f"{told}: nothing was saved. What is each rank's own, a state of random numbers, has a key of its own, "
            "{f'rank{rank}': value}, and each rank loads its own; what is meant to be the same is broadcast first"
        )
    return (
        f"{told}: nothing was saved. Replicas differ where gradients are not summed before a step (DataParallel does "
        "it; Megatron's loop calls finalize_model_grads), where one rank alone writes weights, or where ranks draw "
        "other initial values; to keep one rank's, broadcast them first. Parts of a tensor are given as "
        "ShardedTensor, as `model.sharded_state_dict()` does, or as DTensors of a mesh of all ranks"
    )
