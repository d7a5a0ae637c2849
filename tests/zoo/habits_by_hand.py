"""Habits of those who update, zero, clip or keep states by hand."""

from collections import defaultdict

import torch
from torch import Tensor, nn

from core.optimizer import clip_grad_norm_
from tests.zoo.habit_side import RATE, Side, habits, loss_of, steps

HABITS, habit = habits()


@habit("p.grad.detach_() and p.grad.zero_() after step, in the place of zero_grad()")
def zero_after(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(3):
        loss_of(model, side.x(step)).backward()
        optimizer.step()
        for p in model.parameters():
            p.grad.detach_()
            p.grad.zero_()
    return side.weights(optimizer, model)


@habit("p.grad.zero_() of one parameter after step, p.grad = None of the others")
def zero_some(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(3):
        loss_of(model, side.x(step)).backward()
        optimizer.step()
        for name, p in model.named_parameters():
            if name == "first.weight":
                p.grad.data.zero_()
            else:
                p.grad = None
    return side.weights(optimizer, model)


@habit("p.grad.zero_() between two backward calls: the first is forgotten")
def zero_between(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(3):
        loss_of(model, side.x(step + 8)).backward()
        for p in model.parameters():
            p.grad.zero_()
        loss_of(model, side.x(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(optimizer, model)


@habit("p.grad.zero_() with torch.optim.AdamW itself")
def torch_zero(side: Side) -> dict[str, Tensor]:
    model = side.net()
    wrapped = side.wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for step in range(3):
        loss_of(model, side.x(step)).backward()
        optimizer.step()
        for p in model.parameters():
            p.grad.zero_()
    return side.weights(wrapped, model)


@habit("core.optimizer.clip_grad_norm_ in the place of torch's")
def core_clip(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    clip, norms = clip_grad_norm_ if side.ours else nn.utils.clip_grad_norm_, []
    for step in range(3):
        loss_of(model, side.x(step)).backward()
        norms.append(clip(model.parameters(), 0.3, norm_type=(2.0, 1.0, float("inf"))[step]).double())
        optimizer.step()
        optimizer.zero_grad()
    return {"norms": torch.stack(norms)} | side.weights(optimizer, model)


@habit("optimizer.state[p]['step'] is read")
def state_step(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    steps(side, model, optimizer, 2)
    model.first.requires_grad_(False)
    steps(side, model, optimizer, 1, 2)
    updates = {name: 2.0 if name.startswith("first") else 3.0 for name, _ in model.named_parameters()}
    for name, p in model.named_parameters():
        if p in optimizer.state:  # of ours this rank's part
            assert float(optimizer.state[p]["step"]) == updates[name]
    return side.weights(optimizer, model)


@habit(
    "optimizer.state = defaultdict(dict): states anew",
    "optimizer.state = .* lie in buckets",
    "a new optimizer",
    outcome="refused",
)
def state_set(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    steps(side, model, optimizer, 2)
    optimizer.state = defaultdict(dict)
    return side.weights(optimizer, model)


@habit(
    "p.data kept from before DataParallel was made, and written to",
    "tensors that were taken before DataParallel was made",
    "take p.data after it",
    outcome="told",
)
def kept(side: Side) -> dict[str, Tensor]:
    model = side.net()
    data = [p.data for p in model.parameters()]
    optimizer = side.wrap(model)
    for _ in range(2):
        steps(side, model, optimizer, 1)
        for held, p in zip(data, model.parameters(), strict=True):
            (held if side.ours else held.clone()).mul_(0.9)  # what is told here is lost
            assert side.ours or held.data_ptr() == p.data_ptr()
    return side.weights(optimizer, model)


@habit(
    "a view of a weight kept from before DataParallel was made, and read after updates (a twin without gradients)",
    "keep the values of then",
    "take it after DataParallel is made",
    outcome="told",
)
def kept_read(side: Side) -> dict[str, Tensor]:
    model = side.net()
    held = next(model.parameters()).detach()
    if not side.ours:
        held = held.clone()  # as what is told here: it keeps the values of then
    optimizer = side.wrap(model)
    steps(side, model, optimizer, 2)
    return {"held": held.clone(), **side.weights(optimizer, model)}


@habit("a state_dict from before DataParallel was made, which is gone at the first update")
def kept_for_a_while(side: Side) -> dict[str, Tensor]:
    model = side.net()
    held = model.state_dict()
    first = {f"first.{name}": value.clone() for name, value in held.items()}
    optimizer = side.wrap(model)
    del held
    steps(side, model, optimizer, 2)
    return first | side.weights(optimizer, model)
