"""Hooks of all kinds."""

import torch
from torch import nn

from tests.zoo.modules_parts import Of, lin, twice


def _hooked(kind):
    def make():
        module = nn.Sequential(lin(), nn.Tanh(), lin())
        if kind == "forward":
            module[0].register_forward_hook(lambda m, a, out: out * 2)
        elif kind == "pre":
            module[0].register_forward_pre_hook(lambda m, a: (a[0] * 2,))
        elif kind == "backward":
            module[2].register_full_backward_hook(lambda m, gin, gout: (gin[0] * 2,))
        elif kind == "backward pre":
            module[2].register_full_backward_pre_hook(lambda m, gout: (gout[0] * 2,))
        else:
            for p in module.parameters():
                p.register_hook(lambda g: g * 2)
        return module

    return twice(make)


def _tensor_hook(m, x):
    y = torch.tanh(m.a(x))
    if y.requires_grad:
        y.register_hook(lambda g: g * 2)
    return m.b(y)


def _halve(p):
    p.grad.mul_(0.5)


def _gradient_scaled():
    module = nn.Sequential(lin(), nn.Tanh(), lin())
    for p in module.parameters():
        p.register_post_accumulate_grad_hook(_halve)
    return module


HOOKS = {
    "forward hooks that change the output": _hooked("forward"),
    "forward pre-hooks that change the input": _hooked("pre"),
    "full backward hooks": _hooked("backward"),
    "full backward pre-hooks": _hooked("backward pre"),
    "hooks on parameters": _hooked("parameter"),
    "hooks on activations": twice(lambda: Of(_tensor_hook, a=lin(), b=lin())),
    "hooks after accumulation": twice(_gradient_scaled),
}
