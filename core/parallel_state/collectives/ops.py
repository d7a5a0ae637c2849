"""The collectives, on dim 0, with gloo's slow ones composed from its fast ones.

gloo's own reduce_scatter is an all-reduce and a copy, and its all-reduce waits several rounds: exchanging
parts directly (send/recv) and adding locally is two to three times faster, and sums in rank order.
"""

from time import perf_counter
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from core.parallel_state.collectives.checks import compare_across_ranks
from core.parallel_state.collectives.failure import check_answered
from core.parallel_state.collectives.groups import Group
from core.parallel_state.collectives.staged import StagedCollective, to_host

# of the messages inside a composed collective, so that they never match a user's
TAG = 0x7A11
# of what belongs to a backward pass: it never meets a forward's message, of a rank that left the backward out
BACKWARD_TAG = TAG | 0x8000


class PendingCollective(Protocol):
    """A collective under way; `wait()` returns its result, to be called exactly once."""

    def wait(self) -> Tensor:
        """Block until the result is there (on an accelerator: until its stream may use it)."""
        ...


def _options(op: Any) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return options


_REDUCTIONS: dict[str, tuple[Any, Any]] = {
    "sum": (_options(ReduceOp.SUM), torch.add),
    "max": (_options(ReduceOp.MAX), torch.maximum),
    "min": (_options(ReduceOp.MIN), torch.minimum),
}


class Done:
    """A result that is already there, or one that a backend is still working on."""

    __slots__ = ("_result", "_work")

    def __init__(self, result: Tensor, work: Any = None) -> None:
        self._result = result
        self._work = work

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
        return self._result


def composes(x: Tensor, group: Group) -> bool:
    """Whether this collective is made of messages: CPU tensors over gloo."""
    return x.device.type == "cpu" and "cpu" in group.gloo


def all_reduce(x: Tensor, group: Group | None, op: str = "sum") -> Tensor:
    """Reduce `x` in place over `group` with sum, max or min; every rank gets the same bits. Returns `x`."""
    if group is None:
        return x
    if x.device.type in group.staged:
        return StagedCollective(Done(all_reduce(to_host(x), group.on_host, op)), x).wait()
    start_time = perf_counter()
    if group.checked:
        compare_across_ranks(f"all_reduce[{op}]", x, group)
    options, combine = _REDUCTIONS[op]
    process_group = group.process_group
    try:
        if group.size == 2 and composes(x, group):
            # two messages instead of gloo's rounds; both ranks combine the same two operands
            received_shard = torch.empty_like(x, memory_format=torch.contiguous_format)
            local_sum = x.contiguous()
            sent = process_group.send([local_sum], 1 - group.rank, TAG)
            process_group.recv([received_shard], 1 - group.rank, TAG).wait(group.timeout)
            sent.wait(group.timeout)
            combine(local_sum, received_shard, out=x)
        else:
            process_group.allreduce([x], options).wait()
    except RuntimeError as error:
        check_answered(error, "an all-reduce", group)
        raise
    group.traffic.add(x.nbytes, perf_counter() - start_time)
    return x


def start_all_reduce(x: Tensor, group: Group | None) -> PendingCollective:
    """Sum `x` in place over `group` beside other work; `wait()` returns it."""
    # gloo's copying competes for CPU cores: no overlap
    if group is None or x.device.type in group.gloo:
        return Done(all_reduce(x, group))
    if group.checked:
        compare_across_ranks("start_all_reduce", x, group)
    group.traffic.add(x.nbytes, 0.0)
    return Done(x, dist.all_reduce(x, group=group.process_group, async_op=True))


def all_gather(x: Tensor, group: Group | None, *, tag: int = TAG) -> Tensor:
    """[n, ...] on every rank (at least one dim) -> [n * size, ...], the parts in rank order."""
    if group is not None:
        return start_all_gather(x, group, tag=tag).wait()
    return x


def start_all_gather(x: Tensor, group: Group | None, *, tag: int = TAG) -> PendingCollective:
    """`all_gather` beside other work; `wait()` returns the whole. tag: where messages make it up, they meet only
    those of the same tag."""
    if group is None:
        return Done(x)
    if x.device.type in group.staged:
        gathered = x.new_empty((x.shape[0] * group.size, *x.shape[1:]))
        return StagedCollective(start_all_gather(to_host(x), group.on_host, tag=tag), gathered)
    start_time = perf_counter()
    x = x.contiguous()
    if group.checked:
        compare_across_ranks("all_gather", x, group)
    gathered = x.new_empty((x.shape[0] * group.size, *x.shape[1:]))
    work = None
    if composes(x, group):
        shards = gathered.chunk(group.size)
        shards[group.rank].copy_(x)
        _exchange([x] * group.size, list(shards), group, tag)
    else:
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        work = gather(gathered, x, group=group.process_group, async_op=True)
    group.traffic.add(gathered.nbytes, perf_counter() - start_time)
    return Done(gathered, work)


def reduce_scatter(x: Tensor, group: Group | None) -> Tensor:
    """[n * size, ...] on every rank -> [n, ...], this rank's part of the sum."""
    if group is not None:
        return start_reduce_scatter(x, group).wait()
    return x


