"""Habits with a backward that comes after gradients were read or used, and before they are zeroed: torch adds up."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.data_parallel import DataParallel
from core.optimizer import clip_grad_norm_
from tests.states import state
from tests.zoo.habit_side import RATE, TOLD3, Net, Side, habits, loss_of
from tests.zoo.habits_optimizers import play_dcgan

HABITS, habit = habits()
SAME_ON_ALL = "the same on all ranks"


def torchs(model: nn.Module, kind: str = "adamw") -> torch.optim.Optimizer:
    make = torch.optim.SGD if kind == "sgd" else torch.optim.AdamW
    return make(model.parameters(), lr=RATE)


def made(side: Side, kind: str) -> tuple[nn.Module, Any, Any]:
    """A model, what ends its training, and an optimizer: a sharded one, or ("torch") torch's own on both sides."""
    model = side.net()
    wrapped = side.wrap(model, "sgd" if kind == "sgd" else "adamw")
    return model, wrapped, torchs(model) if kind == "torch" else wrapped


def kinds(what: str, **outcome: Any) -> Callable:
    """A habit with ShardedAdamW, ShardedSGD and an optimizer of torch's: `run(side, kind)`."""

    def added(run: Callable[[Side, str], dict[str, Tensor]]) -> Callable:
        for kind, name in (("adamw", "ShardedAdamW"), ("sgd", "ShardedSGD"), ("torch", "torch.optim.AdamW")):
            habit(f"{what}, with {name}", **outcome)(partial(run, kind=kind))
        return run

    return added


def between(side: Side, kind: str, act: Callable[[nn.Module, int], Iterable[Tensor] | None]) -> dict[str, Tensor]:
    """Three steps of three backward calls each, with an act after each of the first two."""
    model, wrapped, optimizer = made(side, kind)
    seen = [torch.zeros((), dtype=torch.float64)]
    for step in range(3):
        for number in range(3):
            loss_of(model, side.x(3 * step + number)).backward()
            if number < 2:
                seen.extend(value.detach().clone().double() for value in act(model, number) or ())
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(wrapped, model) | {"seen": torch.stack(seen)}


@kinds("a log of p.grad.norm() of every parameter between the backward calls of a step")
def logged(side: Side, kind: str) -> dict[str, Tensor]:
    return between(side, kind, lambda model, _: [p.grad.norm() for p in model.parameters()])


@kinds("gradients read and changed between the backward calls of a step")
def changed(side: Side, kind: str) -> dict[str, Tensor]:
    def act(model: Any, number: int) -> list[Tensor]:
        model.first.weight.grad[:2] = number
        model.last.bias.grad.mul_(0.3)
        model.layers[0].up.weight.grad.add_(torch.linspace(-1, 1, 6, dtype=torch.float64), alpha=0.1)
        model.layers[number].down.bias.grad.zero_()
        return [model.first.weight.grad.abs().sum(), model.layers[1].up.weight.grad.abs().sum()]

    return between(side, kind, act)


@kinds("p.grad = None, or a tensor of one's own, between the backward calls of a step")
def replaced(side: Side, kind: str) -> dict[str, Tensor]:
    def act(model: Any, number: int) -> list[Tensor]:
        norm = model.first.weight.grad.norm()
        model.first.weight.grad = None
        model.layers[number].up.bias.grad = None
        model.last.weight.grad = torch.full((6, 6), 0.2, dtype=torch.float64)
        return [norm]

    return between(side, kind, act)


@kinds("p.grad zeroed or set to None, unread, after a backward has added to what was read")
def forgotten(side: Side, kind: str) -> dict[str, Tensor]:
    def act(model: Any, number: int) -> list[Tensor]:
        if not number:
            return [model.first.weight.grad.norm()]
        model.first.weight.grad = None
        model.layers[0].up.weight.grad.zero_()
        return []

    return between(side, kind, act)


@kinds("torch.nn.utils.clip_grad_norm_ after each backward of a step")
def clipped(side: Side, kind: str) -> dict[str, Tensor]:
    return between(side, kind, lambda model, _: [nn.utils.clip_grad_norm_(model.parameters(), 0.3)])


@kinds("core.optimizer.clip_grad_norm_ after each backward of a step")
def clipped_by_ours(side: Side, kind: str) -> dict[str, Tensor]:
    clip = clip_grad_norm_ if side.ours else nn.utils.clip_grad_norm_
    return between(side, kind, lambda model, _: [clip(model.parameters(), 0.3)])


@kinds("FGM: a second backward at weights moved along the normed gradient of the first", **TOLD3)
def fgm(side: Side, kind: str) -> dict[str, Tensor]:
    model, wrapped, optimizer = made(side, kind)
    for step in range(3):
        x = side.x(step)
        loss_of(model, x).backward()
        weight = model.first.weight
        before, norm = weight.data.clone(), torch.norm(weight.grad)
        if norm != 0:
            weight.data.add_(0.5 * weight.grad / norm)
        loss_of(model, x).backward()
        weight.data = before
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(wrapped, model)


