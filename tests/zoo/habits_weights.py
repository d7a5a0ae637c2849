"""Habits with weights: saved, loaded, copied, averaged, written, read elsewhere."""

import copy
import io

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.habit_side import TOLD3, Block, Net, Side, habits, loss_of, steps

HABITS, habit = habits()


@habit("model.state_dict() in the middle", **TOLD3)
def state_dict(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    steps(side, model, optimizer, 2)
    taken = {f"taken.{name}": t.clone() for name, t in model.state_dict().items()}
    steps(side, model, optimizer, 1, 2)
    return taken | side.weights(optimizer, model)


@habit("torch.save(model.state_dict()) and torch.load", **TOLD3)
def saved(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    steps(side, model, optimizer, 2)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return {f"file.{n}": t for n, t in torch.load(file).items()} | side.weights(optimizer, model)


@habit(
    "torch.save(model), the whole module",
    "cannot be pickled whole .*model.state_dict.., or core.dist_checkpointing.save",
    "model.state_dict(), core.dist_checkpointing.save",
    outcome="refused",
)
def save_whole(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    steps(side, model, optimizer, 1)
    torch.save(model, io.BytesIO())
    return side.weights(optimizer, model)


@habit("model.load_state_dict() after the wrap", **TOLD3)
def loaded(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    steps(side, model, optimizer, 2)
    model.load_state_dict(side.net(seed=8).state_dict())
    steps(side, model, optimizer, 2, 2)
    return side.weights(optimizer, model)


@habit(
    "model.load_state_dict(assign=True) after the wrap",
    "summed by nobody",
    "load without assign, or before the wrap",
    outcome="refused",
)
def assigned(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    model.load_state_dict(side.net(seed=8).state_dict(), assign=True)
    steps(side, model, optimizer)
    return side.weights(optimizer, model)


@habit("model.load_state_dict(), then optimizer.load_state_dict(): back to an earlier step", **TOLD3)
def back(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    steps(side, model, optimizer, 1)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    states = copy.deepcopy(optimizer.state_dict())
    steps(side, model, optimizer, 2, 1)
    model.load_state_dict(weights)
    optimizer.load_state_dict(states)
    steps(side, model, optimizer, 1, 3)
    return side.weights(optimizer, model)


@habit("optimizer.state_dict() and load_state_dict() into a new optimizer of the same run")
def optimizer_state(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    steps(side, model, optimizer, 2)
    held, values = copy.deepcopy(optimizer.state_dict()), side.weights(optimizer, model)
    model.load_state_dict(values)
    again = side.wrap(model)
    again.load_state_dict(held)
    steps(side, model, again, 2, 2)
    return side.weights(again, model)


@habit("EMA: a deep copy of the model, updated from its parameters", **TOLD3)
def ema(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    average = copy.deepcopy(model).requires_grad_(False)
    for step in range(3):
        steps(side, model, optimizer, 1, step)
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)
    found = {f"ema.{name}": t.clone() for name, t in average.state_dict().items()}
    return found | {"out": side.mean(average(side.x(0)).mean())} | side.weights(optimizer, model)


@habit("torch.optim.swa_utils.AveragedModel", **TOLD3)
def swa(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    average = torch.optim.swa_utils.AveragedModel(model)
    for step in range(3):
        steps(side, model, optimizer, 1, step)
        average.update_parameters(model)
    return {f"ema.{n}": t.clone() for n, t in average.state_dict().items()} | side.weights(optimizer, model)


@habit("weights written in place under no_grad (averaging, clipping, constraints)", **TOLD3)
def written(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(3):
        steps(side, model, optimizer, 1, step)
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.3, 0.3)
    return side.weights(optimizer, model)


@habit("p.data.mul_(...): weight decay by hand", **TOLD3)
def decay_by_hand(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(3):
        loss_of(model, side.x(step)).backward()
        for p in model.parameters():
            p.data.mul_(0.9)
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(optimizer, model)


@habit("p.data = new values", **TOLD3)
def replaced(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(3):
        steps(side, model, optimizer, 1, step)
        model.last.weight.data = model.last.weight.data * 0.5
        model.layers[1].up.bias.data = torch.ones(9, dtype=torch.float64)
    return side.weights(optimizer, model)


@habit("model.apply(init) after the wrap", **TOLD3)
def initialised(side: Side) -> dict[str, Tensor]:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.1)

    model = side.net()
    optimizer = side.wrap(model)
    model.apply(init)
    steps(side, model, optimizer)
    return side.weights(optimizer, model)


@habit("parameters_to_vector and vector_to_parameters", **TOLD3)
def as_vector(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(2):
        steps(side, model, optimizer, 1, step)
        vector = nn.utils.parameters_to_vector(model.parameters()).detach()
        nn.utils.vector_to_parameters(vector * 0.9, model.parameters())
    return side.weights(optimizer, model)


@habit("weight constraints in forward: self.weight.data.clamp_()")
def constrained(side: Side) -> dict[str, Tensor]:
    class Clamps(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.up.weight.data.clamp_(-0.2, 0.2)
            return super().forward(x)

    model = side.net()
    model.layers = nn.ModuleList(Clamps().double() for _ in range(2))
    optimizer = side.wrap(model)
    steps(side, model, optimizer)
    return side.weights(optimizer, model)


@habit("weight constraints in forward: self.weight.clamp_() under no_grad")
def constrained_in_place(side: Side) -> dict[str, Tensor]:
    class Clamps(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.up.weight.clamp_(-0.2, 0.2)
            return super().forward(x)

    model = side.net()
    model.layers = nn.ModuleList(Clamps().double() for _ in range(2))
    optimizer = side.wrap(model)
    steps(side, model, optimizer)
    return side.weights(optimizer, model)


@habit("an L2 penalty over model.parameters() in the loss", **TOLD3)
def regularised(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(3):
        (loss_of(model, side.x(step)) + sum(p.square().sum() for p in model.parameters()) * 0.01).backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(optimizer, model)


@habit("model.compute_loss(x): a method that is not forward and reads weights", **TOLD3)
def method(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(3):
        model.compute_loss(side.x(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(optimizer, model)


@habit("submodules called one by one", **TOLD3)
def submodules(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(3):
        x = model.layers[1](model.layers[0](model.first(side.x(step))))
        model.last(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(optimizer, model)


@habit("another layer's weight read in forward")
def borrowed(side: Side) -> dict[str, Tensor]:
    class Borrows(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + F.linear(x, self.first.weight)

    model = side.net(Borrows)
    optimizer = side.wrap(model)
    steps(side, model, optimizer)
    return side.weights(optimizer, model)


@habit("a layer that reads the weight of another one", **TOLD3)
def borrowed_from_a_layer(side: Side) -> dict[str, Tensor]:
    class Borrows(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + F.linear(x, self.layers[0].down.weight @ self.layers[0].up.weight)

    model = side.net(Borrows)
    optimizer = side.wrap(model)
    steps(side, model, optimizer)
    return side.weights(optimizer, model)
