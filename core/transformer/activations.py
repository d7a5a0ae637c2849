"""The activations a configuration may name."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Callable[[Tensor], Tensor]


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2, elementwise (Primer, arXiv 2109.08668)."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "squared_relu": squared_relu,
}


def silu_gate_gradient(y: Tensor, g: Tensor) -> Tensor:
    """Of silu(gate) * up with respect to y [..., 2 f] (gate, then up), where its output's is g [..., f]."""
    gate, up = y.chunk(2, -1)
    grad = torch.empty_like(y)
    into_gate, into_up = grad.chunk(2, -1)
    torch.mul(g, F.silu(gate), out=into_up)
    torch.ops.aten.silu_backward.grad_input(g * up, gate, grad_input=into_gate)
    return grad


class _SiluGate(torch.autograd.Function):
    """silu(gate) * up in four kernels each way; both halves' gradients land in one buffer, with no concatenation."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        gate, up = y.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            # a configuration is read without autograd
            from core.autograd.gradients import (
                no_second_derivative,
            )

            raise no_second_derivative("the fused SwiGLU")
        return silu_gate_gradient(ctx.saved_tensors[0], g)


def gated(y: Tensor, activation: Activation) -> Tensor:
    """[..., 2 f] holding gate then up -> activation(gate) * up, [..., f]."""
    # The compiler fuses by itself; without gradients there is nothing to save.
    if activation is F.silu and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        out: Tensor = _SiluGate.apply(y)
        return out
    gate, up = y.chunk(2, -1)
    return activation(gate) * up
