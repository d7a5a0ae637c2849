"""Random numbers of Python's or numpy's that a stage's forwards draw: a layer's coin, say."""

import random
import sys
import warnings
from typing import Any

import torch

from core.parallel_state.by_hand.functions import program_level


class HostDraws:
    """Warns, once, where a step drew from them: an executor seeds torch's generators, and no others."""

    def __init__(self) -> None:
        self._before: tuple[Any, ...] | None = None
        self._has_told = False

    def before_step(self) -> None:
        """Remember where the generators stand."""
        self._before = None if self._has_told else _states()

    def after_step(self) -> None:
        """Tell of those that stand elsewhere."""
        before, self._before = self._before, None
        if before is None:
            return
        after = _states()
        if before != after:
            self._has_told = True
            name = "random" if before[0] != after[0] else "numpy.random"
            warnings.warn(
                f"the stages of this rank drew from {name} in a step: with one seed on all pipeline ranks other "
                "stages' layers get the same numbers, in the order of the schedule, and a layer that is recomputed "
                "draws again. Draw with torch (torch.rand(())), whose generators are seeded for each microbatch and "
                "stage",
                stacklevel=program_level(),
            )


def generator_of(value: Any) -> Any:
    """A generator of Python's, numpy's or torch's, or that of its method (`rng.random`); None: another thing."""
    found = getattr(value, "__self__", value)
    numpy = sys.modules.get("numpy")
    of_numpy = (numpy.random.Generator, numpy.random.RandomState) if numpy is not None else ()
    is_one = isinstance(found, (random.Random, torch.Generator, *of_numpy))
    # the system's has no state, and no seed
    return found if is_one and not isinstance(found, random.SystemRandom) else None


def state_of(generator: Any) -> Any:
    """What equals itself until the next draw."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    own = getattr(generator, "bit_generator", None)
    return repr(own.state if own is not None else generator.get_state())


def _states() -> tuple[Any, Any]:
    # not imported for this
    numpy = sys.modules.get("numpy")
    legacy: Any = numpy.random.get_state() if numpy is not None else None
    # the place in the last block of numbers, and that block's first ones; of numpy's own generator
    is_known = isinstance(legacy, tuple) and len(legacy) > 2
    place = (legacy[2], *legacy[1][:4].tolist()) if is_known else None
    return random.getstate(), place
