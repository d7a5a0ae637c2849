"""Rates by depth that begin again on every stage: a decay over `enumerate(layers)` of one rank's layers."""

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import nn
from torch.optim import Optimizer

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def rates_by_place(modules: Sequence[nn.Module], optimizer: Optimizer) -> float | None:
    """A number that stands for the learning rates of the layers of this rank, one after the other.

    None: there are not two layers with rates of their own that grow, or shrink, from each to the next.
    """
    rates: dict[int, float] = {}
    for group in optimizer.param_groups:
        if isinstance(group.get("lr"), (int, float)):
            rates |= dict.fromkeys(map(id, group["params"]), float(group["lr"]))
    for module in modules:
        for part in module.modules():
            if isinstance(part, _LISTS) and (number := _number_of(part, rates)) is not None:
                return number
    return None


def _number_of(layers: nn.Module, rates: dict[int, float]) -> float | None:
    by_layer: list[float] = []
    for layer in layers.children():
        of_layer = {rates[id(p)] for p in layer.parameters() if id(p) in rates}
        if len(of_layer) > 1:
            return None
        by_layer += of_layer
    steps = [math.copysign(1, b - a) if b != a else 0.0 for a, b in pairwise(by_layer)]
    if not steps or not steps[0] or set(steps) != {steps[0]}:
        return None
    return sum(rate * (1 + math.sin(place)) for place, rate in enumerate(by_layer))
