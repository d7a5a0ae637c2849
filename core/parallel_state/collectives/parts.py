"""Reduce-scatter and all-gather in place, on flat buffers of equal shards, one per rank.

Starting and waiting are two calls, so that they run beside other work. They carry a tag: where messages are matched
by it (gloo), two ranks that are at different buckets wait until the timeout instead of taking each other's numbers.
"""

from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from core.parallel_state.collectives.checks import compare_across_ranks
from core.parallel_state.collectives.failure import Unanswered
from core.parallel_state.collectives.groups import Group
from core.parallel_state.collectives.ops import TAG, Done, PendingCollective, composes
from core.parallel_state.collectives.staged import StagedCollective, to_host


class _PeerMessages:
    """Messages under way to and from each peer; keeps their tensors alive until they have arrived."""

    def __init__(
        self,
        send_buffers: list[Tensor],
        receive_buffers: list[Tensor],
        group: Group,
        tag: int,
        label: str,
    ) -> None:
        process_group = group.process_group
        size = group.size
        rank = group.rank
        self._group = group
        self._label = label
        self._tensors_under_way = (send_buffers, receive_buffers)
        tag = TAG + ((tag + 1) << 16)
        # each rank begins with its next neighbour: no rank is everybody's first
        peers = [(rank + distance) % size for distance in range(1, size)]
        self._works: list[tuple[int, Any]] = [
            (peer, process_group.send([send_buffers[peer]], peer, tag)) for peer in peers
        ]
        self._works += [
            (peer, process_group.recv([receive_buffers[peer]], peer, tag))
            for peer in reversed(peers)
        ]
        group.under_way.add(self)

    def wait(self) -> None:
        """Raises RuntimeError, naming the peer and what was under way, where it does not come within the timeout."""
        group = self._group
        if not self._works:
            raise RuntimeError(
                f"{self._label} was given up: its group {group.name} was closed after a failure"
            )
        group.under_way.discard(self)
        for peer, work in self._works:
            try:
                work.wait(group.timeout)
            except RuntimeError as error:
                raise Unanswered(
                    f"rank {group.ranks[group.rank]} waited in vain for rank {group.ranks[peer]} at {self._label} "
                    f"(group {group.name}, at most {group.timeout.total_seconds():g} s): that rank failed, or runs "
                    "other modules or another order of them; every rank of a group must run the same",
                    (group.ranks[peer],),
                ) from error
        self._works = []
        self._tensors_under_way = ([], [])

    def forget(self) -> None:
        """Drop them without waiting: the group is being closed."""
        self._works = []
        self._tensors_under_way = ([], [])


class _PendingSum:
    """This rank's shard of the sum, once the others' are here: added in rank order, so that every layout has the same
    bits."""

    def __init__(self, local: Tensor, shards: list[Tensor], rank: int, messages: Any) -> None:
        self._local = local
        self._shards = shards
        self._rank = rank
        self._messages = messages

    def wait(self) -> Tensor:
        self._messages.wait()
        local = self._local
        shards = self._shards
        # a + b is b + a: the order does not matter
        if len(shards) == 2:
            return local.add_(shards[1 - self._rank])
        # rank 0's shard first, then 1, 2 ...: floating-point sums depend on the order
        total = local if self._rank == 0 else shards[0].to(local.dtype)
        for rank in range(1, len(shards)):
            total.add_(local if rank == self._rank else shards[rank])
        if total is local:
            return local
        return local.copy_(total)


def own_part(x: Tensor, group: Group) -> Tensor:
    """[n * size] -> [n], the view of this rank's equal shard."""
    shard_size = x.shape[0] // group.size
    return x[group.rank * shard_size : (group.rank + 1) * shard_size]


def start_sum_into_own(
    x: Tensor,
    group: Group | None,
    *,
    reduce_dtype: torch.dtype | None = None,
    tag: int = 0,
    label: str = "a reduction",
) -> PendingCollective:
    """x [n * size] on every rank; `wait()` returns its own shard [n], which then holds the sum over the ranks.

    The other shards keep this rank's own values. reduce_dtype: what is sent is rounded to this dtype; the sum is in
    x's. `label` names it in the error of a wait that ends in vain.
    Raises ValueError: x does not divide over the group.
    """
    if group is None:
        return Done(x)
    if x.dim() != 1 or x.shape[0] % group.size:
        raise ValueError(
            f"a buffer of shape {list(x.shape)} does not divide into {group.size} equal parts; pad it"
        )
    if x.device.type in group.staged:
        on_host = start_sum_into_own(
            to_host(x), group.on_host, reduce_dtype=reduce_dtype, tag=tag, label=label
        )
        return StagedCollective(on_host, own_part(x, group))
    start_time = perf_counter()
    if group.checked:
        compare_across_ranks(label, x, group)
    local = own_part(x, group)
    shard_size = x.shape[0] // group.size
    pending: PendingCollective
    if composes(x, group):
        # gloo: parts travel as messages, and each rank adds up those of its own shard
        to_send = x if reduce_dtype is None else x.to(reduce_dtype)
        scratch = to_send.new_empty(((group.size - 1) * shard_size,))
        shards = list(scratch.split(shard_size))
        # in rank order; the own one is not sent
        shards.insert(group.rank, local)
        pending = _PendingSum(
            local,
            shards,
            group.rank,
            _PeerMessages(list(to_send.split(shard_size)), shards, group, tag, label),
        )
    elif reduce_dtype is not None:
        to_send = x.to(reduce_dtype)
        send_buffers = torch.empty_like(to_send)
        work = dist.all_to_all_single(
            send_buffers, to_send, group=group.process_group, async_op=True
        )
        shards = list(send_buffers.split(shard_size))
        pending = _PendingSum(local, shards, group.rank, work)
    else:
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        pending = Done(local, scatter(local, x, group=group.process_group, async_op=True))
    group.traffic.add(x.nbytes, perf_counter() - start_time)
    return pending


def start_gather_parts(
    x: Tensor, group: Group | None, *, tag: int = 0, label: str = "a gather"
) -> PendingCollective:
    """x [n * size] of which each rank has filled its own shard; after `wait()` all are there, on every rank."""
    if group is None:
        return Done(x)
    if x.device.type in group.staged:
        return StagedCollective(
            start_gather_parts(to_host(x), group.on_host, tag=tag, label=label), x
        )
    start_time = perf_counter()
    if group.checked:
        compare_across_ranks(label, x, group)
    local = own_part(x, group)
    pending: PendingCollective
    if composes(x, group):
        pending = _PendingGather(
            x, _PeerMessages([local] * group.size, list(x.split(local.shape[0])), group, tag, label)
        )
    else:
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        pending = Done(x, gather(x, local, group=group.process_group, async_op=True))
    group.traffic.add(x.nbytes, perf_counter() - start_time)
    return pending


class _PendingGather:
    def __init__(self, x: Tensor, messages: _PeerMessages) -> None:
        self._x = x
        self._messages = messages

    def wait(self) -> Tensor:
        self._messages.wait()
        return self._x
