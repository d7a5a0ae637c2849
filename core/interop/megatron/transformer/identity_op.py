"""The identity, for a place in a spec that stays empty."""

from typing import Any

from torch import nn


class IdentityOp(nn.Module):
    """x -> x, whatever it is built with."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return x
