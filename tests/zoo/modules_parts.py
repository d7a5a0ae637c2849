"""What the modules of the zoo are made of."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

D = 8


class Block(nn.Module):
    """Around each module, so that a policy can name it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def call(module: nn.Module, x: Any) -> Any:
    """As a stage is called with what the one before returned."""
    return module(*x) if isinstance(x, tuple) else module(x)


class Chain(nn.Module):
    """Several in one stage."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, *x: Any) -> Any:
        x = x if len(x) > 1 else x[0]
        for part in self.parts:
            x = call(part, x)
        return x


class Of(nn.Module):
    """A module from a few parts and a function of them and its input."""

    def __init__(self, run: Callable, **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def twice(make: Callable[[], nn.Module]) -> Callable[[], list[nn.Module]]:
    """Two stages of one kind."""
    return lambda: [make(), make()]


def lin() -> nn.Linear:
    return nn.Linear(D, D)


def around(make: Callable[[], nn.Module]) -> Callable[[], list[nn.Module]]:
    """A residual block of it, after a linear."""
    return twice(lambda: Of(lambda m, x: x + m.part(torch.tanh(m.lin(x))), part=make(), lin=lin()))


def channels(make: Callable[[], nn.Module]) -> Callable[[], list[nn.Module]]:
    """The same for what wants its features at dim 1."""
    return twice(
        lambda: Of(lambda m, x: x + m.part(m.lin(x).transpose(1, 2)).transpose(1, 2), part=make(), lin=lin())
    )
