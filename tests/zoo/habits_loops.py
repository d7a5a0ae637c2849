"""Habits of loops: when gradients come, are thrown away, and what is trained."""

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from tests.zoo.habit_side import RATE, Net, Side, habits, loss_of, steps

HABITS, habit = habits()


@habit("loss.backward(); optimizer.step(); optimizer.zero_grad()")
def plain(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    steps(side, model, optimizer)
    return side.weights(optimizer, model)


@habit("optimizer.zero_grad() first in the loop")
def zero_first(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, side.x(step)).backward()
        optimizer.step()
    return side.weights(optimizer, model)


@habit("optimizer.zero_grad(set_to_none=True)")
def to_none(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(3):
        loss_of(model, side.x(step)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return side.weights(optimizer, model)


@habit("zero_grad(set_to_none=False), then a layer that is frozen: its zeros are a gradient, as in torch")
def to_zeros(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(4):
        model.layers[0].requires_grad_(step < 2)
        loss_of(model, side.x(step)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return side.weights(optimizer, model)


@habit("gradient accumulation over three backward calls")
def accumulation(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(6):
        (loss_of(model, side.x(step)) / 3).backward()
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return side.weights(optimizer, model)


@habit("two forwards, then two backwards")
def two_graphs(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(2):
        a, b = loss_of(model, side.x(step)), loss_of(model, side.x(step + 9))
        a.backward()
        b.backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(optimizer, model)


@habit("backward(retain_graph=True), then backward again")
def retained(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(2):
        loss = loss_of(model, side.x(step))
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(optimizer, model)


@habit("a backward after step() and before zero_grad(): FGSM, the gradient by the input of the next batch")
def fgsm(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(3):
        x = side.x(step).requires_grad_()
        loss_of(model, x).backward()
        optimizer.zero_grad()
        loss_of(model, (x + 0.1 * x.grad.sign()).detach()).backward()
        optimizer.step()
    return side.weights(optimizer, model)


@habit("a saliency map between step() and zero_grad()")
def saliency(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(3):
        loss_of(model, side.x(step)).backward()
        optimizer.step()
        x = side.x(step).requires_grad_()
        model(x).square().sum().backward()
        assert x.grad is not None
        optimizer.zero_grad()
    return side.weights(optimizer, model)


def gan(side: Side, freezes: bool) -> dict[str, Tensor]:
    generator, judge = side.net(seed=1), side.net(lambda: Net(1), seed=2)
    of_g, of_d = side.wrap(generator), side.wrap(judge)
    for step in range(3):
        z, real = side.x(step), side.x(step + 50)
        of_g.zero_grad()
        if freezes:
            judge.requires_grad_(False)
        (judge(generator(z)) - 1).square().mean().backward()
        of_g.step()
        judge.requires_grad_(True)
        of_d.zero_grad()
        ((judge(real) - 1).square().mean() + judge(generator(z).detach()).square().mean()).backward()
        of_d.step()
    found = {f"g.{name}": t for name, t in side.weights(of_g, generator).items()}
    return found | {f"d.{name}": t for name, t in side.weights(of_d, judge).items()}


@habit("a GAN in torch's usual order, two networks and two optimizers")
def usual_gan(side: Side) -> dict[str, Tensor]:
    return gan(side, freezes=False)


@habit("a GAN that sets requires_grad_(False) on the discriminator while the generator learns")
def freezing_gan(side: Side) -> dict[str, Tensor]:
    return gan(side, freezes=True)


@habit("a gradient penalty: autograd.grad(create_graph=True) in the loss")
def penalty(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(3):
        x = side.x(step).requires_grad_()
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        ((y - 1).square().mean() + slope.square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(optimizer, model)


@habit("a layer that is frozen after the wrap stays as it is")
def freeze(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(5):
        model.first.requires_grad_(step < 2)
        loss_of(model, side.x(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(optimizer, model)


@habit("gradual unfreezing of layers that were trainable when wrapped: each begins with its own count of updates")
def gradual(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(6):
        model.first.requires_grad_(step >= 4)
        model.layers[0].requires_grad_(step >= 2)
        loss_of(model, side.x(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(optimizer, model)


@habit(
    "a layer that was frozen when wrapped and is unfrozen later",
    "summed by nobody",
    "freeze after the wrap, or remove() and wrap again",
    outcome="refused",
)
def unfreeze(side: Side) -> dict[str, Tensor]:
    model = side.net()
    model.first.requires_grad_(False)
    optimizer = side.wrap(model)
    steps(side, model, optimizer, 1)
    model.first.requires_grad_(True)
    steps(side, model, optimizer, 1, 1)
    return side.weights(optimizer, model)


class LoRA(nn.Module):
    """A frozen layer and its low-rank change."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.full((2, base.in_features), 0.1, dtype=torch.float64))
        self.b = nn.Parameter(torch.full((base.out_features, 2), 0.2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


@habit("LoRA put in before the wrap")
def lora(side: Side) -> dict[str, Tensor]:
    model = side.net().requires_grad_(False)
    for layer in model.layers:
        layer.up = LoRA(layer.up)
    optimizer = side.wrap(model)
    steps(side, model, optimizer)
    return side.weights(optimizer, model)


@habit("LoRA put in after the wrap", "summed by nobody", "put it in first, then wrap", outcome="refused")
def late_lora(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    model.layers[0].up = LoRA(model.layers[0].up)
    steps(side, model, optimizer)
    return side.weights(optimizer, model)


@habit(
    "LoRA put in after the wrap of a frozen model, alone in torch's SGD",
    "summed by nobody",
    "put it in first, then wrap",
    outcome="refused",
)
def late_lora_alone(side: Side) -> dict[str, Tensor]:
    model = side.net()
    wrapped = side.wrap(model)
    model.requires_grad_(False)
    model.layers[0].up = adapter = LoRA(model.layers[0].up)
    optimizer = torch.optim.SGD([p for p in adapter.parameters() if p.requires_grad], lr=RATE)
    steps(side, model, optimizer)
    return side.weights(wrapped, model)


@habit("optimizer.step() without any backward")
def no_backward(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    optimizer.step()
    optimizer.zero_grad()
    steps(side, model, optimizer)
    return side.weights(optimizer, model)


@habit("optimizer.step() twice without zero_grad()", "call zero_grad", "zero_grad() after each", outcome="refused")
def twice(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    loss_of(model, side.x(0)).backward()
    optimizer.step()
    optimizer.step()
    return side.weights(optimizer, model)


class Unused(Net):
    """With a branch that nobody takes."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(6, 6)


@habit("parameters that no backward reaches (find_unused_parameters)")
def unused(side: Side) -> dict[str, Tensor]:
    model = side.net(Unused)
    optimizer = side.wrap(model)
    steps(side, model, optimizer)
    return side.weights(optimizer, model)


class Skips(Net):
    """Leaves a layer out, as LayerDrop does."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](self.first(x))
        return self.last(self.layers[1](x) if self.both else x)


@habit("a layer that is left out in every other step (LayerDrop, alike on all ranks)")
def layer_drop(side: Side) -> dict[str, Tensor]:
    model = side.net(Skips)
    optimizer = side.wrap(model)
    for step in range(4):
        model.both = step % 2 == 0
        steps(side, model, optimizer, 1, step)
    return side.weights(optimizer, model)


@habit(
    "p.grad.norm() after a backward inside of no_sync()",
    "read after a backward inside of no_sync, where DDP has this rank's own",
    "`torch.autograd.grad(loss, parameters)` is a rank's own",
    outcome="told",
)
def noise_scale(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(2):
        with optimizer.shard.no_sync() if side.ours else nullcontext():
            (loss_of(model, side.x(step)) / 2).backward()
        float(model.last.weight.grad.norm())
        (loss_of(model, side.x(step + 9)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(optimizer, model)


@habit("with no_sync() around all but the last backward")
def without_sync(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(2):
        with optimizer.shard.no_sync() if side.ours else nullcontext():
            (loss_of(model, side.x(step)) / 2).backward()
        (loss_of(model, side.x(step + 9)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(optimizer, model)
