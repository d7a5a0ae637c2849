"""In which forwards of a program's own module it is seen what is done to columns between its linears.

The first two; and later those that are not as the ones before: a quantiser that begins at step 1000 makes another
number of autograd nodes, which costs nothing to read.
"""

import sys
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from core.parallel_state.by_hand.as_written import is_compiled, run_as_written

_FIRST = 2
# and each 67th, a multiple of no period that a program would have: other functions may make as many nodes
_EVERY = 67
# how many more are followed for the number of their nodes: loops over data make another one each time
_MOST = 200


def _compiled_frames() -> int:
    """How many frames were compiled until now."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["frames"]["total"] if dynamo is not None else 0


class LookedAt:
    """Which forwards of one module are followed. Ranks may differ in it: nothing is gathered."""

    def __init__(self) -> None:
        self._forwards = 0
        self._more = 0
        # modes and numbers of nodes, of forwards that were followed and of others since
        self._known: set[tuple[tuple, int]] = set()
        self._wanted: set[tuple[tuple, int]] = set()
        self._mode: tuple = ()
        self._nodes = 0
        # whether functions in it are compiled, whose nodes do not say what they do
        self._compiles = False
        self._frames = 0
        self._is_followed = False
        self._eager = ExitStack()
        # `module.compile()`: its hooks run after it was decided whether this forward is compiled
        self._holds_next = False

    def begin(
        self, module: nn.Module, inputs: Sequence[Tensor] | None = None, *, again: bool = False
    ) -> bool:
        """Before a forward: whether it is followed. again: the program has put hooks in since the last one.

        inputs: compiled parts that see them run as they were written in the first ones, if memory allows.
        """
        self._eager.close()
        self._forwards = 1 if again else self._forwards + 1
        self._mode = (torch.is_grad_enabled(), module.training)
        is_wanted = self._more < _MOST and any(mode == self._mode for mode, _ in self._wanted)
        self._more += is_wanted
        if self._forwards <= _FIRST:
            self._is_followed = inputs is None or run_as_written(module, inputs, self._eager)
        else:
            is_turn = is_wanted or self._forwards % _EVERY == 0
            self._is_followed = is_turn and not is_compiled(module)
        is_whole = getattr(module, "_compiled_call_impl", None) is not None
        self._holds_next = is_whole and self._forwards < _FIRST
        self._frames = _compiled_frames()
        self._nodes = torch.autograd._get_sequence_nr()
        return self._is_followed

    def end(self) -> None:
        """After that forward."""
        if not self._holds_next:
            self._eager.close()
        made = (self._mode, torch.autograd._get_sequence_nr() - self._nodes)
        if self._is_followed:
            self._known.add(made)
            self._wanted.discard(made)
            return
        self._compiles |= _compiled_frames() > self._frames
        if made not in self._known and not self._compiles:
            self._wanted.add(made)
