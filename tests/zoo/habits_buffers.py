"""Habits with buffers, compared with DDP over the same ranks."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.zoo.habit_side import DECAY, RATE, Side, habits, loss_of

HABITS, habit = habits()


class Codebook(nn.Module):
    """Reads and writes a buffer in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("table", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x) + self.mean * self.table
        if self.training:
            self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return y


class Normalizer(nn.Module):
    """`observe`, which a program calls before each forward, writes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("late", torch.zeros(6))

    def observe(self, x: Tensor) -> None:
        self.mean.lerp_(x.mean(0), 0.3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lin(x - self.mean) + self.late
        if self.training:
            self.late.copy_(y.detach().mean(0))
        return y


def as_ddp(side: Side, make: Callable[[], nn.Module], accumulate: int = 1) -> dict[str, Tensor]:
    """The reference of buffers is DDP over the same two ranks."""
    model = side.net(make)
    rows = Side(True, side.zero)
    if side.ours:
        optimizer, called = side.wrap(model, "sgd"), model
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=DECAY)
        called = nn.parallel.DistributedDataParallel(model)
    for step in range(4):
        for part in range(accumulate):
            x = rows.x(10 * step + part)
            if isinstance(model, Normalizer):
                model.observe(x)
            loss_of(called, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    if side.ours:
        found = side.weights(optimizer, model)
    else:
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)  # DDP does before its next forward
        found = {name: t.detach().clone() for name, t in model.state_dict().items()}
    model.eval()
    return found | {"evaluated": model(torch.ones(1, 6).double()).detach()}


@habit("BatchNorm: every rank evaluates the first rank's statistics (compared with DDP)")
def batch_norm(side: Side) -> dict[str, Tensor]:
    return as_ddp(side, lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)))


@habit("a buffer that forward reads and writes (compared with DDP)")
def codebook(side: Side) -> dict[str, Tensor]:
    return as_ddp(side, Codebook)


@habit("a buffer that forward reads and writes, two backward calls per step (compared with DDP)")
def accumulated_codebook(side: Side) -> dict[str, Tensor]:
    return as_ddp(side, Codebook, 2)


@habit("a buffer that a method writes before each forward, another that forward writes (compared with DDP)")
def observed(side: Side) -> dict[str, Tensor]:
    return as_ddp(side, Normalizer)
