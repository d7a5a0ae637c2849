"""Splits and blends as Megatron's configurations write them."""

import re
from enum import Enum


class Split(Enum):
    """The parts of a data set."""

    train = 0
    valid = 1
    test = 2


def compile_helpers() -> None:
    """Does nothing: no index is built by compiled code here."""


def normalize(weights: list[float]) -> list[float]:
    """The weights divided by their sum."""
    total = sum(weights)
    return [weight / total for weight in weights]


def check_blend(name: str, blend: tuple[list[str], list[float] | None] | None) -> None:
    """Raise ValueError: weights that are not one per prefix."""
    if blend is None or blend[1] is None or len(blend[0]) == len(blend[1]):
        return
    raise ValueError(
        f"{name} has {len(blend[0])} prefixes and {len(blend[1])} weights; give a weight for each prefix, or None "
        "for shares by their lengths"
    )


def get_blend_from_list(blend: list[str] | None) -> tuple[list[str], list[float] | None] | None:
    """["0.3", "a", "0.7", "b"] or ["a", "b"] -> (prefixes, weights or None)."""
    if blend is None:
        return None
    if len(blend) % 2 == 1:
        return blend, None
    try:
        return blend[1::2], [float(weight) for weight in blend[::2]]
    except ValueError:
        return blend, None


def split_bounds(split: str) -> list[tuple[float, float] | None]:
    """ "99,1,0" -> where each part begins and ends as a share of the documents; None for an empty one.

    Raises ValueError: more than three shares, or none above 0.
    """
    shares = [float(share) for share in re.findall(r"[.0-9]+", split)]
    if len(shares) > len(Split) or not sum(shares):
        raise ValueError(
            f"split={split!r} has {len(shares)} shares; give up to {len(Split)}, not all 0"
        )
    shares = normalize(shares + [0.0] * (len(Split) - len(shares)))
    bounds: list[tuple[float, float] | None] = []
    begin = 0.0
    for share in shares:
        bounds.append((begin, begin + share) if share else None)
        begin += share
    return bounds
