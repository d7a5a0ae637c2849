"""What a program did to some of a stage's layers by their place in it: hooks, initial values, shared weights."""

import math
import warnings
import zlib
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from core.parallel_state.by_hand.functions import is_foreign, program_level
from core.pipeline.run.checks.program_parts import HOOKS, code_of
from core.pipeline.run.checks.rates_by_place import are_alike, layers_of, moments

_WORDS = {
    "hooks": "hooks are on the same of a stage's layers, by their place in it,",
    "weights": "all of a stage's layers share weights, with none of another stage's,",
    "values": "initial values of a stage's layers change from the first to the last, and begin again",
}
# of hooks, of shared weights, and two of initial values
_NUMBERS = 4
COUNT = 3 * _NUMBERS


class LayersByPlace:
    """Finds what begins again on each stage where a model has it once. Warns once for each kind."""

    def __init__(self, modules: Sequence[nn.Module], replicas: int, stages: int) -> None:
        self._modules = modules
        self._replicas = replicas
        self._stages = stages
        self._told: set[str] = set()
        self._is_watched = False
        # of the numbers of initial values: what two draws of one deviation differ by
        self._exact: float | None = None

    def numbers(self, *, is_watched: bool, is_first: bool) -> list[float]:
        """COUNT of them, to be summed over all ranks. is_first: no weight has been updated."""
        stages = [layers for module in self._modules if (layers := layers_of(module))]
        found: list[float | None] = [None] * _NUMBERS
        self._is_watched, self._exact = is_watched, None
        for layers in stages if is_watched else ():
            found[0] = _first(found[0], _hooked(layers))
            found[1] = _first(found[1], 1.0 if _share_weights(layers) else None)
        if stages and is_first and (values := _values(stages[0])) is not None:
            *found[2:], self._exact = values
        return [x for number in found for x in moments(number)]

    def look(self, sums: Tensor) -> None:
        """Warns, on every rank that has part in it. sums: [COUNT], over all ranks; waited for in watched steps."""
        if not self._is_watched:
            return
        hooks, weights, first, ratio = sums.view(-1, 3)
        exact = self._exact or 0.0
        are_values_alike = (
            exact > 0 and self._are_alike(first, exact) and self._are_alike(ratio, exact)
        )
        found = {
            "hooks": self._are_alike(hooks),
            "weights": self._are_alike(weights),
            "values": are_values_alike,
        }
        for kind, is_found in found.items():
            if is_found and kind not in self._told:
                self._told.add(kind)
                warnings.warn(
                    f"{_WORDS[kind]} on each of {self._stages} pipeline ranks: a model has this once. Choose layers "
                    "by their numbers in the whole model (layer 7 of a GPTModel is decoder.layers.7 wherever it "
                    "lives; of stages of your own add those before). Where every stage is meant nothing is wrong",
                    stacklevel=program_level(),
                )

    def _are_alike(self, sums: Tensor, exact: float = 0.0) -> bool:
        return are_alike(sums, self._replicas, exact)


def _first(before: float | None, found: float | None) -> float | None:
    return found if before is None else before


def _hooked(layers: Sequence[nn.Module]) -> float | None:
    """A number of the places of the layers that have a hook of the program's which others have not."""
    if not _are_of_a_model(layers):
        return None
    places: dict[tuple[str, str, Any], list[int]] = defaultdict(list)
    for place, layer in enumerate(layers):
        for name, part in layer.named_modules():
            for registry in HOOKS:
                for hook in (getattr(part, registry, None) or {}).values():
                    if is_foreign(hook):
                        key = (name, registry, code_of(hook))
                        places[key] += [place] if place not in places[key] else []
    for (name, _, _), found in places.items():
        if len(found) < len(layers) and not _goes_on(found, len(layers)):
            return float(zlib.crc32(repr((name, found, len(layers))).encode()) % 2**20)
    return None


def _are_of_a_model(layers: Sequence[nn.Module]) -> bool:
    """Whether these are ours, or several of one class; two modules may be a stage as a program wrote it."""
    is_ours = type(layers[0]).__module__.startswith("core.transformer.")
    return is_ours or (len(layers) > 2 and len({*map(type, layers)}) == 1)


def _goes_on(places: list[int], count: int) -> bool:
    """Whether several go on in equal steps where the stage after begins: every second layer."""
    steps = {b - a for a, b in pairwise([*places, places[0] + count])}
    return len(places) > 1 and len(steps) == 1


def _share_weights(layers: Sequence[nn.Module]) -> bool:
    """Whether a matrix is that of all layers."""
    of_each = [{id(p) for p in layer.parameters() if p.dim() > 1} for layer in layers]
    return bool(set.intersection(*of_each))


def _values(layers: Sequence[nn.Module]) -> tuple[float, float, float] | None:
    """Logs of a matrix's deviation in the first layer, and of what the last has of it; how exact they are.

    Of the matrix that differs most. None: the layers' deviations are equal, as far as can be said.
    """
    tables = [dict(layer.named_parameters()) for layer in layers]
    found: list[tuple[float, float, float]] = []
    for name, first in tables[0].items():
        # those that ZeRO stage 3 has freed are of another class
        same = [p for table in tables if type(p := table.get(name)) is nn.Parameter]
        if first.dim() < 2 or len(same) < len(tables) or any(p.shape != first.shape for p in same):
            continue
        a, b = (float(p.detach().square().mean().sqrt()) for p in (same[0], same[-1]))
        exact = 4 / math.sqrt(first.numel())
        if a > 0 and b > 0 and abs(math.log(b / a)) > 2 * exact:
            found.append((math.log(a), math.log(b / a), exact))
    return max(found, key=lambda each: abs(each[1]), default=None)
