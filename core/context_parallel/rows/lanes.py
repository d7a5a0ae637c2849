"""A call, once more: on a copy of a rank's rows, on whole sequences, and there without numbers of ranks."""

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from core.context_parallel.rows.twins import has_twins, index_of_all
from core.parallel_state.by_hand.part_sizes import whole_number
from core.parallel_state.by_hand.split_names import kind_of
from core.parallel_state.by_hand.split_tensor import Call

_NOT_REPEATED_NAMES = """
    backward grad register_hook retain_grad deepcopy reduce_ex record_stream apply map map2 share_memory resize
    resize_as set module_load requires_grad storage untyped_storage item tolist numpy array
    batch_norm instance_norm multi_head_attention_forward scaled_dot_product_attention lstm gru rnn_tanh rnn_relu
    checkpoint flex_attention
"""
_NOT_REPEATED = frozenset(_NOT_REPEATED_NAMES.split())
_COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")


def is_repeatable(call: Call) -> bool:
    """Not what draws, sends, or changes what is not among its arguments."""
    module = getattr(call.func, "__module__", None) or ""
    return not (
        kind_of(call.name) == "draw"
        or call.name in _NOT_REPEATED
        or call.name.startswith(_COLLECTIVES)
        or module.startswith("torch.distributed")
        or "out" in call.kwargs
        or getattr(call.func, "__name__", "") == "__set__"
    )


def is_scaled(call: Call, ranks: int) -> bool:
    """Whether a number of ranks multiplies: one process, which averages nothing, leaves it out."""
    return "mul" in call.name and any(type(x) in (int, float) and x == ranks for x in call.args)


def fills_a_mask(call: Call) -> bool:
    """`x[mask] = values`: as many as this rank has places."""
    return call.name == "setitem" and isinstance(call.args[2], Tensor) and call.args[2].dim() > 1


def run_in(lane: str, call: Call, ranks: int) -> Any:
    """What the function returns of the arguments' twins in `lane`: "own", "whole" or "unscaled"."""
    is_whole = lane != "own"

    def twin(x: Any) -> Any:
        if has_twins(x):
            return getattr(x.twins, lane)
        if isinstance(x, slice):
            return slice(*map(twin, (x.start, x.stop, x.step)))
        if isinstance(x, torch.Size):
            return torch.Size(list(map(twin, x)))
        return whole_number(x) if is_whole else x

    args = call.args
    if is_whole and call.name in ("getitem", "setitem") and has_twins(args[0]):
        args = (args[0], index_of_all(args[0], args[1]), *args[2:])
    if lane == "unscaled" and is_scaled(call, ranks):
        args = tuple(1 if type(x) in (int, float) and x == ranks else x for x in args)
    args, kwargs = pytree.tree_map(twin, (args, call.kwargs))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call.func(*args, **kwargs)