def start_reduce_scatter(x: Tensor, group: Group | None) -> PendingCollective:
    """`reduce_scatter` beside other work; `wait()` returns this rank's part.

    Raises ValueError: dim 0 does not divide over the group.
    """
    if group is None:
        return Done(x)
    start_time = perf_counter()
    if x.shape[0] % group.size:
        raise ValueError(
            f"reduce_scatter: dim 0 of {tuple(x.shape)} does not divide over {group.size} ranks; pad it to "
            f"{-(-x.shape[0] // group.size) * group.size}"
        )
    if x.device.type in group.staged:
        local_sum = x.new_empty((x.shape[0] // group.size, *x.shape[1:]))
        return StagedCollective(start_reduce_scatter(to_host(x), group.on_host), local_sum)
    x = x.contiguous()
    if group.checked:
        compare_across_ranks("reduce_scatter", x, group)
    work = None
    if composes(x, group):
        local_sum = _exchange_and_sum(x, group)
    else:
        local_sum = x.new_empty((x.shape[0] // group.size, *x.shape[1:]))
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        work = scatter(local_sum, x, group=group.process_group, async_op=True)
    group.traffic.add(x.nbytes, perf_counter() - start_time)
    return Done(local_sum, work)


def _exchange(
    send_buffers: list[Tensor], receive_buffers: list[Tensor], group: Group, tag: int = TAG
) -> None:
    """Send send_buffers[j] to rank j and receive receive_buffers[j] from it, for every other rank j; contiguous."""
    process_group = group.process_group
    size = group.size
    rank = group.rank
    # every rank begins with its next neighbour, so that not all send to rank 0 first
    peers = [*range(rank + 1, size), *range(rank)]
    try:
        sends = [process_group.send([send_buffers[peer]], peer, tag) for peer in peers]
        receives = [
            process_group.recv([receive_buffers[peer]], peer, tag) for peer in reversed(peers)
        ]
        for work in receives + sends:
            work.wait(group.timeout)
    except RuntimeError as error:
        what = "an exchange of parts"
        if tag == BACKWARD_TAG:
            what = "an exchange of parts in a backward pass (one that this rank alone runs?)"
        check_answered(error, what, group)
        raise


def _exchange_and_sum(x: Tensor, group: Group) -> Tensor:
    shards = x.chunk(group.size)
    local = shards[group.rank]
    if group.size == 2:
        received_shard = torch.empty_like(local)
        _exchange(list(shards), [received_shard, received_shard], group)
        return received_shard.add_(local)
    scratch = x.new_empty((group.size, *local.shape))
    # its own shard needs no message
    scratch[group.rank].copy_(local)
    _exchange(list(shards), list(scratch), group)
    # in rank order, and in float32 inside for 16-bit types
    return scratch.sum(0, dtype=x.dtype)


def all_to_all(
    x: Tensor,
    group: Group | None,
    *,
    send_rows: list[int] | None = None,
    receive_rows: list[int] | None = None,
) -> Tensor:
    """[n, ...] -> [m, ...]: rows go to the ranks in order, `send_rows[j]` of them to rank j (default: equal)."""
    if group is None:
        return x
    received, pending = _send_rows(x, group, send_rows, receive_rows)
    if pending is None:
        return received
    return pending.wait()


def start_all_to_all(
    x: Tensor,
    group: Group | None,
    *,
    send_rows: list[int] | None = None,
    receive_rows: list[int] | None = None,
) -> PendingCollective:
    """`all_to_all` beside other work; `wait()` returns what arrived."""
    if group is None:
        return Done(x)
    received, pending = _send_rows(x, group, send_rows, receive_rows)
    return pending or Done(received)


def _send_rows(
    x: Tensor, group: Group, send_rows: list[int] | None, receive_rows: list[int] | None
) -> tuple[Tensor, PendingCollective | None]:
    """(where rows arrive, what to wait for; None: they are there)."""
    rows = sum(receive_rows) if receive_rows is not None else x.shape[0]
    received = x.new_empty((rows, *x.shape[1:]))
    if x.device.type in group.staged:
        host, _ = _send_rows(to_host(x), group.on_host, send_rows, receive_rows)
        return received, StagedCollective(Done(host), received)
    start_time = perf_counter()
    x = x.contiguous()
    if group.checked:  # of uneven rows all but their number
        compare_across_ranks("all_to_all", x if send_rows is None else x[:0], group)
    # its copying competes for CPU cores: no overlap
    waits_here = x.device.type in group.gloo
    try:
        work = group.process_group.alltoall_base(received, x, receive_rows or [], send_rows or [])
        if waits_here:
            work.wait()
    except RuntimeError as error:
        check_answered(error, "an all-to-all", group)
        raise
    group.traffic.add(x.nbytes, perf_counter() - start_time)
    return received, None if waits_here else Done(received, work)


def broadcast(x: Tensor, group: Group | None, source: int = 0) -> Tensor:
    """Copy `x` in place from the group's rank `source` (its index in the group) to all. Returns `x`."""
    if group is None:
        return x
    if x.device.type in group.staged:
        return StagedCollective(Done(broadcast(to_host(x), group.on_host, source)), x).wait()
    start_time = perf_counter()
    if group.checked:
        compare_across_ranks("broadcast", x, group)
    try:
        dist.broadcast(x, group.ranks[source], group=group.process_group)
    except RuntimeError as error:
        check_answered(error, "a broadcast", group)
        raise
    group.traffic.add(x.nbytes, perf_counter() - start_time)
    return x


def all_gather_objects(value: Any, group: Group | None) -> list[Any]:
    """One small Python object of every rank, in rank order, on every rank. Not for hot paths."""
    if group is None:
        return [value]
    values: list[Any] = [None] * group.size
    try:
        dist.all_gather_object(values, value, group=group.process_group)
    except RuntimeError as error:
        check_answered(error, "a gather of objects", group)
        raise
    return values


def barrier(group: Group | None) -> None:
    """Wait until every rank of `group` is here."""
    if group is not None:
        try:
            dist.barrier(group.process_group)
        except RuntimeError as error:
            check_answered(error, "a barrier", group)
            raise
