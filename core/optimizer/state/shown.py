"""What `optimizer.state` shows: this rank's shards of the states, live, which tell where they are summed by hand."""

import sys
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from core.parallel_state.by_hand.functions import (
    KIND_OF_FUNCTION,
    called_by_program,
    function_name,
)
from core.parallel_state.by_hand.listened_tensor import ListenedTensor


class ReadOnlyStates(dict):
    """A view of states that lie in buckets: their tensors may be written to, the mapping may not."""

    def _refuse_change(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(
            f"optimizer.state shows {len(self)} entries that lie in buckets: none can be put in or taken out; zero "
            "their tensors, load a state_dict() of before the first step, or make the optimizer anew"
        )

    clear = pop = popitem = setdefault = update = __setitem__ = __delitem__ = __ior__ = (
        _refuse_change
    )


class StateByParameter(ReadOnlyStates):
    """`optimizer.state`: of all parameters that this rank has a shard of."""

    def __missing__(self, parameter: Tensor) -> NoReturn:
        raise KeyError(
            f"a parameter of shape {tuple(parameter.shape)} has no state here: under ZeRO each rank holds the states "
            f"of its own part, this one those of {len(self)} parameters (optimizer.state lists them)"
        )


class ShownShard(ListenedTensor):
    """This rank's part of a state. A norm, a sum or a product of it by a program is told; writes go to the state."""

    on_sum: Callable[[str], None]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        name = function_name(func)
        kind = KIND_OF_FUNCTION.get(name)
        shards = [x for x in args if isinstance(x, ShownShard)]
        if shards and called_by_program(sys._getframe(1)):
            if kind in ("reduction", "product"):
                shards[0].on_sum(name)
            elif type(result) is Tensor and result.numel() == shards[0].numel():
                # squares, say, that are summed next
                return shown(result, shards[0].on_sum)
        return result


def shown(tensor: Tensor, on_sum: Callable[[str], None]) -> Tensor:
    """An alias of `tensor` that calls on_sum(name of the function) where a program reduces it."""
    shard = tensor.as_subclass(ShownShard)
    shard.on_sum = on_sum
    return shard


class ShardSums:
    """Warns once of a sum by hand over states of which other ranks hold the rest."""

    def __init__(self) -> None:
        self._has_warned = False

    def telling(self, kind: str, name: str, held: int, full: int) -> Callable[[str], None]:
        """For one state of one parameter, of which this rank holds `held` of `full` elements."""

        def tell(function: str) -> None:
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"{function} by hand sees {held} of the {full} elements of {kind} of {name}: other ranks hold "
                    "the rest. Sum over the ranks that share it: parallel_state.get_data_parallel_group(with_context_"
                    "parallel=True) under ZeRO, get_tensor_model_parallel_group() where tensor ranks split it",
                    stacklevel=4,
                )

        return tell
