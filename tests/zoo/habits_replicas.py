"""Habits by which replicas drift apart: numbers of one rank's own, updates by hand, a read on one rank."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.zoo.habit_side import RATE, READS, TOLD3, Side, habits, loss_of, steps

HABITS, habit = habits()
WEIGHTS, MEAN = "the weights of rank 1 are not those of rank 0", "`all_reduce` over the data group; or backward()"
EVERYWHERE = "read on every rank, print on one"


def one_rank(side: Side) -> bool:
    return dist.get_rank() == 0 and side.ours


@habit(
    "torch.optim.AdamW with ReduceLROnPlateau and a rank's own loss",
    "options in param_groups .* of rank 1 are not those of rank 0",
    "the loss of all ranks",
    outcome="refused",
)
def own_rate(side: Side) -> dict[str, Tensor]:
    model = side.net()
    wrapped = side.wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for step in range(4):
        steps(side, model, optimizer, 1, step)
        scheduler.step(step if side.ours and dist.get_rank() else -step)
    return side.weights(wrapped, model)


@habit(
    "a head beside the model, in the same torch.optim.AdamW",
    "2 that lie in no DataParallel",
    "a DataParallel of both; DDP around it; its gradient averaged by hand",
    outcome="refused",
)
def head_outside(side: Side) -> dict[str, Tensor]:
    model, head = side.net(), side.net(lambda: nn.Linear(6, 1))
    wrapped = side.wrap(model)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=RATE)
    for step in range(3):
        head(model(side.x(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(wrapped, model)


def by_inputs(side: Side, make: Callable[[], nn.Module]) -> dict[str, Tensor]:
    """The rows that a rank's own inputs name are written in forward, of a layer or beside the layers."""
    model = side.net()
    model.layers = nn.ModuleList(make().double() for _ in range(2))
    model.first = make().double()
    optimizer = side.wrap(model)
    steps(side, model, optimizer)
    return side.weights(optimizer, model)


class Renormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 6, max_norm=0.7)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table((x[..., 0].abs() * 7).long() % 20)


habit(
    "nn.Embedding(max_norm=): each rank's forward renorms the rows that it reads",
    WEIGHTS,
    "the rows of all ranks: with torch.no_grad(): a renorm of the whole table after the step",
    outcome="refused",
)(partial(by_inputs, make=Renormed))


def add_(p: Tensor, g: Tensor) -> None:
    with torch.no_grad():
        p.add_(g, alpha=-RATE)


def data_(p: Tensor, g: Tensor) -> None:
    p.data -= RATE * g


def new_data(p: Tensor, g: Tensor) -> None:
    p.data = p.data - RATE * g


def by_autograd(side: Side, update: Callable[[Tensor, Tensor], None], mean: bool) -> dict[str, Tensor]:
    model = side.net()
    wrapped = side.wrap(model)
    for step in range(3):
        found = torch.autograd.grad(loss_of(model, side.x(step)), list(model.parameters()))
        for p, g in zip(model.parameters(), found, strict=True):
            update(p, side.mean(g) if mean else g)
    return side.weights(wrapped, model)


for _what, _update in (("p.add_(g)", add_), ("p.data -= g", data_), ("p.data = p.data - g", new_data)):
    habit(f"g = torch.autograd.grad(loss, p) of this rank, then {_what}", WEIGHTS, MEAN, outcome="refused")(
        lambda side, update=_update: by_autograd(side, update, mean=False)
    )
    habit(f"g = torch.autograd.grad(loss, p), averaged over the ranks, then {_what}", **TOLD3)(
        lambda side, update=_update: by_autograd(side, update, mean=True)
    )


@habit(
    "torch.func.grad of this rank, then p.sub_(g)",
    WEIGHTS,
    MEAN,
    outcome="refused",
    z3=("refused", "inside of a transform of torch.func"),
)
def functional(side: Side) -> dict[str, Tensor]:
    model = side.net()
    wrapped = side.wrap(model)

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return (torch.func.functional_call(model, weights, (x,)) - 1).square().mean()

    for step in range(3):
        found = torch.func.grad(loss)({n: p.detach().clone() for n, p in model.named_parameters()}, side.x(step))
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.sub_(RATE * found[name])
    return side.weights(wrapped, model)


def put_in(side: Side, mean: bool, sharded: bool) -> dict[str, Tensor]:
    model = side.net()
    wrapped = side.wrap(model)
    optimizer = wrapped if sharded else torch.optim.AdamW(model.parameters(), lr=RATE)
    for step in range(3):
        found = torch.autograd.grad(loss_of(model, side.x(step)), list(model.parameters()))
        for p, g in zip(model.parameters(), found, strict=True):
            p.grad = side.mean(g) if mean else g
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(wrapped, model)


