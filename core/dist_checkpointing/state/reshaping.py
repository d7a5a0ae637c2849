"""An array taken as of another shape: which boxes of it fill a box of that shape. Nothing is copied."""

from collections.abc import Iterator
from itertools import pairwise, product
from math import prod

from torch import Tensor

from core.parallel_state.flat import Box, extent, flat_boxes, slices

Shape = tuple[int, ...]


def reshaped(wanted: Shape, shape: Shape) -> Shape:
    """`wanted` with its -1 replaced. Raises ValueError: it has another number of elements, or cuts across dims."""
    rest = -prod(wanted)
    full = tuple(prod(shape) // rest if n == -1 and rest > 0 else n for n in wanted)
    if wanted.count(-1) > 1 or prod(full) != prod(shape) or any(n < 1 for n in full):
        raise ValueError(f"{shape} has {prod(shape)} elements, {wanted} has {abs(prod(full))}; give another shape")
    _refined(_long(shape), _long(full))
    return full


def straight(shape: Shape, view: Shape, box: Box, memory: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """(box of an array of `shape`, the memory of that extent) that together fill `memory`, which is the box of the
    same array taken as of shape `view`. Each is one box on both sides."""
    parts, of_array, of_view = _refined(_long(shape), _long(view))
    long = [n > 1 for n in view]
    memory = memory[tuple(slice(None) if is_long else 0 for is_long in long)]
    wanted = [interval for interval, is_long in zip(box, long, strict=True) if is_long]
    cuts = [flat_boxes(tuple(parts[a:b]), *cut) for (a, b), cut in zip(of_view, wanted, strict=True)]
    for fine in product(*map(_counted, cuts)):
        held = memory[tuple(slice(start, stop) for _, start, stop in fine)]
        at: Box = tuple(interval for piece, _, _ in fine for interval in piece)
        yield from _merged(shape, parts, of_array, at, held.view(extent(at)))


def _long(shape: Shape) -> Shape:
    """Without dims of one element, which lie nowhere."""
    return tuple(n for n in shape if n > 1)


Spans = list[tuple[int, int]]  # of each dim, which of the finer dims it is made of


def _refined(a: Shape, b: Shape) -> tuple[list[int], Spans, Spans]:
    """The dims of which both shapes are made. Raises ValueError: there are none."""
    edges = sorted({prod(shape[dim:]) for shape in (a, b) for dim in range(len(shape))} | {1}, reverse=True)
    if any(n % m for n, m in pairwise(edges)):
        raise ValueError(f"{a} as {b} cuts across dims; only dims that are split or merged are read in parts")
    parts = [n // m for n, m in pairwise(edges)]

    def spans(shape: Shape) -> Spans:
        ends = [edges.index(prod(shape[dim:])) for dim in range(len(shape))] + [len(parts)]
        return list(pairwise(ends))

    return parts, spans(a), spans(b)


def _counted(boxes: list[Box]) -> Iterator[tuple[Box, int, int]]:
    """Boxes that follow each other in memory, each with its first element and its end."""
    start = 0
    for box in boxes:
        yield box, start, (start := start + prod(extent(box)))


def _merged(shape: Shape, parts: list[int], spans: Spans, box: Box, held: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """A box of the finer dims, and its memory, as boxes of the array: dims that cannot be one are walked through."""
    walked = [_walked(parts[a:b], box[a:b], held.stride()[a:b]) for a, b in spans]
    loops = [product(*(range(*cut) for cut in box[a : a + n])) for (a, _), n in zip(spans, walked, strict=True)]
    for at in product(*map(list, loops)):
        found: list[tuple[int, int]] = []
        inner: list[tuple[int, int]] = []
        for (a, b), single in zip(spans, at, strict=True):
            fine = [(i, i + 1) for i in single] + list(box[a + len(single) : b])
            inner += fine
            start = 0
            for (first, _), n in zip(fine, parts[a:b], strict=True):
                start = start * n + first
            found.append((start, start + prod(extent(tuple(fine)))))
        cut = held[slices(tuple((i - o, j - o) for (i, j), (o, _) in zip(inner, box, strict=True)))]
        dims = iter(found)
        whole = tuple(next(dims) if n > 1 else (0, 1) for n in shape)
        yield whole, cut.view(extent(whole))


def _walked(sizes: list[int], box: Box, strides: tuple[int, ...]) -> int:
    """How many of the dims that make one are walked through, so that the rest is one interval, in memory too."""
    for dim in range(len(sizes) - 1, 0, -1):
        rows, inner = extent(box)[dim - 1 : dim + 1]
        cut = rows > 1 and any(n != size for n, size in zip(extent(box)[dim:], sizes[dim:], strict=True))
        if cut or (rows > 1 and strides[dim - 1] != strides[dim] * inner):
            return dim
    return 0
