"""A model that tensor ranks share beside the same one in a single process, and the loops that both run."""

import torch

from core.parallel_state import ParallelState
from tests.models.gpt import batch, gpt
from tests.parity.whole import whole_gradients, whole_parameters
from tests.states import state
from tests.zoo.case import compared

STEPS = 3
LAYOUTS = {"1 rank": (1, False), "2 ranks": (2, False), "2 ranks, sequence parallel": (2, True)}
LR = 0.05


def shared(variation):
    tp, sp = LAYOUTS[variation]
    return state(tp=tp, sp=sp)


def loss_of(model, seed=0):
    tokens, labels = batch(seed)
    return model(tokens, labels=labels).sum() / 14


def sgd(model, lr=LR):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)


def train(model, optimizer=None, steps=STEPS, between=lambda: None, zero=None, called=None):
    """The loop that everybody writes."""
    optimizer = optimizer or sgd(model)
    for step in range(steps):
        loss_of(model if called is None else called, step).backward()
        between()
        optimizer.step()
        (zero or optimizer.zero_grad)()


def models(variation, style="gpt2", **more):
    """(split over the ranks, whole in this process) with the same weights."""
    for ps in (shared(variation), ParallelState.single("cpu")):
        yield gpt(style, parallel=ps, **more)


def weights(program, **more):
    """A case whose program ends with the same weights, split or not."""

    def run(variation):
        found = []
        for model in models(variation, **more):
            model = program(model) or model
            found.append(whole_parameters(model, model.parallel))
        return compared(*found)

    return run


def results(program, **more):
    """A case whose program returns name -> tensor, the same on every rank, split or not."""

    def run(variation):
        return compared(*[program(model) for model in models(variation, **more)])

    return run


def gradients(program, **more):
    """A case whose program leaves the same gradients."""

    def run(variation):
        found = []
        for model in models(variation, **more):
            program(model)
            found.append(whole_gradients(model, model.parallel))
        return compared(*found)

    return run


def two_losses(model):
    (loss_of(model, 0) - loss_of(model, 1)).backward()


ONE, TWO, SEQUENCE = LAYOUTS
SPLIT = (TWO, SEQUENCE)


def only_split(outcome, says):
    """Right on one rank, otherwise where ranks share the model."""
    return {variation: (outcome, says) for variation in SPLIT}


CLIP = "core.optimizer.clip_grad_norm_"
