"""What torch's functions make of a tensor of which other ranks hold parts: right, wrong, or followed."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from core.parallel_state.by_hand import split_axes, split_windows
from core.parallel_state.by_hand.split_axes import Axes
from core.parallel_state.by_hand.split_names import DIMS_OF, kind_of
from core.parallel_state.by_hand.split_trials import tried


@dataclass(frozen=True)
class Finding:
    """A function that is wrong on a part. kind: which remedy; deferred: found when its result was used."""

    kind: str
    name: str
    shape: tuple[int, ...]
    deferred: bool = False


_COLLECTIVES = ("torch.distributed", "torch._ops._c10d", "torch._ops.c10d")
Followed = list[tuple[Any, Axes | None]]
Outcome = Finding | str | Followed | None


def _axes(x: Any) -> Axes:
    axes: Axes = x.axes if hasattr(x, "axes") else split_axes.plain(x.shape)
    return axes


def _dims(args: tuple, kwargs: dict[str, Any], place: int, default: Any, count: int) -> list[int]:
    stated = kwargs.get("dim", kwargs.get("axis"))
    if stated is None and len(args) > place:
        stated = args[place]
    is_ints = (
        isinstance(stated, (tuple, list))
        and all(isinstance(d, int) for d in stated)
        and len(stated) > 0
    )
    if (not isinstance(stated, int) and not is_ints) or isinstance(stated, bool):
        stated = default
    if stated is None:
        return list(range(count))
    return [d % max(count, 1) for d in ([stated] if isinstance(stated, int) else stated)]


def outcome_of(func: Any, name: str, args: tuple, kwargs: dict[str, Any], result: Any) -> Outcome:
    """A Finding; the name of a function whose result is a rank's part of a sum; or tensors and their axes."""
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    x = next(t for t in tensors if hasattr(t, "axes"))
    axes = _axes(x)
    shape = tuple(x.shape)
    if not split_axes.is_split(axes):
        return None
    name = name.rstrip("_")  # normal_ draws as normal does
    kind = kind_of(name)
    if kind == "exit":
        return Finding("exit", name, shape)
    # every tensor rank would draw the same mask for other columns, or other masks for the same ones
    if (kind == "draw" or name == "scaled_dot_product_attention") and _draws(name, args, kwargs):
        return Finding("draw", name, shape)
    if name in ("scaled_dot_product_attention", "flex_attention"):
        return _attended(name, args, kwargs, result)
    if name in ("layer_norm", "rms_norm"):
        # a norm over a split dim takes the mean of a part
        sizes = kwargs.get("normalized_shape", args[1] if len(args) > 1 else shape[-1:])
        dims = range(-len(sizes), 0)
        if split_axes.is_split(axes, dims):
            return Finding("reduction", name, shape)
        return [(result, axes)]
    if name in ("batch_norm", "instance_norm", "group_norm"):
        return _normalized(name, args, kwargs, _axes(args[0]), result)  # not the weight's axes
    # torch.max(a, b) is elementwise
    is_pair = name in ("max", "min") and len(args) > 1 and isinstance(args[1], Tensor)
    if kind == "reduction" or (kind == "sum" and not is_pair):
        return _reduced(name, args, kwargs, axes, result, shape)
    if kind == "product":
        return _multiplied(name, args, kwargs, axes, result)
    if kind == "added" and len(args) > 2:
        product = _multiplied("matmul", args[1:3], {}, axes, result)
        # each rank would add the first to its part of the sum
        return Finding("reduction", name, shape) if isinstance(product, str) else product
    is_summed = kind == "vectors" and any(split_axes.is_split(_axes(t), [-1]) for t in args[:2])
    if is_summed or kind == "count":
        return name
    if kind == "window":
        found = split_windows.windowed(name, args, kwargs, axes, result)
        return Finding("reduction", name, shape) if found is None else [(result, found)]
    if kind == "scatter":
        return _scattered(name, args, kwargs, axes, result)
    if kind == "cut":
        return _cut(name, args, kwargs, axes, result, shape)
    if kind in ("", "added", "vectors"):
        if not _can_be_tried(func, result):
            return None
        return tried(func, args, kwargs, result) or Finding("reduction", name, shape)
    if kind == "fact" or not isinstance(result, Tensor):
        return None
    if kind == "element" and split_axes.are_crossed([_axes(t) for t in tensors], result.dim()):
        return Finding("reduction", name, shape)
    return [(result, _placed(func, kind, args, kwargs, axes, result))]


