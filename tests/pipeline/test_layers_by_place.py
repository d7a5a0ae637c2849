"""Layers that a program takes by their place in one rank's stages, found by what it leaves: hooks, initial values,
shared weights."""

import math

import pytest
import torch
from torch import nn

from core.pipeline.run.checks.layers_by_place import _hooked
from tests.models.gpt import gpt
from tests.pipeline.test_stage_traces import train
from tests.states import state

H, LAYERS = 48, 4


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, H), nn.Linear(H, 4)

    def forward(self, x):
        return x + self.down(self.up(x).tanh())


def stage(ps):
    torch.manual_seed(ps.index("pp"))
    return nn.Sequential(*[Layer() for _ in range(LAYERS)])


def shifted(module, args, output):
    return output * 1.01


def hooks_on(layers):
    for layer in layers:
        layer.down.register_forward_hook(shifted)


def deviations(layers, deviation):
    for number, layer in enumerate(layers):
        nn.init.normal_(layer.down.weight, std=deviation(number))


def one_matrix(layers):
    for layer in layers[1:]:
        layer.up = layers[0].up


# what a program does with this stage's layers, and how many there are before
HABITS = {
    "hooks on the first": (True, lambda x, before: hooks_on(x[:1])),
    "hooks on the last half": (True, lambda x, before: hooks_on(x[LAYERS // 2 :])),
    "hooks on all": (False, lambda x, before: hooks_on(x)),
    "hooks on every second": (False, lambda x, before: hooks_on(x[::2])),
    "hooks on the model's first": (False, lambda x, before: hooks_on(x[: 1 if before == 0 else 0])),
    "hooks on layers of each": (False, lambda x, before: hooks_on(x[:2] if before else x[1:])),
    "values by depth in the stage": (True, lambda x, before: deviations(x, lambda n: 0.2 / math.sqrt(2 * n + 2))),
    "values by depth": (False, lambda x, before: deviations(x, lambda n: 0.2 / math.sqrt(2 * (n + before) + 2))),
    "values that halve": (False, lambda x, before: deviations(x, lambda n: 0.2 * 0.5 ** (n + before))),
    "values as they are": (False, lambda x, before: None),
    "one matrix in a stage": (True, lambda x, before: one_matrix(x)),
    "one in each two layers": (False, lambda x, before: [one_matrix(x[i : i + 2]) for i in (0, 2)]),
}


def by_habit(name):
    ps = state(pp=2)
    module = stage(ps)
    with torch.no_grad():
        HABITS[name][1](list(module), LAYERS * ps.index("pp"))
    return [x for x in train(module, ps) if "a model has this once" in x]


@pytest.mark.parametrize("name", HABITS)
def test_what_begins_again_on_each_stage(ranks, name):
    for messages in ranks(by_habit, name, world=2):
        assert len(messages) == HABITS[name][0]


def of_replicas():
    """The first stage alone, of two replicas."""
    ps = state(pp=2)
    module = stage(ps)
    if ps.index("pp") == 0:
        hooks_on([module[0]])
        one_matrix(list(module))
        deviations(list(module), lambda n: 0.2 / (n + 1))
    return [x for x in train(module, ps) if "a model has this once" in x]


def test_two_replicas_are_one_stage(ranks):
    assert ranks(of_replicas, world=4) == [[]] * 4


def test_two_modules_may_be_a_stage_as_it_was_written():
    ours = list(gpt("llama").decoder.layers)
    theirs = [nn.Linear(4, 4), nn.Linear(4, 4)]
    for layers in (ours, theirs):
        layers[0].register_forward_hook(shifted)
    assert _hooked(ours) is not None and _hooked(theirs) is None
