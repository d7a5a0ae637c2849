"""Notices columns that are seen as all heads of a layer where this tensor rank has a part of them.

`y.view(b, s, self.n_head, -1)` fits any number of columns: with all heads of the layer on a rank's columns each head
is 1/tp as wide, and attention is another one. What a number means stands in its name only, so names are asked.
"""

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch import Tensor, nn

from core.parallel_state.by_hand.split_tensor import SplitTensor

_VIEWS = ("view", "reshape", "unflatten")
# names of a rank's own count: Llama's n_local_heads, Megatron's num_attention_heads_per_partition
_OF_A_RANK = ("local", "per_", "rank", "part", "tp", "shard")
_CONFIGURATIONS = ("config", "cfg", "args", "params", "hparams")


def whole_heads(name: str, args: tuple, result: Any, size: int) -> tuple[int, str] | None:
    """(heads, the module's name for them) where a view of split columns has a dim of all the layer's heads.

    size: tensor ranks. None: it is no such view, or the module knows another count that fits a rank's part.
    """
    x = args[0] if args else None
    if name not in _VIEWS or not isinstance(x, SplitTensor) or not isinstance(result, SplitTensor):
        return None
    heads = _split_dim(result)
    if result.dim() <= x.dim() or heads is None:
        return None
    counts = dict(_head_counts(sys._getframe(1)))
    if any(count == heads * size for count in counts.values()):
        return None
    for label, count in counts.items():
        if count == heads and not any(word in label.lower() for word in _OF_A_RANK):
            return heads, label
    return None


def _split_dim(tensor: SplitTensor) -> int | None:
    """The size of the one dim that is split, with others inside of it: heads, of which each has its columns."""
    dims = [dim for dim, atoms in enumerate(tensor.axes) if any(split for _, split in atoms)]
    if len(dims) != 1 or dims[0] == tensor.dim() - 1:
        return None
    return int(tensor.shape[dims[0]])


def _head_counts(frame: FrameType | None) -> Iterator[tuple[str, int]]:
    """Numbers that are named after heads, of the module whose forward calls and of its configuration."""
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and not type(module).__module__.startswith("torch."):
            owners = [module, *(getattr(module, name, None) for name in _CONFIGURATIONS)]
            for owner in owners:
                for name, value in getattr(owner, "__dict__", {}).items():
                    is_count = isinstance(value, int) and not isinstance(value, (bool, Tensor))
                    if (
                        is_count
                        and "head" in name.lower()
                        and "dim" not in name
                        and "size" not in name
                    ):
                        yield name, value
            return
        frame = frame.f_back
