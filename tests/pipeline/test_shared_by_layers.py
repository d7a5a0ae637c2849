"""What layers leave in an object for layers after them, which those of other stages do not find."""

import random
import types

import numpy as np
import pytest
import torch
from torch import nn

from tests.pipeline.test_stage_traces import stage_of_layers, train
from tests.states import state


class Holder:
    first = None


class Space:
    """Its class is the place."""

    first = None


CACHE = {}


def reset(module, holder):
    module.register_forward_pre_hook(lambda module, args: setattr(holder, "first", None))


def patched(layer, around):
    """The way of those who have no class of their own: a forward put in the place of a module's."""
    own = type(layer).forward
    layer.forward = types.MethodType(lambda self, x: around(self, own, x), layer)


def value_residual(module, holder=None):
    """The first layer's input goes to all, and nothing of it stays after a forward."""
    holder = Holder() if holder is None else holder
    reset(module, holder)
    module.register_forward_hook(lambda module, args, output: setattr(holder, "first", None))

    def around(self, own, x):
        if holder.first is None:
            holder.first = x
        return own(self, x) + holder.first

    for layer in module:
        patched(layer, around)


def by_hooks(module):
    """A stack of skips, as in a U-Net."""
    stack, layers = [], list(module)
    for layer in layers[:2]:
        layer.register_forward_pre_hook(lambda module, args: stack.append(args[0]))
    for layer in layers[2:]:
        layer.register_forward_hook(lambda module, args, output: output + stack.pop())


def nonlocal_name(module):
    first = None

    def around(self, own, x):
        nonlocal first
        first = x if self is module[0] else first
        return own(self, x) + first

    for layer in module:
        patched(layer, around)


def on_the_stage(module):
    def around(self, own, x):
        if self is module[0]:
            module.first = x
        return own(self, x) + module.first

    for layer in module:
        patched(layer, around)


def global_name(module):
    def around(self, own, x):
        CACHE["last"] = own(self, x) + 0.1 * CACHE.get("last", x).detach()
        return CACHE["last"]

    for layer in module:
        patched(layer, around)


class Sharing(nn.Linear):
    """A class of the program's, whose objects share one."""

    def __init__(self, shared):
        super().__init__(4, 4)
        self.shared = shared

    def forward(self, input):
        self.shared["x"] = self.shared.get("x", input).detach() * 0.5 + super().forward(input)
        return self.shared["x"]


def shared_attribute(module):
    shared = {}
    for place in range(len(module)):
        module[place] = Sharing(shared)


class Block(nn.Linear):
    """One whose class is the place."""

    first = None

    def forward(self, input):
        if Block.first is None:
            Block.first = input
        return super().forward(0.8 * input + 0.2 * Block.first)


def subclass(module):
    module.register_forward_pre_hook(lambda module, args: setattr(Block, "first", None))
    for layer in module:
        layer.__class__ = Block


def counts_layers(module):
    """A gate by depth, which begins again in each forward."""
    depth = {"i": 0}
    module.register_forward_pre_hook(lambda module, args: depth.update(i=0))

    def around(self, own, x):
        depth["i"] += 1
        return own(self, x) / depth["i"] ** 0.5

    for layer in module:
        patched(layer, around)


def by_attribute(module):
    """Layer pooling: what hooks leave on the layers is taken up in another one."""
    for layer in module:
        layer.register_forward_hook(lambda module, args, output: setattr(module, "out", output))
    patched(module[-1], lambda self, own, x: own(self, x) + sum(layer.out for layer in list(module)[:-1]))


def stack_if_any(module):
    stack = []

    def around(self, own, x):
        if self in list(module)[:2]:
            stack.append(x)
        elif stack:
            x = x + stack.pop()
        return own(self, x)

    for layer in module:
        patched(layer, around)


def of_a_stage(module):
    """What a stage makes for its layers is each stage's."""
    holder = Holder()

    def begin(module, args, kwargs):
        holder.first = next(iter((*args, *kwargs.values()))).mean(-1, keepdim=True)

    module.register_forward_pre_hook(begin, with_kwargs=True)
    for layer in module:
        patched(layer, lambda self, own, x: own(self, x) + holder.first)


def of_one_layer(module):
    for layer in module:
        holder = Holder()

        def around(self, own, x, holder=holder):
            holder.first = x
            return own(self, x) + holder.first

        patched(layer, around)