PUT = "has put other values into p.grad"
habit("torch.optim.AdamW, p.grad = torch.autograd.grad of this rank", PUT, MEAN, outcome="refused")(
    lambda side: put_in(side, mean=False, sharded=False)
)
habit("p.grad = torch.autograd.grad of this rank", PUT, MEAN, outcome="refused")(
    lambda side: put_in(side, mean=False, sharded=True)
)
habit("torch.optim.AdamW, p.grad = torch.autograd.grad, averaged over the ranks", **TOLD3)(
    lambda side: put_in(side, mean=True, sharded=False)
)
habit("p.grad = torch.autograd.grad, averaged over the ranks", **TOLD3)(
    lambda side: put_in(side, mean=True, sharded=True)
)


@habit(
    "load_state_dict on one rank only",
    WEIGHTS,
    "load on every rank",
    outcome="refused",
)
def one_loads(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    steps(side, model, optimizer, 1)
    # ZeRO-3: a read of freed weights that one rank alone does not come to waits for the timeout
    for p, new in zip(model.parameters(), side.net(seed=8).parameters(), strict=True):
        values = p.detach() if side.zero == 3 else p
        with torch.no_grad():
            if dist.get_rank() == 0 or not side.ours:
                p.copy_(new)
            elif side.zero == 3:
                p.copy_(values)
    steps(side, model, optimizer, 2)
    return side.weights(optimizer, model)


@habit("weights swapped for an average, and back, on one rank", z3=("told", READS))
def one_swaps(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(4):
        steps(side, model, optimizer, 1, step)
        for p in model.parameters():
            if one_rank(side) or side.zero == 3:
                held = p.detach().clone()
                with torch.no_grad():
                    p.mul_(0.5)
                    p.copy_(held)
    return side.weights(optimizer, model)


@habit("nn.init after the wrap, from a seed of each rank's own", WEIGHTS, "one seed on all ranks", outcome="refused")
def own_init(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    torch.manual_seed(dist.get_rank() if side.ours else 0)
    for p in model.parameters():
        nn.init.normal_(p)
    steps(side, model, optimizer, 2)
    return side.weights(optimizer, model)


@habit(
    "noise of a generator of each rank's own, added to p.data", WEIGHTS, "one seed on all ranks", outcome="refused"
)
def own_noise(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    torch.manual_seed(dist.get_rank() if side.ours else 0)
    for step in range(3):
        steps(side, model, optimizer, 1, step)
        for p in model.parameters():
            p.data.add_(torch.randn(p.shape, dtype=p.dtype), alpha=0.01)
    return side.weights(optimizer, model)


def read_on_one(side: Side, read: Callable[[nn.Module], Any], sharded: bool = True) -> dict[str, Tensor]:
    model = side.net()
    wrapped = side.wrap(model)
    optimizer = wrapped if sharded else torch.optim.AdamW(model.parameters(), lr=RATE)
    for step in range(3):
        loss_of(model, side.x(step)).backward()
        if step:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if dist.get_rank() == 0:
            read(model)
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(wrapped, model)


_ASKED = r"p.grad is asked for by .*not so on every rank"
_AT_0 = {"z0": ("right", "")}  # every rank holds all of a gradient
for _what, _read in (
    ("print(p.grad.norm())", lambda model: float(model.first.weight.grad.norm())),
    ("print(p.grad.tolist())", lambda model: model.first.weight.grad.tolist()),
    ("torch.isnan(p.grad).any()", lambda model: bool(model.last.bias.grad.isnan().any())),
    ("the norm of every p.grad", lambda model: [float(p.grad.norm()) for p in model.parameters()]),
):
    habit(f"if rank == 0: {_what}", _ASKED, EVERYWHERE, outcome="refused", **_AT_0)(
        lambda side, read=_read: read_on_one(side, read)
    )
habit(
    "if rank == 0: print(p.grad.norm()), with torch.optim.AdamW",
    _ASKED,
    EVERYWHERE,
    outcome="refused",
    z0=("right", ""),
)(lambda side: read_on_one(side, lambda model: float(model.first.weight.grad.norm()), sharded=False))
habit("if rank == 0: p.grad.zero_()", PUT, "on every rank", outcome="refused")(
    lambda side: read_on_one(side, lambda model: model.last.bias.grad.zero_() if side.ours else None)
)


class Branch(nn.Module):
    """A layer that only one rank's rows go through."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.some = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        head, tail = x[:4], x[4:]  # one process: what rank 0 has, what rank 1 has
        if len(x) == 4:
            return self.all(self.some(x) if dist.get_rank() == 0 else x)
        return self.all(torch.cat([self.some(head), tail]))


@habit("torch.optim.AdamW, and a layer that only one rank's rows go through")
def branch(side: Side) -> dict[str, Tensor]:
    model = side.net(Branch)
    wrapped = side.wrap(model)
    steps(side, model, torch.optim.AdamW(model.parameters(), lr=RATE))
    return side.weights(wrapped, model)
