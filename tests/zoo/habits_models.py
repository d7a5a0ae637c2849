"""Habits of models: hooks, checkpointing, compilation, parametrizations, tied and sparse weights."""

from typing import Any

import torch
from torch import Tensor, nn

from core.data_parallel import DataParallel
from core.optimizer import OptimizerConfig, ShardedAdamW
from tests.states import state
from tests.zoo.habit_side import DECAY, RATE, TOLD3, Net, Side, habits, loss_of, steps

HABITS, habit = habits()


@habit("the user's hooks on tensors, parameters and modules")
def hooks(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    model.first.weight.register_hook(lambda gradient: gradient * 2)
    model.layers[0].register_forward_hook(lambda module, args, output: output * 1.5)
    model.layers[1].register_full_backward_hook(lambda module, into, outof: (into[0] * 0.5,))
    steps(side, model, optimizer)
    return side.weights(optimizer, model)


@habit("torch.utils.checkpoint in the model")
def checkpointed(side: Side) -> dict[str, Tensor]:
    from torch.utils.checkpoint import checkpoint

    class Again(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return self.last(x)

    model = side.net(Again)
    optimizer = side.wrap(model)
    steps(side, model, optimizer)
    return side.weights(optimizer, model)


@habit("torch.utils.checkpoint(use_reentrant=True)")
def reentrant(side: Side) -> dict[str, Tensor]:
    from torch.utils.checkpoint import checkpoint

    class Again(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=True)
            return self.last(x)

    model = side.net(Again)
    optimizer = side.wrap(model)
    steps(side, model, optimizer)
    return side.weights(optimizer, model)


@habit("torch.compile(model, backend='eager')")
def compiled(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    steps(side, torch.compile(model, backend="eager"), optimizer)
    torch._dynamo.reset()
    return side.weights(optimizer, model)


@habit("torch.func.functional_call with the model's own parameters", **TOLD3)
def functional(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(2):
        scaled = {name: p * 0.9 for name, p in model.named_parameters()}
        (torch.func.functional_call(model, scaled, (side.x(step),)) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(optimizer, model)


@habit("nn.utils.parametrizations.weight_norm put in before the wrap")
def parametrized(side: Side) -> dict[str, Tensor]:
    model = side.net()
    nn.utils.parametrizations.weight_norm(model.layers[0].up)
    optimizer = side.wrap(model)
    steps(side, model, optimizer)
    return side.weights(optimizer, model)


@habit("sparse embeddings")
def sparse(side: Side) -> dict[str, Tensor]:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(12, 6, sparse=side.ours), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.table(x))

    model = side.net(Words)
    optimizer = side.wrap(model)
    for step in range(3):
        ids = side.rows(torch.randint(12, (8, 3), generator=torch.Generator().manual_seed(step)))
        model(ids).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(optimizer, model)


@habit("tied weights")
def tied(side: Side) -> dict[str, Tensor]:
    model = side.net()
    model.last.weight = model.first.weight
    optimizer = side.wrap(model)
    steps(side, model, optimizer)
    return side.weights(optimizer, model)


@habit("eval(), no_grad and inference_mode between steps")
def evaluated(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer, seen = side.wrap(model), []
    for step in range(3):
        steps(side, model, optimizer, 1, step)
        model.eval()
        with torch.no_grad():
            seen.append(side.mean(loss_of(model, side.x(99))))
        with torch.inference_mode():
            loss_of(model, side.x(99))
        model.train()
    return side.weights(optimizer, model) | {"seen": torch.stack(seen)}


@habit("an exception in forward, then zero_grad() and on")
def exception(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(3):
        handle = model.layers[1].register_forward_hook(lambda *_: 1 / 0)
        try:
            loss_of(model, side.x(step))
        except ZeroDivisionError:
            optimizer.zero_grad()
        handle.remove()
        steps(side, model, optimizer, 1, step)
    return side.weights(optimizer, model)


@habit("a loss that is thrown away after its backward (NaN guards)")
def thrown_away(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(3):
        (loss_of(model, side.x(step)) * 9).backward()
        optimizer.zero_grad()
        steps(side, model, optimizer, 1, step)
    return side.weights(optimizer, model)


@habit("autograd.grad for the weights, which leaves .grad alone", **TOLD3)
def grads_asked_for(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(2):
        found = torch.autograd.grad(loss_of(model, side.x(step)), list(model.parameters()))
        with torch.no_grad():
            for p, gradient in zip(model.parameters(), found, strict=True):
                p.sub_(side.mean(gradient), alpha=0.1)
        steps(side, model, optimizer, 1, step)
    return side.weights(optimizer, model)


@habit("Hugging Face's gradient clipping by the optimizer's own clip_grad")
def clipped(side: Side) -> dict[str, Tensor]:
    model = side.net()
    if side.ours:
        shard = DataParallel(model, state(), zero_stage=side.zero, bucket_size=40)
        config = OptimizerConfig(lr=RATE, weight_decay=DECAY, clip_grad=0.3)
        optimizer: Any = ShardedAdamW(shard, config, decays=lambda name, layout: True)
    else:
        optimizer = side.wrap(model)
    for step in range(3):
        loss_of(model, side.x(step)).backward()
        if not side.ours:
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(optimizer, model)


@habit("remove() and wrap again")
def wrapped_again(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model, "sgd")
    steps(side, model, optimizer)
    side.weights(optimizer, model)
    optimizer = side.wrap(model)
    steps(side, model, optimizer)
    return side.weights(optimizer, model)


@habit("uneven layers: units of one parameter")
def many_units(side: Side) -> dict[str, Tensor]:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), *[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(5)])

    model = side.net(make)
    optimizer = side.wrap(model)
    steps(side, model, optimizer)
    return side.weights(optimizer, model)
