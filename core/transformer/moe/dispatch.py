"""Tokens to the ranks that hold their experts, and back.

Every rank calls every collective, with rows or without: (1) how many rows go to each expert, (2) the rows, (3) their
weights, and on the way back (4) the experts' outputs. Backward: the same the other way round, without (1).
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from core.autograd.gradients import no_second_derivative
from core.autograd.recomputation.notes import note
from core.parallel_state.collectives import Group, all_to_all, start_all_to_all
from core.transformer.moe.router import Router, Routing


@dataclass(frozen=True, eq=False)
class Dispatch:
    """Where the T k rows of T tokens (k experts each) go.

    A row is (token, slot), number token * k + slot. order: [T k] the rows sorted by expert, by number within one;
    tokens: [T k] the token of each; place: [T k] the inverse of order. send, receive: rows per expert rank. regroup:
    what arrives is sorted by (rank, expert); this takes it to (expert, rank); None on one rank. regroup_back: the
    inverse. counts: rows of each local expert.
    """

    top_k: int
    order: Tensor
    tokens: Tensor
    place: Tensor
    send: list[int]
    receive: list[int]
    regroup: Tensor | None
    regroup_back: Tensor | None
    counts: list[int]
    group: Group | None

    @classmethod
    def plan(cls, routing: Routing, router: Router, group: Group | None) -> "Dispatch":
        """Of T tokens; noted, so that a second run exchanges no counts. One all-to-all over ep.

        Waits for the host once: how many rows arrive decides the shapes; the load of a step is counted from the same
        numbers. Raises ValueError, on all ranks of ep: logits that are not finite on one of them.
        """
        facts = note(lambda: _planned(routing, router, group))
        order, place, send, receive, regroup, regroup_back, counts = facts
        top_k = routing.experts.shape[1]
        tokens = torch.div(order, top_k, rounding_mode="floor")
        return cls(top_k, order, tokens, place, send, receive, regroup, regroup_back, counts, group)

    def start(self, x: Tensor, per_row: int) -> Callable[[], Tensor]:
        """Send rows of [T, h] (per_row = k) or [T k, 1] (per_row = 1) to their experts, beside other work.

        Calling the result waits and gives the rows of this rank's experts, sorted by expert.
        """
        rows = x.index_select(0, self.order if per_row == 1 else self.tokens)
        regroup = self.regroup
        if regroup is None:
            # one expert rank: rows are sorted by expert already, nothing travels
            return lambda: rows
        arriving = start_all_to_all(
            rows, self.group, send_rows=self.send, receive_rows=self.receive
        )
        return lambda: arriving.wait().index_select(0, regroup)

    def to_experts(self, x: Tensor, per_row: int) -> Tensor:
        """The same, at once."""
        rows = x.index_select(0, self.order if per_row == 1 else self.tokens)
        if self.regroup is None:
            return rows
        received = all_to_all(rows, self.group, send_rows=self.send, receive_rows=self.receive)
        return received.index_select(0, self.regroup)

    def from_experts(self, rows: Tensor, per_row: int) -> Tensor:
        """The other way round; the k rows of a token are added in the order of its slots, on every layout."""
        if self.regroup_back is not None:
            rows = rows.index_select(0, self.regroup_back)
            rows = all_to_all(rows, self.group, send_rows=self.receive, receive_rows=self.send)
        by_number = rows.index_select(0, self.place)
        if per_row == 1:
            return by_number
        of_tokens = by_number.view(-1, per_row, by_number.shape[1])
        # two slots: the same bits as their sum, in a quarter of its time on CPUs
        if per_row == 2:
            return of_tokens[:, 0] + of_tokens[:, 1]
        return of_tokens.sum(1)


def _planned(routing: Routing, router: Router, group: Group | None) -> tuple[Any, ...]:
    ids = routing.experts.reshape(-1)
    num_experts = routing.logits.shape[1]
    # stable: rows of one expert stay in the order of tokens, whatever the layout
    order = ids.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=order.device)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, ids, torch.ones_like(ids))
    # behind the counts for each rank: whether logits are not finite, for what is read anyway
    broken = routing.logits.detach().isfinite().all().logical_not().to(counts.dtype)
    if group is None:
        *local_counts, is_broken = torch.cat((counts, broken[None])).tolist()
        _refuse_broken(router, [0] if is_broken else [])
        if router.training:
            router.load.add(local_counts, sum(local_counts), router.weight)
        return order, place, [], [], None, None, local_counts
    leaving = torch.cat((counts.view(group.size, -1), broken.expand(group.size, 1)), 1)
    # [2, ranks, local experts + 1]: rows of this rank for the experts there, of each rank for the experts here
    # `tolist` is the one wait for the device
    both = torch.stack((leaving, all_to_all(leaving, group))).tolist()
    _refuse_broken(router, [rank for rank, row in enumerate(both[1]) if row[-1]])
    leaving_counts, arriving_counts = [[row[:-1] for row in rows] for rows in both]
    send = [sum(row) for row in leaving_counts]
    receive = [sum(row) for row in arriving_counts]
    if router.training:
        router.load.add(list(chain.from_iterable(leaving_counts)), sum(receive), router.weight)
    regroup = _regrouped(arriving_counts, order.device)
    back = torch.empty_like(regroup)
    back[regroup] = torch.arange(regroup.numel(), device=order.device)
    of_local_experts = [sum(column) for column in zip(*arriving_counts, strict=True)]
    return order, place, send, receive, regroup, back, of_local_experts


def _refuse_broken(router: Router, ranks: list[int]) -> None:
    if ranks:
        raise ValueError(
            f"layers.{router.layer}: the router's logits are not finite for tokens of {len(ranks)} expert ranks "
            f"({', '.join(map(str, ranks))}): no expert can be chosen. The layers before it overflowed, or a weight "
            "is not a number; go back to a checkpoint, and lower the learning rate or clip gradients"
        )


def _regrouped(arriving: list[list[int]], device: torch.device) -> Tensor:
    """Row numbers of what arrived, sorted by (rank, expert), in the order (expert, rank)."""
    flat = list(chain.from_iterable(arriving))
    starts = [0, *accumulate(flat)][:-1]
    # the grouped matmul wants each expert's rows together, whoever sent them
    experts = len(arriving[0])
    pieces = []
    for expert in range(experts):
        for rank in range(len(arriving)):
            start = starts[rank * experts + expert]
            pieces.append(torch.arange(start, start + arriving[rank][expert]))
    return torch.cat(pieces).to(device)


_EXCHANGE = "the exchange of tokens between experts"


class _ToExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dispatch: Dispatch, arriving: Callable[[], Tensor]) -> Tensor:
        ctx.dispatch = dispatch
        return arriving()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():
            raise no_second_derivative(_EXCHANGE)
        return ctx.dispatch.from_experts(gradient, ctx.dispatch.top_k), None, None


class _FromExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, dispatch: Dispatch) -> Tensor:
        ctx.dispatch = dispatch
        return dispatch.from_experts(rows, dispatch.top_k)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():
            raise no_second_derivative(_EXCHANGE)
        return ctx.dispatch.to_experts(gradient, ctx.dispatch.top_k), None


class _WeightsToExperts(torch.autograd.Function):
    """Noted, because they are small: a second run exchanges none."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, dispatch: Dispatch) -> Tensor:
        ctx.dispatch = dispatch
        (moved,) = note(lambda: (dispatch.to_experts(weights, 1),))
        return moved

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():
            raise no_second_derivative(_EXCHANGE)
        return ctx.dispatch.from_experts(gradient, 1), None


def start_to_experts(x: Tensor, dispatch: Dispatch) -> Callable[[], Tensor]:
    """x [T, h] leaves for its experts beside other work; the result waits: [n, h], this rank's experts' rows.

    All-to-all over ep, started here; in backward at once.
    """
    arriving = dispatch.start(x.detach(), dispatch.top_k)

    def wait() -> Tensor:
        y: Tensor = _ToExperts.apply(x, dispatch, arriving)
        return y

    return wait


def weights_to_experts(weights: Tensor, dispatch: Dispatch) -> Tensor:
    """[T, k] -> [n, 1], the weight of each of the experts' rows. All-to-all over ep, forward and backward."""
    y: Tensor = _WeightsToExperts.apply(weights.reshape(-1, 1), dispatch)
    return y


def from_experts(rows: Tensor, dispatch: Dispatch) -> Tensor:
    """[n, h] -> [T, h], the sum of each token's k rows. All-to-all over ep, forward and backward."""
    y: Tensor = _FromExperts.apply(rows, dispatch)
    return y
