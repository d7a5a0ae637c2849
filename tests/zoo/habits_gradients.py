"""Habits with `p.grad`: clipped, scaled, read, written, dropped, zeroed, used by torch's own tools."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.zoo.habit_side import RATE, Side, habits, loss_of

HABITS, habit = habits()


@habit("torch.nn.utils.clip_grad_norm_ on a wrapped model")
def clip_norm(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer, norms = side.wrap(model), []
    for step in range(3):
        loss_of(model, side.x(step)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.3).clone())
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(optimizer, model) | {"norms": torch.stack(norms)}


@habit("torch.nn.utils.clip_grad_value_")
def clip_value(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(3):
        (loss_of(model, side.x(step)) / 2).backward()
        (loss_of(model, side.x(step + 9)) / 2).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.02)
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(optimizer, model)


@habit("p.grad read, scaled and written in part: logging, freezing rows of an embedding")
def touched(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer, seen = side.wrap(model), []
    for step in range(3):
        loss_of(model, side.x(step)).backward()
        seen.append(torch.stack([p.grad.norm() for p in model.parameters()]).clone())
        seen.append(torch.stack([p.grad.abs().mean() for p in model.parameters()]).clone())
        model.first.weight.grad[:2] = 0
        model.last.weight.grad *= 3
        model.last.bias.grad.data.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(optimizer, model) | {"seen": torch.cat(seen)}


@habit("p.grad = None before step(): that parameter stays as it is")
def dropped(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(3):
        loss_of(model, side.x(step)).backward()
        if step:
            model.first.weight.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(optimizer, model)


@habit("p.grad = a tensor of one's own")
def assigned_gradient(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(3):
        loss_of(model, side.x(step)).backward()
        model.first.weight.grad = torch.full((6, 6), 0.3, dtype=torch.float64)
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(optimizer, model)


@habit("a.grad, b.grad = b.grad, a.grad: gradients of two parameters exchanged, or one given to another")
def exchanged(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    one, two = model.layers[0], model.layers[1]
    for step in range(3):
        loss_of(model, side.x(step)).backward()
        one.up.weight.grad, two.up.weight.grad = two.up.weight.grad, one.up.weight.grad
        one.up.bias.grad = two.up.bias.grad
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(optimizer, model)


@habit("model.zero_grad(), or p.grad = None for every parameter, in the place of optimizer.zero_grad()")
def zeroed_elsewhere(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(4):
        if step % 2:
            model.zero_grad()
        else:
            for p in model.parameters():
                p.grad = None
        (loss_of(model, side.x(step)) / 2).backward()
        (loss_of(model, side.x(step + 9)) / 2).backward()
        optimizer.step()
    return side.weights(optimizer, model)


@habit("model.zero_grad() between two backward calls: the first is forgotten")
def forgotten(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(3):
        loss_of(model, side.x(step + 20)).backward()
        model.zero_grad()
        loss_of(model, side.x(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(optimizer, model)


@habit("torch.amp.GradScaler: scale, unscale_, clip, step, update")
def scaler(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer, amp = side.wrap(model), torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    for step in range(4):
        amp.scale(loss_of(model, side.x(step)) * (float("inf") if step == 1 else 1.0)).backward()
        amp.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        amp.step(optimizer)
        amp.update()
        optimizer.zero_grad()
    return side.weights(optimizer, model) | {"scale": torch.tensor(amp.get_scale())}


@habit("torch.amp.GradScaler: scale, step, update")
def short_scaler(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer, amp = side.wrap(model), torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for step in range(3):
        amp.scale(loss_of(model, side.x(step))).backward()
        amp.step(optimizer)
        amp.update()
        optimizer.zero_grad()
    return side.weights(optimizer, model)


@habit("torch.optim.AdamW itself on a wrapped model")
def torchs_optimizer(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    torchs = torch.optim.AdamW(model.parameters(), lr=RATE)
    for step in range(3):
        loss_of(model, side.x(step)).backward()
        torchs.step()
        torchs.zero_grad()
    return side.weights(optimizer, model)


@habit("a gradient read after step()", "read it between backward and step", "read it before", outcome="refused")
def read_late(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    loss_of(model, side.x(0)).backward()
    optimizer.step()
    return {"norm": model.first.weight.grad.norm()} | side.weights(optimizer, model)


SAME_ON_ALL = "one seed on all ranks; `parameter.register_hook` before the sum"


@habit(
    "noise of a generator of each rank's own, added to p.grad", "has put other values", SAME_ON_ALL, outcome="refused"
)
def noise_of_each_rank(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(3):
        loss_of(model, side.x(step)).backward()
        for p in model.parameters():
            p.grad.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype), alpha=1e-3)
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(optimizer, model)


@habit("noise of one seed on all ranks, added to p.grad")
def noise_of_one_seed(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    generator = torch.Generator().manual_seed(5)
    for step in range(3):
        loss_of(model, side.x(step)).backward()
        for p in model.parameters():
            p.grad.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype), alpha=1e-3)
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(optimizer, model)


@habit("p.grad scaled by a rank's own loss", "changed it by other numbers", SAME_ON_ALL, outcome="refused")
def scaled_by_own_loss(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(3):
        loss = loss_of(model, side.x(step))
        loss.backward()
        for p in model.parameters():
            p.grad.mul_(1 / (1 + loss.item()))
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(optimizer, model)


@habit("p.grad = None on one rank only", "has put other values", SAME_ON_ALL, outcome="refused")
def dropped_on_one_rank(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    loss_of(model, side.x(0)).backward()
    if side.ours:
        optimizer.shard.finish()
    if dist.get_rank() == 0:
        model.layers[0].up.weight.grad = None
    optimizer.step()
    return side.weights(optimizer, model)