def _placed(
    func: Any, kind: str, args: tuple, kwargs: dict[str, Any], axes: Axes, result: Tensor
) -> Axes | None:
    """Of elements in other places, or each in its own."""
    if kind == "view":
        return split_axes.reshaped(axes, result.shape)
    if kind == "unsqueeze":
        (dim,) = _dims(args, kwargs, 1, 0, len(axes) + 1)
        return (*axes[:dim], (), *axes[dim:])
    if kind == "repeat":
        return _repeated(axes, result)
    if kind == "permutation":
        return _permuted(func, args, kwargs, axes)
    if kind == "join":
        return _joined(args, kwargs, axes, result)
    inputs = [x for x in pytree.tree_leaves((args, kwargs)) if hasattr(x, "axes")]
    candidates = (split_axes.broadcast(_axes(x), result.shape) for x in inputs)
    return next((candidate for candidate in candidates if candidate is not None), None)


def _can_be_tried(func: Any, result: Any) -> bool:
    """Whether it made tensors, and sent nothing to other ranks."""
    if str(getattr(func, "__module__", "")).startswith(_COLLECTIVES):
        return False
    return any(isinstance(x, Tensor) for x in pytree.tree_leaves(result))


def _repeated(axes: Axes, result: Tensor) -> Axes:
    missing = result.dim() - len(axes)
    found = list(split_axes.plain(result.shape))
    for dim, atoms in enumerate(axes):
        if split_axes.is_split(axes, [dim]):
            times = result.shape[missing + dim] // max(prod(n for n, _ in atoms), 1)
            found[missing + dim] = ((times, False), *atoms) if times > 1 else atoms
    return tuple(found)


def _scattered(name: str, args: tuple, kwargs: dict[str, Any], axes: Axes, result: Any) -> Outcome:
    """Where rows land may be shared with other ranks: then it is this rank's part of a sum."""
    dims = _dims(args, kwargs, 1, None, len(axes)) if name not in ("index_put", "put") else None
    if split_axes.is_split(axes, dims) or not isinstance(result, Tensor):
        return name
    return [(result, split_axes.broadcast(axes, result.shape))]


def _normalized(name: str, args: tuple, kwargs: dict[str, Any], axes: Axes, result: Any) -> Outcome:
    """Norms over positions, dims 2 ...: of all rows of a batch together (dim 0) too, or of groups of channels."""
    dims = list(range(2, len(axes)))
    if name == "batch_norm":
        if not kwargs.get("training", args[5] if len(args) > 5 else False):
            return [(result, axes)]
        dims = [0, *dims]
    elif name == "instance_norm" and not kwargs.get("use_input_stats", True):
        return [(result, axes)]
    if split_axes.is_split(axes, dims):
        return Finding("reduction", name, tuple(args[0].shape))
    return [(result, axes)]


def _draws(name: str, args: tuple, kwargs: dict[str, Any]) -> bool:
    if name == "scaled_dot_product_attention":
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    # what a generator draws is compared over the ranks instead: each may have its own
    if kwargs.get("generator") is not None:
        return False
    if "dropout" not in name:
        return True
    p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    return bool(p) and bool(training)


def _attended(name: str, args: tuple, kwargs: dict[str, Any], result: Any) -> Outcome:
    """Attention: heads may be split, what q and k are multiplied over may not."""
    query = args[0] if args else kwargs["query"]
    key = args[1] if len(args) > 1 else kwargs["key"]
    value = args[2] if len(args) > 2 else kwargs["value"]
    over_width = split_axes.is_split(_axes(query), [-1]) and split_axes.is_split(_axes(key), [-1])
    if over_width or split_axes.is_split(_axes(key), [-2]):
        return Finding("reduction", name, tuple(query.shape))
    axes = (*_axes(query)[:-1], _axes(value)[-1])
    output = result if isinstance(result, Tensor) else result[0]
    return [(output, split_axes.broadcast(axes, output.shape))]


