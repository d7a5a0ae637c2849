"""p2p: keys and values travel round a ring while each rank computes with those it has (arXiv 2310.01889)."""

import torch
from torch import Tensor

from core.context_parallel.rows_attention import Attended, Gradients, RowsOfRing
from core.parallel_state import ParallelState
from core.parallel_state.collectives import BACKWARD_TAG, Group, irecv, isend


class Ring:
    """The ranks that hold other rows of the same sequence, in the order of `zigzag`: this one sends to the next.

    Made of links, connected at first use by all of them together.
    """

    def __init__(self, ps: ParallelState, ranks: tuple[int, ...]) -> None:
        position = ranks.index(ps.rank)
        after = ranks[(position + 1) % len(ranks)]
        before = ranks[position - 1]
        links = ps.connect([(ps.rank, after), (before, ps.rank)])
        self.to: Group = links[ps.rank, after]
        self.source: Group = links[before, ps.rank]


class Passed:
    """A block on its way to the next rank of the ring, x [contiguous], and the one before's on its way here."""

    def __init__(self, x: Tensor, ring: Ring, tag: int = 0) -> None:
        to = ring.to
        source = ring.source
        self._sent = isend(x, 1 - to.rank, to, tag=tag, header=False)
        self._received = irecv(
            tuple(x.shape),
            x.dtype,
            1 - source.rank,
            source,
            device=x.device,
            tag=tag,
            header=False,
        )

    def wait(self) -> Tensor:
        """The block that arrived; the one that was sent may be written again."""
        arrived = self._received.wait()
        self._sent.wait()
        return arrived


def forward(rows: RowsOfRing, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> tuple[Tensor, Tensor]:
    """Output and logsumexp. cp - 1 messages of k and v each way."""
    attended = Attended(rows, q)
    keys_and_values = torch.stack((k, v))
    passed = Passed(keys_and_values, ring)
    attended.add(rows.own, k, v)
    for block in rows.others:
        keys_and_values = passed.wait()
        if block is not rows.others[-1]:
            passed = Passed(keys_and_values, ring)
        # while the next one is on its way
        attended.add(block, keys_and_values[0], keys_and_values[1])
    return attended.result()


def backward(
    rows: RowsOfRing,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    ring: Ring,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v. k and v travel again; what others add to their gradients follows a step behind and comes
    home at the end, where the own part is."""
    gradients = Gradients(rows, grad, q, out, logsumexp)
    keys_and_values = torch.stack((k, v))
    passed = Passed(keys_and_values, ring, BACKWARD_TAG)
    own_k, own_v = gradients.add(rows.own, k, v)
    travelling: Passed | None = None
    for block in rows.others:
        keys_and_values = passed.wait()
        if block is not rows.others[-1]:
            passed = Passed(keys_and_values, ring, BACKWARD_TAG)
        dk, dv = gradients.add(block, keys_and_values[0], keys_and_values[1])
        if travelling is not None:
            sums = travelling.wait()
        else:
            sums = torch.zeros_like(keys_and_values)
        keys = slice(block.keys.start, block.keys.stop)
        sums[0][:, :, keys] += dk
        sums[1][:, :, keys] += dv
        travelling = Passed(sums, ring, BACKWARD_TAG)
    assert travelling is not None
    home = travelling.wait()
    return gradients.of_queries(), home[0].add_(own_k), home[1].add_(own_v)
