"""In place on flat buffers that are cut into equal parts, one per rank: sum into the own part, gather all parts.

Both are started and waited for apart, so that they run beside other work, and carry a tag: where messages are matched
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
from core.parallel_state.collectives.ops import TAG, PendingCollective, _composes, _Done


class _Messages:
    """Messages under way to and from each peer; what they hold lives until they have arrived."""

    def __init__(self, out: list[Tensor], into: list[Tensor], group: Group, tag: int, what: str) -> None:
        pg, size, rank = group.process_group, group.size, group.rank
        self._group, self._what, self._held, tag = group, what, (out, into), TAG + ((tag + 1) << 16)
        peers = [(rank + d) % size for d in range(1, size)]
        self._works: list[tuple[int, Any]] = [(peer, pg.send([out[peer]], peer, tag)) for peer in peers]
        self._works += [(peer, pg.recv([into[peer]], peer, tag)) for peer in reversed(peers)]
        group.under_way.add(self)

    def wait(self) -> None:
        """Raises RuntimeError, naming the peer and what was under way, where it does not come within the timeout."""
        group = self._group
        if not self._works:
            raise RuntimeError(f"{self._what} was given up: its group {group.name} was closed after a failure")
        group.under_way.discard(self)
        for peer, work in self._works:
            try:
                work.wait(group.timeout)
            except RuntimeError as error:
                raise Unanswered(
                    f"rank {group.ranks[group.rank]} waited in vain for rank {group.ranks[peer]} at {self._what} "
                    f"(group {group.name}, at most {group.timeout.total_seconds():g} s): that rank failed, or runs "
                    "other modules or another order of them; every rank of a group must run the same",
                    (group.ranks[peer],),
                ) from error
        self._works, self._held = [], ([], [])

    def forget(self) -> None:
        """Nobody will wait for them: the group is being closed."""
        self._works, self._held = [], ([], [])


class _Sum:
    """This rank's part of the sum once the others' are here: added in rank order, the same on every layout."""

    def __init__(self, own: Tensor, parts: list[Tensor], rank: int, messages: Any) -> None:
        self._own, self._parts, self._rank, self._messages = own, parts, rank, messages

    def wait(self) -> Tensor:
        self._messages.wait()
        own, parts = self._own, self._parts
        if len(parts) == 2:  # two numbers have one sum
            return own.add_(parts[1 - self._rank])
        total = own if self._rank == 0 else parts[0].to(own.dtype)
        for rank in range(1, len(parts)):
            total.add_(own if rank == self._rank else parts[rank])
        return own if total is own else own.copy_(total)


def own_part(x: Tensor, group: Group) -> Tensor:
    """[n * size] -> [n], the view of this rank's equal part."""
    n = x.shape[0] // group.size
    return x[group.rank * n : (group.rank + 1) * n]


def start_sum_into_own(
    x: Tensor, group: Group | None, *, wire: torch.dtype | None = None, tag: int = 0, what: str = "a reduction"
) -> PendingCollective:
    """x [n * size] on every rank; `wait()` returns its own part [n], which then holds the sum over the ranks.

    The other parts keep this rank's own values. wire: what is sent is rounded to this dtype; the sum is in x's.
    `what` names it in the error of a wait that ends in vain. Raises ValueError: x does not divide over the group.
    """
    if group is None:
        return _Done(x)
    if x.dim() != 1 or x.shape[0] % group.size:
        raise ValueError(f"a buffer of shape {list(x.shape)} does not divide into {group.size} equal parts; pad it")
    begin = perf_counter()
    if group.checked:
        compare_across_ranks(what, x, group)
    own, n = own_part(x, group), x.shape[0] // group.size
    pending: PendingCollective
    if _composes(x, group):
        sent = x if wire is None else x.to(wire)
        scratch = sent.new_empty(((group.size - 1) * n,))
        parts = list(scratch.split(n))
        parts.insert(group.rank, own)
        pending = _Sum(own, parts, group.rank, _Messages(list(sent.split(n)), parts, group, tag, what))
    elif wire is not None:
        sent = x.to(wire)
        out = torch.empty_like(sent)
        work = dist.all_to_all_single(out, sent, group=group.process_group, async_op=True)
        parts = list(out.split(n))
        pending = _Sum(own, parts, group.rank, work)
    else:
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        pending = _Done(own, scatter(own, x, group=group.process_group, async_op=True))
    group.traffic.add(x.nbytes, perf_counter() - begin)
    return pending


def start_gather_parts(x: Tensor, group: Group | None, *, tag: int = 0, what: str = "a gather") -> PendingCollective:
    """x [n * size] of which each rank has filled its own part; after `wait()` all parts are there, on every rank."""
    if group is None:
        return _Done(x)
    begin = perf_counter()
    if group.checked:
        compare_across_ranks(what, x, group)
    own = own_part(x, group)
    pending: PendingCollective
    if _composes(x, group):
        pending = _Gathered(x, _Messages([own] * group.size, list(x.split(own.shape[0])), group, tag, what))
    else:
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        pending = _Done(x, gather(x, own, group=group.process_group, async_op=True))
    group.traffic.add(x.nbytes, perf_counter() - begin)
    return pending


class _Gathered:
    def __init__(self, x: Tensor, messages: _Messages) -> None:
        self._x, self._messages = x, messages

    def wait(self) -> Tensor:
        self._messages.wait()
        return self._x
