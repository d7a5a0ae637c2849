"""What a program chose by the order in one rank's stages: rates, frozen layers and pruned weights."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


# numbers of `rates_by_place`
NUM_COURSES = 4
Courses = tuple[float | None, ...]
NO_COURSES: Courses = (None,) * NUM_COURSES


def rates_by_place(modules: Sequence[nn.Module], optimizer: Optimizer) -> Courses:
    """Numbers that say where the rates of a stage's parameters begin and end, and whether they grow; frozen is 0.

    Of all parameters of a stage, and of its layers alone. None: in no stage of several layers they grow, or shrink,
    from the first parameter to the last.
    """
    rates: dict[int, float] = {}
    for group in optimizer.param_groups:
        if isinstance(group.get("lr"), (int, float)):
            rates |= dict.fromkeys(map(id, group["params"]), float(group["lr"]))
    of_all = of_layers = None
    for module in modules:
        layers = layers_of(module)
        if layers:
            of_all = of_all or _course(module.parameters(), rates)
            of_layers = of_layers or _course((p for x in layers for p in x.parameters()), rates)
    return *(of_all or (None, None)), *(of_layers or (None, None))


def _course(
    parameters: Iterable[nn.Parameter], rates: dict[int, float]
) -> tuple[float, float] | None:
    of_all = [rates.get(id(p)) if p.requires_grad else 0.0 for p in parameters]
    # those of another optimizer have rates of their own
    known = [rate for rate in of_all if rate is not None]
    ways = {math.copysign(1, b - a) for a, b in pairwise(known) if a != b}
    if len(ways) != 1:
        return None
    way = ways.pop()
    return way * (1 + known[0]), way * (1 + known[-1])


def layers_of(module: nn.Module) -> list[nn.Module]:
    """Those of the first list that has several with parameters."""
    for part in module.modules():
        if isinstance(part, _LISTS):
            layers = [x for x in part.children() if any(True for _ in x.parameters())]
            if len(layers) > 1:
                return layers
    return []


def moments(number: float | None) -> tuple[float, float, float]:
    """Of a number that some ranks have, to be summed over them: how many, the number, that squared."""
    return (0.0, 0.0, 0.0) if number is None else (1.0, number, number * number)


def are_alike(sums: Tensor, replicas: int, exact: float = 0.0) -> bool:
    """Whether more ranks than the replicas of one stage have a number, and one. sums: of `moments`."""
    count, number, squares = sums.tolist()
    spread = count * squares - number * number
    return count > replicas and spread <= max(1e-12 * count * squares, (exact * count) ** 2)


def share_of_zeros(modules: Sequence[nn.Module]) -> tuple[float, float] | None:
    """Of this rank's pruned matrices together, and how exact it is; a mask of torch's `prune` stands for its matrix.

    None: nothing is pruned, or each matrix by itself, to one share. A threshold over all of them gives each another.
    """
    masks = [b for module in modules for n, b in module.named_buffers() if n.endswith("_mask")]
    # those that ZeRO stage 3 has freed are of another class
    weights = [p for module in modules for p in module.parameters() if type(p) is nn.Parameter]
    matrices = masks or [p.detach() for p in weights]
    matrices = [x for x in matrices if x.dim() > 1 and x.numel() and x.layout is torch.strided]
    if not matrices:
        return None
    zeros = torch.stack([_zeros_of(x) for x in matrices]).tolist()
    # neither those that begin as zeros nor what was not pruned
    pruned = [(z, x.numel()) for z, x in zip(zeros, matrices, strict=True) if 0 < z < x.numel()]
    shares = [z / n for z, n in pruned]
    if not pruned or max(shares) - min(shares) <= 1 / min(n for _, n in pruned):
        return None
    total = sum(n for _, n in pruned)
    return sum(z for z, _ in pruned) / total, 2 / total


def _zeros_of(matrix: Tensor) -> Tensor:
    return matrix.numel() - matrix.count_nonzero()
