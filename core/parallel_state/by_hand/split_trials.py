"""What a function does along a split dim, found by trying it: on both halves of a part it makes halves of its result.

That is what being right on a rank's part means. For functions of which no table says anything: a custom operator.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from core.parallel_state.by_hand import split_axes
from core.parallel_state.by_hand.split_axes import Axes


@torch.no_grad()
def tried(func: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> list | None:
    """The tensors of `result` and their axes; None where halves of what is split do not make halves of it."""
    name = getattr(func, "__name__", "")
    is_in_place = name.endswith("_") and not name.endswith("__")
    if is_in_place or kwargs.get("out") is not None:
        return None
    followed = [x for x in pytree.tree_leaves((args, kwargs)) if hasattr(x, "axes")]
    widths = {_width(x.axes) for x in followed if split_axes.is_split(x.axes)}
    n, inner = widths.pop() if len(widths) == 1 else (0, 0)
    if n < 2:
        return None
    devices = [x.device for x in followed if x.device.type != "cpu"][:1]
    kept = {"device_type": devices[0].type} if devices else {}
    for cuts_others in (False, True):
        halves = []
        # the program's next draw stays what it was
        with torch.random.fork_rng([d.index or 0 for d in devices], **kept):
            for part in (slice(0, n // 2 * inner), slice(n // 2 * inner, n * inner)):
                cut = partial(_cut, part, followed, n * inner if cuts_others else 0)
                half_args, half_kwargs = pytree.tree_map(cut, (args, kwargs))
                try:
                    halves.append(func(*half_args, **half_kwargs))
                except Exception:
                    break
        found = _joined(halves, result, n) if len(halves) == 2 else None
        if found is not None:
            return found
    return None


def _width(axes: Axes) -> tuple[int, int]:
    """Blocks of the one split dim, and the size of each; (0, 0) where it is none of its own."""
    split_dims = split_axes.split_dims(axes)
    if len(split_dims) != 1 or not axes[split_dims[0]][0][1]:
        return 0, 0
    first, *rest = axes[split_dims[0]]
    inner = 1
    for size, is_split in rest:
        if is_split:
            return 0, 0
        inner *= size
    return first[0], inner


def _cut(part: slice, followed: list[Tensor], width: int, x: Any) -> Any:
    """A copy of `part` of what is followed, and of another with an entry for each of `width` columns, if any.

    A copy, since a custom operator may write into what it is given.
    """
    if not isinstance(x, Tensor):
        return x
    if any(x is f for f in followed):
        dims = split_axes.split_dims(x.axes)  # type: ignore[attr-defined]
    else:
        dims = [dim for dim, size in enumerate(x.shape) if size == width][:1]
    plain = x.detach().as_subclass(Tensor)
    return (plain[(slice(None),) * dims[0] + (part,)] if dims else plain).clone()


def _joined(halves: list, result: Any, n: int) -> list | None:
    found = []
    leaves = [pytree.tree_leaves(values) for values in (result, *halves)]
    if len({len(values) for values in leaves}) > 1:
        return None
    for whole, first, second in zip(*leaves, strict=True):
        if not isinstance(whole, Tensor):
            continue
        plain = whole.detach().as_subclass(Tensor)
        dim = next((d for d in range(whole.dim()) if _is_joined(plain, first, second, d)), None)
        if dim is None or whole.shape[dim] % n:
            return None
        axes = split_axes.plain(whole.shape)
        (inner,) = split_axes.plain([whole.shape[dim] // n])
        found.append((whole, (*axes[:dim], ((n, True), *inner), *axes[dim + 1 :])))
    return found or None


def _is_joined(whole: Tensor, first: Any, second: Any, dim: int) -> bool:
    shapes = [list(x.shape) for x in (whole, first, second)]
    sizes = [shape.pop(dim) if len(shape) > dim else 0 for shape in shapes]
    if shapes[0] != shapes[1] or shapes[0] != shapes[2] or sizes[0] != sizes[1] + sizes[2]:
        return False
    joined = torch.cat((first, second), dim)
    if not whole.is_floating_point() and not whole.is_complex():
        return torch.equal(whole, joined)
    # blocks of other sizes are summed in another order
    tolerance = torch.finfo(whole.dtype).eps ** 0.6
    return torch.allclose(whole, joined, rtol=tolerance, atol=tolerance * 1e-2, equal_nan=True)
