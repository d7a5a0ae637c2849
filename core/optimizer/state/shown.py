"""What `optimizer.state` shows: this rank's shards of the states, live, which tell where they are summed by hand."""

import sys
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from core.parallel_state.by_hand.functions import (
    KIND_OF_FUNCTION,
    called_by_core,
    called_by_program,
    function_name,
    program_level,
)
from core.parallel_state.by_hand.listened_tensor import ListenedTensor

# Lookahead's slow weights, say, which it keeps in the base optimizer's state
_OWN_DICT = (
    "Keep tensors of your own beside a parameter (slow weights, averages) in a dict of your own, keyed by the "
    "parameter: own[p] = p.detach().clone()"
)
_ANEW = "To begin anew load a state_dict() of before the first step, or make the optimizer anew"


_ELEMENTWISE = {"mul", "imul", "add", "iadd", "sub", "isub", "div", "truediv", "where", "lerp"}


class ReadOnlyStates(dict):
    """A view of states that lie in buckets: their tensors may be written to, the mapping may not."""

    def _refuse_change(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(
            f"optimizer.state shows {len(self)} entries that lie in buckets: none can be put in or taken out. "
            f"{_OWN_DICT}. {_ANEW}"
        )

    clear = pop = popitem = setdefault = update = __setitem__ = __delitem__ = __ior__ = (
        _refuse_change
    )


class StateByParameter(ReadOnlyStates):
    """`optimizer.state`: of all parameters that this rank has a shard of."""

    def __missing__(self, parameter: Tensor) -> NoReturn:
        raise KeyError(
            f"a parameter of shape {tuple(parameter.shape)} has no state here: under ZeRO each rank holds the states "
            f"of its own part, this one those of {len(self)} parameters (`if p in optimizer.state`). "
            f"{_OWN_DICT}"
        )


class ShownCount(ListenedTensor):
    """A copy of a parameter's "step". Raises ValueError: it is written to, which reached no update."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        if writes and args and isinstance(args[0], ShownCount):
            raise ValueError(
                f"{name} on optimizer.state[parameter]['step'], which is a copy: parameters share a count, "
                f"and moments that are zeroed alone keep its bias correction. {_ANEW}"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class ShownShard(ListenedTensor):
    """This rank's part of a state. Norms, sums, products and rows by number are told; writes go to the state."""

    tell: Callable[[str, str], None]  # of a kind, by a function

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name = function_name(func)
        kind = KIND_OF_FUNCTION.get(name)
        shards = [x for x in args if isinstance(x, ShownShard)]
        by_program = bool(shards) and called_by_program(sys._getframe(1))
        # before torch's own error, of a dim that a flat part does not have
        if by_program and kind == "index" and not _by_values(shards[0], args):
            shards[0].tell("index", name)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if by_program:
            if kind == "draw" or _takes_drawn(name, args):
                shards[0].tell("draw", name)
            if kind in ("reduction", "product"):
                shards[0].tell("sum", name)
            elif type(result) is Tensor and result.numel() == shards[0].numel():
                # squares, say, that are summed next
                return shown(result, shards[0].tell)
        return result


def _by_values(shard: ShownShard, args: tuple) -> bool:
    """Whether elements are chosen by a mask of the part's own shape, or all of them are."""
    chosen = args[1] if len(args) > 1 else None
    if isinstance(chosen, Tensor):
        return chosen.dtype is torch.bool and chosen.shape == shard.shape
    return chosen is Ellipsis or (isinstance(chosen, slice) and chosen == slice(None))


def _takes_drawn(name: str, args: tuple) -> bool:
    """Whether it meets numbers for its elements that were not made of it: `v.mul_(torch.rand(v.shape))`."""
    if name not in _ELEMENTWISE:
        return False
    shape = next(x.shape for x in args if isinstance(x, ShownShard))
    return any(
        type(x) is Tensor and x.shape == shape and bool((x != x.flatten()[:1]).any()) for x in args
    )


def shown(tensor: Tensor, tell: Callable[[str, str], None]) -> Tensor:
    """An alias of `tensor` that calls tell(a key of `_REMEDIES`, name of the function) where a program does that."""
    shard = tensor.as_subclass(ShownShard)
    shard.tell = tell
    return shard


class FiledShard(ListenedTensor):
    """This rank's part of a state, which tells where it goes to a file."""

    tell: Callable[[], None]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not called_by_core(sys._getframe(1)):
            self.tell()
        return super().__reduce_ex__(protocol)


_REMEDIES = {
    "draw": "What is drawn for a part is not what one process draws for the whole, and ranks that are seeded alike "
    "draw the same for theirs: choose elements by their values, or draw where states are whole, with zero_stage=0 "
    "and one tensor rank",
    "sum": "Sum over the ranks that share it: parallel_state.get_data_parallel_group(with_context_parallel=True) "
    "under ZeRO, get_tensor_model_parallel_group() where tensor ranks split it",
    "index": "Under ZeRO they are a flat part, so numbers are of elements, not of the parameter's rows. Choose them "
    "by their values, a mask of the state's own shape; rows by number want zero_stage=0 and one tensor rank",
}


class ShardSums:
    """Warns, once of each kind, of sums and numbers by hand over states of which other ranks hold the rest."""

    def __init__(self) -> None:
        self._warned_of: set[str] = set()

    def filed(self, part: Tensor) -> Tensor:
        """An alias of a part that tells, once, of the file it is put into."""
        shard = part.as_subclass(FiledShard)
        shard.tell = self._tell_of_file
        return shard

    def _tell_of_file(self) -> None:
        if "file" not in self._warned_of:
            self._warned_of.add("file")
            warnings.warn(
                "optimizer.state_dict() holds this rank's part of the states: a file that rank 0 alone saves loses "
                "the others'. Every rank saves a file of its own (and loads it under the same layout), or all "
                "together one checkpoint: core.dist_checkpointing.save(optimizer.sharded_state_dict(), directory)",
                stacklevel=3,
            )

    def telling(self, kind: str, name: str, held: int, full: int) -> Callable[[str, str], None]:
        """For one state of one parameter, of which this rank holds `held` of `full` elements."""

        def tell(what: str, function: str) -> None:
            if what not in self._warned_of:
                self._warned_of.add(what)
                warnings.warn(
                    f"{function} by hand sees {held} of the {full} elements of {kind} of {name}: other ranks hold "
                    f"the rest. {_REMEDIES[what]}",
                    stacklevel=program_level(),
                )

        return tell
