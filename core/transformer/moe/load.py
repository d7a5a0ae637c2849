"""How many rows each expert gets in a step: counted on the host as tokens are sent, summed once a step.

What balances experts over a global batch is a function of these counts: a bias that chooses (arXiv 2408.15664) and
the auxiliary loss of the batch before (arXiv 2501.11873).
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from core.parallel_state import ParallelState
from core.parallel_state.collectives import all_reduce
from core.transformer.spec import Build


@dataclass(frozen=True)
class ExpertLoad:
    """How evenly a step used the experts of one layer: rows of the busiest and of the idlest one over their mean.

    received: the most rows of a microbatch that went to the experts of one rank.
    """

    layer: int
    busiest: float
    idlest: float
    received: int


class Load:
    """Of one layer, since the step began: rows of this rank's tokens by expert, and the most that it received.

    remembers: whether the counts of a step are used after it. A forward that runs again is counted once, for routing
    is noted.
    """

    def __init__(self, experts: int, *, remembers: bool) -> None:
        self._rows, self._remembers = [0] * experts, remembers
        self.most_received = 0  # rows of a microbatch that went to this rank's experts
        self._version: int | None = None  # of the router's weight, when counting began
        self._told = False

    def add(self, rows: Sequence[int], received: int, weight: Tensor) -> None:
        """A microbatch: rows of its tokens by expert, rows received for the experts here."""
        self._rows = [a + b for a, b in zip(self._rows, rows, strict=True)]
        self.most_received = max(self.most_received, received)
        if self._version is None:
            self._version = weight._version
        elif self._remembers and self._version != weight._version and not self._told:
            self._told = True
            warnings.warn(
                "the weights of a model with moe_router_enable_expert_bias or global_aux_loss were updated, and its "
                "step did not end: experts stay unbalanced. Call model.end_step() after each optimizer.step(), on "
                "all ranks, or train with SingleStage or Pipeline, which do",
                stacklevel=2,
            )

    def take(self) -> list[int]:
        """The rows by expert; counting begins again."""
        rows, self._rows = self._rows, [0] * len(self._rows)
        self._version = None
        return rows


class Counted(Protocol):
    """A router whose rows are counted."""

    layer: int
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
        self.rows: Tensor | None = None  # int64 [layers, E] of the last step, all ranks' tokens

    @classmethod
    def of(cls, build: Build) -> "Loads":
        """Those of the model that is being built."""
        for listener in build.stage.listeners:
            if isinstance(listener, cls):
                return listener
        loads = cls(build.parallel)
        build.stage.listeners.append(loads)
        return loads

    def begin_step(self) -> None:
        """Forget what was counted outside of a step."""
        for router in self.routers:
            router.load.take()
            router.load.most_received = 0

    @torch.no_grad()
    def of_layers(self) -> list[ExpertLoad]:
        """Of the last step, on every rank with these layers. All-reduce over ep and edp; waits for the device."""
        if self.rows is None:
            return []
        received = torch.tensor([router.load.most_received for router in self.routers], device=self.rows.device)
        for group in (self._ps.group("ep"), self._ps.group("edp")):
            received = all_reduce(received, group, "max")
        found = []
        for router, rows, most in zip(self.routers, self.rows.tolist(), received.tolist(), strict=True):
            mean = sum(rows) / len(rows) or 1.0
            found.append(ExpertLoad(router.layer, max(rows) / mean, min(rows) / mean, most))
        return found

    @torch.no_grad()
    def end_step(self) -> None:
        """Sum the rows of the step and hand them to the routers. One all-reduce over ep, one over edp."""
        rows = torch.tensor([router.load.take() for router in self.routers], device=self.routers[0].weight.device)
        self.rows = all_reduce(all_reduce(rows, self._ps.group("ep")), self._ps.group("edp"))
        for router, rows_of_layer in zip(self.routers, self.rows, strict=True):
            router.end_step(rows_of_layer)
