"""How many rows each expert gets in a step: counted on the host as tokens are sent, summed once a step.

What balances experts over a global batch is a function of these counts: a bias that chooses (arXiv 2408.15664) and
the auxiliary loss of the batch before (arXiv 2501.11873).
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from core.parallel_state import ParallelState
from core.parallel_state.collectives import all_reduce
from core.transformer.spec import Build


@dataclass(frozen=True)
class ExpertLoad:
    """How evenly a step used the experts of one layer: rows of the busiest and of the idlest one over their mean.

    received: the most rows of a microbatch that went to the experts of one rank. aux, z: the means of the auxiliary
    losses over positions, not yet times their coefficients; None for one that is not used.
    """

    layer: int
    busiest: float
    idlest: float
    received: int
    aux: float | None = None
    z: float | None = None


@dataclass
class Counts:
    """Of one layer and the tokens of this rank, since a step began.

    rows: by expert. most_received: rows of a microbatch that went to the experts here. losses: name -> the sum over
    positions, on the device.
    """

    rows: list[int]
    most_received: int = 0
    losses: dict[str, Tensor] = field(default_factory=dict)


class Load:
    """Counts of one layer. A forward that runs again is counted once, for what is counted is noted.

    remembers: whether the counts of a step change what comes after it. is_logged: whether a log reads the auxiliary
    losses; else they are not summed.
    """

    def __init__(self, experts: int, *, remembers: bool) -> None:
        self.remembers = remembers
        self.is_logged = False
        self._experts = experts
        self._counts = Counts([0] * experts)
        # of the router's weight, when counting began
        self._version: int | None = None
        self._told = False

    def add(self, rows: Sequence[int], received: int, weight: Tensor) -> None:
        """A microbatch: rows of its tokens by expert, rows received for the experts here."""
        counts = self._counts
        counts.rows = [a + b for a, b in zip(counts.rows, rows, strict=True)]
        # of one microbatch: it is what memory must hold at once
        counts.most_received = max(counts.most_received, received)
        if self._version is None:
            self._version = weight._version
        elif self.remembers and self._version != weight._version and not self._told:
            # weights that change between two counts of one step: an optimizer stepped, and nobody ended the step
            self._told = True
            warnings.warn(
                "the weights of a model with moe_router_enable_expert_bias or global_aux_loss were updated, and its "
                "step did not end: experts stay unbalanced. Call model.end_step() after each optimizer.step(), on "
                "all ranks, or train with SingleStage or Pipeline, which do",
                stacklevel=2,
            )

    def add_losses(self, losses: Mapping[str, Tensor]) -> None:
        """A microbatch: the sums of its auxiliary losses over this rank's positions; nothing waits for the device."""
        sums = self._counts.losses
        for name, loss in losses.items():
            if name in sums:
                sums[name] = sums[name] + loss.detach()
            else:
                sums[name] = loss.detach()

    def take(self) -> Counts:
        """What was counted; counting begins again."""
        counts = self._counts
        self._counts = Counts([0] * self._experts)
        self._version = None
        return counts


class Counted(Protocol):
    """A router whose rows are counted; top_k: how many of each token."""

    layer: int
    top_k: int
    load: Load

    @property
    def weight(self) -> Tensor:
        """The router's weight [E, h]; its device is where counts are summed."""
        ...

    def end_step(self, rows: Tensor) -> None:
        """rows: int64 [E], of the whole global batch."""
        ...


class Loads:
    """The routers of one model or pipeline stage, told together when a step begins and ends."""

    def __init__(self, ps: ParallelState) -> None:
        self.routers: list[Counted] = []
        self._ps = ps
        # of this rank, in the last step
        self._last: list[Counts] = []

    @classmethod
    def of(cls, build: Build) -> "Loads":
        """Those of the model that is being built."""
        for listener in build.stage.listeners:
            if isinstance(listener, cls):
                return listener
        loads = cls(build.parallel)
        build.stage.listeners.append(loads)
        return loads

    def log(self) -> None:
        """From now on auxiliary losses are summed, for `of_layers`."""
        for router in self.routers:
            router.load.is_logged = True

    def begin_step(self) -> None:
        """Forget what was counted outside of a step."""
        for router in self.routers:
            router.load.take()

    @torch.no_grad()
    def of_layers(self) -> list[ExpertLoad]:
        """Of the last step, on every rank with these layers. All-reduces over ep and edp; waits for the device."""
        if not self._last:
            return []
        names = list(self._last[0].losses)
        device = self.routers[0].weight.device
        rows = torch.tensor(
            [counts.rows for counts in self._last], dtype=torch.float64, device=device
        )
        losses = rows.new_zeros(len(self._last), len(names))
        for layer, counts in enumerate(self._last):
            for place, name in enumerate(names):
                losses[layer, place] = counts.losses[name]
        sums = self._over_ranks(torch.cat((rows, losses), 1)).tolist()
        received = torch.tensor([counts.most_received for counts in self._last], device=device)
        most = self._over_ranks(received, "max").tolist()
        experts = rows.shape[1]
        loads = []
        for router, summed, most_received in zip(self.routers, sums, most, strict=True):
            of_experts = summed[:experts]
            of_losses = summed[experts:]
            # 1.0 where nothing was counted: it is divided by below
            mean = sum(of_experts) / experts or 1.0
            # each token is counted top_k times
            positions = sum(of_experts) / router.top_k or 1.0
            means = {name: loss / positions for name, loss in zip(names, of_losses, strict=True)}
            busiest = max(of_experts) / mean
            idlest = min(of_experts) / mean
            loads.append(ExpertLoad(router.layer, busiest, idlest, most_received, **means))
        return loads

    @torch.no_grad()
    def end_step(self) -> None:
        """Hand the rows of the step to routers that remember them: an all-reduce over ep, one over edp, else none."""
        self._last = [router.load.take() for router in self.routers]
        if any(router.load.remembers for router in self.routers):
            rows = torch.tensor(
                [counts.rows for counts in self._last], device=self.routers[0].weight.device
            )
            for router, rows_of_layer in zip(self.routers, self._over_ranks(rows), strict=True):
                router.end_step(rows_of_layer)

    def _over_ranks(self, x: Tensor, op: str = "sum") -> Tensor:
        return all_reduce(all_reduce(x, self._ps.group("ep"), op), self._ps.group("edp"), op)
