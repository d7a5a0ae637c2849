"""The states that an optimizer of torch's keeps of parameters, which lie as these do."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from core.parallel_state.by_hand.heard import Heard


class ListenedStates:
    """Gives states of a parameter's shape, moments say, the class `heard_class` between steps, and takes it back."""

    def __init__(self, heard_class: type[Tensor], *, is_on: bool) -> None:
        self._class = heard_class
        self._is_on = is_on
        self._states: list[weakref.ref[Tensor]] = []
        # of the optimizer whose states these are
        self._key: tuple[int, ...] = ()
        self._steps = 0

    def listen(self, optimizer: torch.optim.Optimizer, parameters: Sequence[Parameter]) -> None:
        """After each step, so without a call per state: they are looked for anew after steps 1, 2, 4, 8 ..."""
        if not self._is_on:
            return
        state = optimizer.state
        key = (id(optimizer), id(state), len(state), len(parameters))
        self._steps += 1
        if key != self._key or not self._steps & (self._steps - 1):
            self._key = key
            self._states = _states_of(state, parameters)
        self.listen_again()

    def listen_again(self) -> None:
        """To those of the last step, after what made them plain."""
        for reference in self._states:
            tensor: Any = reference()
            if type(tensor) is Tensor:
                tensor.__class__ = self._class

    def make_plain(self) -> None:
        """Before a step, and where nobody listens any more."""
        for reference in self._states:
            tensor: Any = reference()
            if type(tensor) is self._class:
                tensor.__class__ = Tensor


def _states_of(state: Any, parameters: Sequence[Parameter]) -> list[weakref.ref[Tensor]]:
    """Those of `parameters`, marked by whose they are."""
    found = []
    get: Callable[[Parameter, dict], dict[str, Any]] = state.get
    for parameter in parameters:
        for name, value in get(parameter, {}).items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                value.heard = Heard(parameter, False, of_state=str(name))  # type: ignore[attr-defined]
                value.axes = None  # type: ignore[attr-defined]
                found.append(weakref.ref(value))
    return found