def _reduced(
    name: str, args: tuple, kwargs: dict[str, Any], axes: Axes, result: Any, shape: tuple
) -> Outcome:
    place, default = DIMS_OF[name]
    dims = _dims(args, kwargs, place, default, len(axes))
    if split_axes.is_split(axes, dims):
        if kind_of(name) == "sum":
            return name
        return Finding("reduction", name, shape)
    results = result if isinstance(result, tuple) else (result,)
    followed: Followed = []
    for tensor in results:
        if not isinstance(tensor, Tensor):
            continue
        keepdim = tensor.dim() == len(axes)
        if keepdim and tensor.shape == shape:
            # as a softmax over keys: nothing is reduced
            followed.append((tensor, axes))
        else:
            left = split_axes.without(axes, dims, keepdim=keepdim)
            if keepdim:  # the k largest are a dim of k
                sizes = split_axes.plain(tensor.shape)
                left = tuple(own or size for own, size in zip(left, sizes, strict=True))
            followed.append((tensor, left))
    return followed


def _multiplied(name: str, args: tuple, kwargs: dict[str, Any], axes: Axes, result: Any) -> Outcome:
    if name == "einsum":
        return _einsum(args, result)
    if name.startswith("conv"):
        return _convolved(name, args, kwargs, axes, result)
    if len(args) < 2:
        return None
    left = _axes(args[0])
    right = _axes(args[1])
    if name in ("linear", "inner"):
        right = right[::-1]
    if not left or not right:
        return None
    if len(right) == 1:  # a vector
        return name if split_axes.is_split(left, [-1]) or split_axes.is_split(right) else None
    # multiplied over a split dim: each rank has its part of the sum
    if split_axes.is_split(left, [-1]) or split_axes.is_split(right, [-2]):
        return name
    # parts by parts: products with the others' parts are missing
    if split_axes.is_split(left, [-2]) and split_axes.is_split(right, [-1]):
        return Finding("reduction", name, tuple(args[0].shape))
    product = (*(left if len(left) >= len(right) else right)[:-2], *left[-2:-1], right[-1])
    return [(result, product if len(product) == result.dim() else None)]


def _convolved(name: str, args: tuple, kwargs: dict[str, Any], axes: Axes, result: Any) -> Outcome:
    """Channels are dim 1, positions those after it; a window of one position is a product."""
    groups = kwargs.get("groups", args[6] if len(args) > 6 else 1)
    positions = [dim for dim in range(2, len(axes)) if split_axes.is_split(axes, [dim])]
    weight = args[1] if len(args) > 1 else kwargs["weight"]
    if any(weight.shape[dim] > 1 or result.shape[dim] != args[0].shape[dim] for dim in positions):
        return Finding("reduction", name, tuple(args[0].shape))
    if split_axes.is_split(axes, [1]):
        return name if groups == 1 else None
    plain = split_axes.plain(result.shape)
    return [
        (
            result,
            tuple(axes[dim] if dim in (0, *positions) else plain[dim] for dim in range(len(axes))),
        )
    ]


def _einsum(args: tuple, result: Tensor) -> Outcome:
    if len(args) == 2 and isinstance(args[1], (tuple, list)):
        operands = args[1]
    else:
        operands = args[1:]
    equation = args[0].replace(" ", "") if isinstance(args[0], str) else "."
    # operands in other forms are not followed: nothing is said of them
    if "." in equation or "->" not in equation:
        return None
    inputs, output = equation.split("->")
    atoms: dict[str, Any] = {}
    for letters, operand in zip(inputs.split(","), operands, strict=True):
        for letter, atom in zip(letters, _axes(operand), strict=True):
            if letter not in atoms or any(split for _, split in atom):
                atoms[letter] = atom
    for letter, atom in atoms.items():
        is_split = any(split for _, split in atom)
        if is_split and letter not in output:
            return "einsum"
    split = [letter for letter in output if any(is_part for _, is_part in atoms[letter])]
    if len(split) > 1:
        return Finding("reduction", "einsum", tuple(result.shape))
    return [(result, tuple(atoms[letter] for letter in output))]


