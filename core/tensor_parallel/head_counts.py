"""Notices columns that are seen as all heads of a layer where this tensor rank has a part of them.

`y.view(b, s, self.n_head, -1)` fits any number of columns: with all heads of the layer on a rank's columns each head
is 1/tp as wide, and attention is another one. What a number means stands in its name only, so names are asked. A
number that stands in the program's text, `y.unflatten(-1, (8, -1))`, is no rank's count: the same text runs on one.
"""

import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from torch import Tensor, nn

from core.parallel_state.by_hand import split_axes
from core.parallel_state.by_hand.functions import line_of_program
from core.parallel_state.by_hand.split_tensor import SplitTensor

_VIEWS = ("view", "reshape", "unflatten")
# names of a rank's own count: Llama's n_local_heads, Megatron's num_attention_heads_per_partition
_OF_A_RANK = ("local", "per_", "rank", "part", "tp", "shard")
_CONFIGURATIONS = ("config", "cfg", "args", "params", "hparams")


def whole_heads(name: str, args: tuple, result: Any, size: int) -> tuple[int, str] | None:
    """(heads, the module's name for them) where a view of split columns has a dim of all the layer's heads.

    The name is empty of a number that stands in the program's text. size: tensor ranks. None: it is no such view, or
    the module knows another count that fits a rank's part.
    """
    x = args[0] if args else None
    if name == "group_norm" and isinstance(x, SplitTensor) and split_axes.is_split(x.axes, [1]):
        groups = args[1]
        if _times_written(name, groups) or _is_made_of(groups):
            return groups, ""
        return _named(groups, size, ("head", "group"))
    if name not in _VIEWS or not isinstance(x, SplitTensor) or not isinstance(result, SplitTensor):
        return None
    place = _split_dim(result)
    if result.dim() <= x.dim() or place is None:
        return None
    heads = int(result.shape[place])
    if _is_written(name, args, result, heads):
        return heads, ""
    return _named(heads, size, ("head",))


def _named(number: int, size: int, words: Sequence[str]) -> tuple[int, str] | None:
    """The number and its name in the program's module, where that is none of a rank's own count."""
    counts = dict(_counts(sys._getframe(1), words))
    if any(count == number * size for count in counts.values()):
        return None
    for label, count in counts.items():
        if count == number and not any(word in label.lower() for word in _OF_A_RANK):
            return number, label
    return None


def _split_dim(tensor: SplitTensor) -> int | None:
    """The one dim that is split, with others inside of it: heads, of which each has its columns."""
    dims = [dim for dim, atoms in enumerate(tensor.axes) if any(split for _, split in atoms)]
    if len(dims) != 1 or dims[0] == tensor.dim() - 1:
        return None
    return dims[0]


def _is_written(name: str, args: tuple, result: SplitTensor, heads: int) -> bool:
    """Whether the number of heads was given by a number in the program's text, and not by -1."""
    given = args[2:] if name == "unflatten" else args[1:]
    sizes = list(given[0]) if given and isinstance(given[0], (tuple, list)) else list(given)
    # of unflatten they begin at the dim that it makes several of
    place = _split_dim(result)
    if name == "unflatten" and place is not None:
        place -= int(args[1]) % args[0].dim()
    if place is None or not 0 <= place < len(sizes) or sizes[place] != heads:
        return False
    # the size of a head may be the same number
    return _times_written(name, heads) >= sizes.count(heads)


def _times_written(name: str, count: int) -> int:
    """How often the call of a function, in the line of the program that runs, has this number among its arguments."""
    if count < 2:
        return 0
    line = line_of_program(sys._getframe(1))
    call = re.search(rf"\b{name}\((?P<arguments>.*)", line)
    if call is None:
        return 0
    # as far as the call's own parentheses
    arguments, depth = "", 1
    for letter in call["arguments"]:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if not depth:
            break
        arguments += letter
    # by itself: neither `4.0`, `x[4]` nor `8 // tp`
    return len(re.findall(rf"(?<=[\s(]){count}(?=\s*[,)]|$)", f" {arguments}"))


def _is_made_of(groups: int) -> bool:
    """Whether the program's module makes its GroupNorm of a number in the text: `nn.GroupNorm(4, width // tp)`."""
    module = _module_of_program(sys._getframe(1))
    if module is None or groups < 2:
        return False
    try:
        text = inspect.getsource(type(module))
    except (OSError, TypeError):
        return False
    return re.search(rf"\bGroupNorm\(\s*(num_groups\s*=\s*)?{groups}\s*,", text) is not None


def _module_of_program(frame: FrameType | None) -> nn.Module | None:
    """Whose forward calls, of those that are none of torch's."""
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and not type(module).__module__.startswith("torch."):
            return module
        frame = frame.f_back
    return None


def _counts(frame: FrameType | None, words: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Numbers that are named after heads or groups, of the program's module and of its configuration."""
    module = _module_of_program(frame)
    for owner in (module, *(getattr(module, name, None) for name in _CONFIGURATIONS)):
        for name, value in getattr(owner, "__dict__", {}).items():
            is_count = isinstance(value, int) and not isinstance(value, (bool, Tensor))
            if not is_count or "dim" in name or "size" in name:
                continue
            if any(word in name.lower() for word in words):
                yield name, value
