"""p2p: keys and values travel round a ring while each rank computes with those it has (arXiv 2310.01889)."""

import torch
from torch import Tensor

from core.context_parallel.rows_attention import Attended, Gradients, RowsOfRing
from core.parallel_state import ParallelState
from core.parallel_state.collectives import Group, irecv, isend


class Ring:
    """The ranks that hold other rows of the same sequence, in the order of `zigzag`: this one sends to the next.

    Made of links, connected at first use by all of them together.
    """

    def __init__(self, ps: ParallelState, ranks: tuple[int, ...]) -> None:
        position = ranks.index(ps.rank)
        after, before = ranks[(position + 1) % len(ranks)], ranks[position - 1]
        links = ps.connect([(ps.rank, after), (before, ps.rank)])
        self._to: Group = links[ps.rank, after]
        self._from: Group = links[before, ps.rank]

    def pass_on(self, x: Tensor) -> "Passed":
        """Start sending x [contiguous] to the next rank, and receiving the one before's."""
        return Passed(x, self._to, self._from)


class Passed:
    """A block on its way to the next rank, and another one on its way here."""

    def __init__(self, x: Tensor, to: Group, source: Group) -> None:
        self._sent = isend(x, 1 - to.rank, to, header=False)
        self._received = irecv(tuple(x.shape), x.dtype, 1 - source.rank, source, device=x.device, header=False)

    def wait(self) -> Tensor:
        """The block that arrived; the one that was sent may be written again."""
        arrived = self._received.wait()
        self._sent.wait()
        return arrived


def forward(rows: RowsOfRing, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> tuple[Tensor, Tensor]:
    """Output and logsumexp. cp - 1 messages of k and v each way."""
    attended, held = Attended(rows, q), torch.stack((k, v))
    passed = ring.pass_on(held)
    attended.add(rows.own, k, v)
    for block in rows.others:
        held = passed.wait()
        if block is not rows.others[-1]:
            passed = ring.pass_on(held)
        attended.add(block, held[0], held[1])
    return attended.result()


def backward(
    rows: RowsOfRing, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, ring: Ring
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v. k and v travel again; their gradients follow a step behind, and come home at the end."""
    gradients, held = Gradients(rows, grad, q, out, logsumexp), torch.stack((k, v))
    passed = ring.pass_on(held)
    sums = torch.stack(gradients.add(rows.own, k, v))
    for block in rows.others:
        held = passed.wait()
        travelling = ring.pass_on(sums)
        if block is not rows.others[-1]:
            passed = ring.pass_on(held)
        dk, dv = gradients.add(block, held[0], held[1])
        sums = travelling.wait()
        keys = slice(block.keys.start, block.keys.stop)
        sums[0][:, :, keys] += dk
        sums[1][:, :, keys] += dv
    of_own = ring.pass_on(sums).wait()
    return gradients.of_queries(), of_own[0], of_own[1]