def _permuted(func: Any, args: tuple, kwargs: dict[str, Any], axes: Axes) -> Axes:
    """The function itself says the order: of a tensor whose dims have as many sizes."""
    # sizes 2, 3, 4 ...: each dim is known by its size afterwards
    probe = torch.empty([place + 2 for place in range(len(axes))], device="meta")
    order = [size - 2 for size in func(probe, *args[1:], **kwargs).shape]
    return tuple(axes[place] for place in order)


def _joined(args: tuple, kwargs: dict[str, Any], axes: Axes, result: Tensor) -> Axes | None:
    parts = args[0] if args else kwargs.get("tensors", ())
    (dim,) = _dims(args, kwargs, 1, 0, len(axes))
    if not split_axes.is_split(axes, [dim]):
        return (*axes[:dim], *split_axes.plain([result.shape[dim]]), *axes[dim + 1 :])
    if any(_axes(part)[dim] != axes[dim] for part in parts):
        return None
    return (*axes[:dim], ((len(parts), False), *axes[dim]), *axes[dim + 1 :])


def _cut(
    name: str, args: tuple, kwargs: dict[str, Any], axes: Axes, result: Any, shape: tuple
) -> Outcome:
    across = Finding("cut", name, shape)
    if name in ("getitem", "setitem"):
        found = indexed(axes, shape, args[1])
        if found is None or isinstance(found, str):
            if found == "across":
                return across
            return None
        if name == "getitem":
            return [(result, found)]
        return None
    if name == "glu":
        (dim,) = _dims(args, kwargs, 1, -1, len(axes))
        half = split_axes.cut(axes, dim, 0, shape[dim] // 2)
        if half is None:
            return across
        return [(result, half)]
    if name in ("unbind", "select"):
        (dim,) = _dims(args, kwargs, 1, 0, len(axes))
        if split_axes.is_split(axes, [dim]):
            return across
        if name == "select":
            pieces = [result]
        elif isinstance(result, (tuple, list)):
            pieces = list(result)
        else:
            pieces = []
        return [(piece, split_axes.without(axes, [dim])) for piece in pieces]
    if name in ("narrow", "index_select"):
        (dim,) = _dims(args, kwargs, 1, 0, len(axes))
        if not split_axes.is_split(axes, [dim]):
            return [
                (result, (*axes[:dim], *split_axes.plain([result.shape[dim]]), *axes[dim + 1 :]))
            ]
        if result.shape != shape:
            return across
        return [(result, axes)]
    (dim,) = _dims(args, kwargs, 2, 0, len(axes))
    start = 0
    found_pieces: Followed = []
    for piece in result:
        found = split_axes.cut(axes, dim, start, start + piece.shape[dim])
        if found is None:
            return across
        found_pieces.append((piece, found))
        start += piece.shape[dim]
    return found_pieces


def indexed(axes: Axes, shape: Sequence[int], index: Any) -> Axes | str | None:
    """Axes of `x[index]`; "across" where it takes columns by number; None: not followed."""
    if not isinstance(index, tuple):
        index = (index,)
    # a mask or a tensor of numbers: which columns it takes is not known without reading it
    for i in index:
        is_plain = i is None or i is Ellipsis or isinstance(i, (int, slice))
        if not is_plain or isinstance(i, bool):
            return None
    indexed_dims = sum(i is not None and i is not Ellipsis for i in index)
    if Ellipsis not in index:
        index = (*index, Ellipsis)
    result: list[Any] = []
    dim = 0
    for i in index:
        if i is None:
            result.append(())
        elif i is Ellipsis:
            result.extend(axes[dim : dim + len(axes) - indexed_dims])
            dim += len(axes) - indexed_dims
        elif isinstance(i, int):
            if split_axes.is_split(axes, [dim]):
                return "across"
            dim += 1
        else:
            start, stop, step = i.indices(shape[dim])
            if not split_axes.is_split(axes, [dim]):
                size = len(range(start, stop, step))
                result.extend(split_axes.plain([size]))
            elif step != 1:
                found = split_windows.strided(axes, dim, i, shape[dim])
                if found is None or isinstance(found, str):
                    return found
                result.append(found)
            else:
                cut_axes = split_axes.cut(axes, dim, start, stop)
                if cut_axes is None:
                    return "across"
                result.append(cut_axes[dim])
            dim += 1
    return tuple(result)
