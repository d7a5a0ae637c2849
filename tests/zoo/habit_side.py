"""What loops do to a model, its weights, its gradients and its optimizer, under DataParallel and a sharded AdamW.

The same code runs for torch and for ours: `Side` is who trains. Two ranks take half of the rows each; one torch
process takes all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from core.data_parallel import DataParallel
from core.optimizer import OptimizerConfig, ShardedAdamW, ShardedSGD
from tests.states import state
from tests.zoo.case import TOLERANCE, Case, Pairs, worst

RATE, DECAY = 0.05, 0.1
READS = "read outside of its module's forward"


class Block(nn.Module):
    """A layer with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Blocks between what belongs to the root."""

    def __init__(self, out: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(6, out)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)

    def compute_loss(self, x: Tensor) -> Tensor:
        return (F.linear(torch.tanh(F.linear(x, self.first.weight)), self.last.weight) - 1).square().mean()


@dataclass
class Side:
    """Who trains: `ours` over this rank's rows, or torch alone over all of them."""

    ours: bool
    zero: int

    def net(self, make: Callable[[], nn.Module] = Net, seed: int = 3) -> nn.Module:
        torch.manual_seed(seed)
        return make().double()

    def wrap(self, model: nn.Module, kind: str = "adamw", **options: Any) -> Any:
        """An optimizer over a model; torch's own decays every parameter."""
        parameters = [p for p in model.parameters()]
        if not self.ours:
            if kind == "sgd":
                return torch.optim.SGD(parameters, lr=RATE, momentum=0.9, weight_decay=DECAY)
            return torch.optim.AdamW(parameters, lr=RATE, weight_decay=DECAY)
        shard = DataParallel(model, state(), zero_stage=self.zero, bucket_size=40, **options)
        config = OptimizerConfig(lr=RATE, weight_decay=DECAY, clip_grad=0.0, optimizer=kind)
        return (ShardedSGD if kind == "sgd" else ShardedAdamW)(shard, config, decays=lambda name, layout: True)

    def rows(self, x: Tensor) -> Tensor:
        """This rank's."""
        return x.chunk(dist.get_world_size())[dist.get_rank()] if self.ours else x

    def x(self, step: int, columns: int = 6) -> Tensor:
        return self.rows(torch.randn(8, columns, generator=torch.Generator().manual_seed(step)).double())

    def weights(self, optimizer: Any, model: nn.Module) -> dict[str, Tensor]:
        """Whole values of everything; the end of training."""
        if self.ours:
            optimizer.shard.remove()
        return {name: t.detach().clone() for name, t in model.state_dict().items()}

    def mean(self, value: Tensor) -> Tensor:
        """Over the ranks."""
        value = value.detach().clone()
        if self.ours:
            dist.all_reduce(value)
            value /= dist.get_world_size()
        return value


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - 1).square().mean()


def steps(side: Side, model: Any, optimizer: Any, count: int = 3, first: int = 0) -> None:
    """The plain loop."""
    for step in range(first, first + count):
        loss_of(model, side.x(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def habits() -> tuple[list[Case], Callable]:
    """A list of cases, and what adds one to it."""
    cases: list[Case] = []
    return cases, partial(habit, cases)


def habit(cases: list[Case], what: str, says: str = "", remedy: str = "", **elsewhere: Any) -> Callable:
    """Add a case: what a side computes, on both sides. elsewhere: z3=("told", ...) for one stage."""
    outcome = elsewhere.pop("outcome", "right")

    def added(run: Callable[[Side], dict[str, Tensor]]) -> Callable:
        def both(zero: int) -> Pairs:
            torch.manual_seed(0)
            got = run(Side(True, zero))
            torch.manual_seed(0)
            want = run(Side(False, zero))
            assert got.keys() == want.keys()
            pairs = {name: (got[name], want[name]) for name in got}
            assert worst(pairs)[0] <= TOLERANCE, f"wrong, told or not: {worst(pairs)}"
            return pairs

        places = {int(key[1:]): value for key, value in elsewhere.items()}
        cases.append(Case(what, both, outcome, says=says, remedy=remedy, elsewhere=places))
        return run

    return added


TOLD3 = {"z3": ("told", READS)}