class Half(Net):
    """With a branch that only some losses reach."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(6, 6)

    def forward(self, x: Tensor, to_branch: bool = False) -> Tensor:
        return self.branch(x) if to_branch else super().forward(x)


@kinds("p.grad read between two losses of a step that reach different parameters")
def other_parameters(side: Side, kind: str) -> dict[str, Tensor]:
    model = side.net(Half)
    wrapped = side.wrap(model, "sgd" if kind == "sgd" else "adamw")
    optimizer = torchs(model) if kind == "torch" else wrapped
    norms = []
    for step in range(3):
        loss_of(model, side.x(step)).backward()
        norms.append(model.first.weight.grad.norm().clone())
        model(side.x(step + 5), to_branch=True).square().mean().backward()
        norms.append(model.branch.weight.grad.norm().clone())
        optimizer.step()
        optimizer.zero_grad(set_to_none=step != 1)
    return side.weights(wrapped, model) | {"norms": torch.stack(norms)}


def in_turn(side: Side, set_to_none: bool) -> dict[str, Tensor]:
    model = side.net()
    wrapped = side.wrap(model)
    slow, fast = torchs(model.first, "sgd"), torch.optim.AdamW([*model.layers.parameters(), *model.last.parameters()])
    for step in range(6):
        loss_of(model, side.x(step)).backward()
        fast.step()
        fast.zero_grad(set_to_none)
        if step % 3 == 2:
            slow.step()
            slow.zero_grad(set_to_none)
    return side.weights(wrapped, model)


@habit("two of torch's optimizers over one model, one stepped and zeroed every third step only")
def two_optimizers(side: Side) -> dict[str, Tensor]:
    return in_turn(side, set_to_none=True)


@habit("two of torch's optimizers over one model, one every third step only, zero_grad(set_to_none=False)")
def two_optimizers_zeros(side: Side) -> dict[str, Tensor]:
    return in_turn(side, set_to_none=False)


@habit("DCGAN's loop with one DataParallel around both networks and two of torch's optimizers", **TOLD3)
def dcgan_in_one(side: Side) -> dict[str, Tensor]:
    generator, judge = side.net(seed=1), side.net(lambda: Net(1), seed=2)
    both = nn.ModuleDict({"g": generator, "d": judge})
    shard = DataParallel(both, state(), zero_stage=side.zero, bucket_size=40) if side.ours else None
    of_g, of_d = torchs(generator), torchs(judge)
    play_dcgan(side, generator, judge, of_g, of_d)
    if shard is not None:
        shard.remove()
    return {name: t.detach().clone() for name, t in both.state_dict().items()}


@habit("torch.optim.SGD: steps and backward calls in turn, gradients zeroed every second time")
def zeroed_every_second(side: Side) -> dict[str, Tensor]:
    model = side.net()
    wrapped = side.wrap(model)
    optimizer = torchs(model, "sgd")
    for step in range(6):
        loss_of(model, side.x(step)).backward()
        optimizer.step()
        if step % 2:
            optimizer.zero_grad()
    return side.weights(wrapped, model)


@kinds("p.grad = tensors of one's own for all parameters after a step, then a backward")
def replaced_all(side: Side, kind: str) -> dict[str, Tensor]:
    model, wrapped, optimizer = made(side, kind)
    for step in range(3):
        loss_of(model, side.x(step)).backward()
        optimizer.step()
        for p in model.parameters():
            p.grad = torch.full(tuple(p.shape), 0.01, dtype=torch.float64)
    return side.weights(wrapped, model)


def changed_on_one(side: Side, act: Callable[[nn.Module], Any]) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    loss_of(model, side.x(0)).backward()
    model.first.weight.grad.norm()
    if dist.get_rank() == 0:
        act(model)
    loss_of(model, side.x(1)).backward()
    optimizer.step()
    return side.weights(optimizer, model)


def drop(model: Any) -> None:
    model.first.weight.grad = None


@habit("p.grad = None on one rank between two backward calls", "has put other values", SAME_ON_ALL, outcome="refused")
def dropped_on_one(side: Side) -> dict[str, Tensor]:
    return changed_on_one(side, drop)


@habit("p.grad *= 2 on one rank between two backward calls", "has put other values", SAME_ON_ALL, outcome="refused")
def scaled_on_one(side: Side) -> dict[str, Tensor]:
    return changed_on_one(side, lambda model: model.first.weight.grad.mul_(2))


@habit(
    "a.grad = b.grad between two backward calls",
    "while p.grad of one parameter is another's",
    "a.grad = b.grad.clone()",
    outcome="refused",
)
def borrowed(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    loss_of(model, side.x(0)).backward()
    model.first.weight.grad.norm()
    model.layers[0].up.weight.grad = model.layers[1].up.weight.grad
    loss_of(model, side.x(1)).backward()
    optimizer.step()
    return side.weights(optimizer, model)