def of_a_count(module):
    seen = {"calls": 0}

    def around(self, own, x):
        seen["calls"] += 1
        return own(self, x)

    for layer in module:
        patched(layer, around)


def dropped_by(layer, draw):
    """LayerDrop."""
    layer.register_forward_hook(lambda module, args, output: args[0] if draw() < 0.4 else None)


def by_python(module):
    rng = random.Random(0)
    for layer in module:
        dropped_by(layer, rng.random)


def by_numpy(module):
    rng = np.random.default_rng(0)
    for layer in module:
        dropped_by(layer, rng.random)


def by_numpys_old(module):
    rng = np.random.RandomState(0)
    for layer in module:
        dropped_by(layer, lambda: rng.rand())


def by_torch(module):
    rng = torch.Generator().manual_seed(0)
    for layer in module:
        layer.register_forward_hook(lambda module, args, output: output + torch.rand(output.shape, generator=rng))


def by_the_system(module):
    rng = random.SystemRandom()
    for layer in module:
        dropped_by(layer, rng.random)


def by_one_of_each(module):
    for layer in module:
        dropped_by(layer, random.Random(0).random)


HANDED_ON = {
    value_residual: "holder",
    by_hooks: "stack",
    nonlocal_name: "first",
    on_the_stage: "module.first",
    global_name: "CACHE",
    shared_attribute: "shared",
    lambda module: value_residual(module, Space): "holder",
    stack_if_any: "stack",
    subclass: "Block",
    counts_layers: "depth",
}
DRAWN = {by_python: "draw", by_numpy: "draw", by_numpys_old: "rng", by_torch: "rng"}
HANDED_ON |= DRAWN
OF_EACH = [of_a_stage, of_one_layer, of_a_count, by_one_of_each, by_the_system]
HABITS = [*HANDED_ON, *OF_EACH, by_attribute]


def layers_of(habit):
    ps = state(pp=2)
    CACHE.clear()
    module = stage_of_layers(ps, 4)
    HABITS[habit](module)
    return train(module, ps)


@pytest.mark.parametrize("habit", range(len(HANDED_ON)))
def test_what_layers_hand_on(ranks, habit):
    name, draws = [*HANDED_ON.values()][habit], [*HANDED_ON][habit] in DRAWN
    for messages in ranks(layers_of, habit, world=2):
        (message,) = [x for x in messages if "layers of this rank share" in x]
        assert message.startswith(f"`{name}`, which layers")
        assert ("draws in the forward" in message and "by its number" in message) == draws


@pytest.mark.parametrize("habit", range(len(HANDED_ON), len(HABITS) - 1))
def test_what_each_has_for_itself(ranks, habit):
    assert ranks(layers_of, habit, world=2) == [[], []]


def test_what_hooks_leave_on_layers(ranks):
    for messages in ranks(layers_of, HABITS.index(by_attribute), world=2):
        assert any(x.startswith("`out` keeps numbers of 4 modules") for x in messages)


def shared_parameter(kind):
    ps = state(pp=2)
    module = stage_of_layers(ps, 3)
    scale = {"a number": lambda: nn.Parameter(torch.ones(())), "a norm": lambda: nn.LayerNorm(4)}.get(kind, list)()
    if kind == "a list":
        scale = nn.ParameterList([torch.ones(()) for _ in range(6)])
    for layer in module:
        if kind == "of each layer":
            scale = layer.scale = nn.Parameter(torch.ones(()))
        by = scale if kind != "a list" else scale[0]
        around = (lambda x, by=by: by(x)) if kind == "a norm" else (lambda x, by=by: x * by)
        layer.register_forward_hook(lambda module, args, output, around=around: around(output))
    return [x for x in train(module, ps) if "none of them has" in x]


@pytest.mark.parametrize("kind", ["a number", "a norm", "a list", "of each layer"])
def test_a_parameter_that_layers_share(ranks, kind):
    for messages in ranks(shared_parameter, kind, world=2):
        assert len(messages) == (kind != "of each layer")


def hooks_left():
    ps = state(pp=2)
    module = stage_of_layers(ps, 4)
    value_residual(module)
    train(module, ps)
    return [len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in module]


def test_nothing_stays_behind(ranks):
    """The hooks that listen are there for a call."""
    assert ranks(hooks_left, world=2) == [[0] * 4] * 2
