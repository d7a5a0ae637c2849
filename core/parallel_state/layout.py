"""One fact, one place: how a parameter is spread over the mesh.

Gradient sums, the gradient norm, initial values, names and checkpoint boxes are all derived from this value,
so they cannot disagree.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from torch import Tensor

# of a whole tensor; pairs of bounds, which hash and are told between ranks, are a `flat.Box`
Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Layout:
    """How one full tensor of `shape` lies over the ranks. Pure, hashable, the same on every rank.

    shape: the true global shape; padded rows are not in it.
    split: axis -> the dim that it cuts into equal contiguous parts.
    partial: group names over which gradients arrive as partial sums, beyond the data axes which always are
        (sequence-parallel norms: tp; an embedding tied over pipeline stages: embedding).
    padding: dim -> rows that exist only in memory, after the true ones, so that the dim divides.

    Raises ValueError: an axis that both splits the tensor and holds partial gradients, a dim out of range.
    """

    shape: tuple[int, ...]
    split: Mapping[str, int] = field(default_factory=dict)
    partial: frozenset[str] = frozenset()
    padding: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "split", dict(self.split))
        object.__setattr__(self, "partial", frozenset(self.partial))
        object.__setattr__(self, "padding", {dim: n for dim, n in self.padding.items() if n})
        if contradictory := self.partial & self.split.keys():
            raise ValueError(
                f"axis {sorted(contradictory)} cannot both split a tensor and hold partial gradients"
            )
        if missing_dims := [
            d for d in (*self.split.values(), *self.padding) if not 0 <= d < len(self.shape)
        ]:
            raise ValueError(f"dim {missing_dims} does not exist in shape {self.shape}")

    def __hash__(self) -> int:
        return hash(
            (self.shape, *sorted(self.split.items()), self.partial, *sorted(self.padding.items()))
        )

    def padded_shape(self) -> tuple[int, ...]:
        """The full shape in memory, padding included."""
        return tuple(n + self.padding.get(dim, 0) for dim, n in enumerate(self.shape))

    def local_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape that every rank holds in memory, padding included; `sizes` maps axis -> size.

        Raises ValueError: a dim that does not divide over its axes.
        """
        shape = list(self.padded_shape())
        for axis, dim in self.split.items():
            size = sizes.get(axis, 1)
            if shape[dim] % size:
                raise ValueError(
                    f"dim {dim} of {self.padded_shape()} does not divide over {axis}={size}; "
                    f"use a size that divides {shape[dim]}"
                )
            shape[dim] //= size
        return tuple(shape)

    def box(self, coordinate: Mapping[str, int], sizes: Mapping[str, int]) -> Slices:
        """The true elements of the full tensor that lie at `coordinate`: slices, empty where all is padding."""
        local = self.local_shape(sizes)
        start = [0] * len(self.shape)
        for dim in range(len(self.shape)):
            block = self.padded_shape()[dim]
            # several axes on one dim: the first named is outermost
            for axis, split_dim in self.split.items():
                if split_dim == dim:
                    block //= sizes.get(axis, 1)
                    start[dim] += coordinate.get(axis, 0) * block
        box = []
        for begin, size, full_size in zip(start, local, self.shape, strict=True):
            # rows beyond the true shape are padding
            end = min(begin + size, full_size)
            box.append(slice(min(begin, end), end))
        return tuple(box)

    def owned_by(self, coordinate: Mapping[str, int]) -> bool:
        """True on exactly one rank per distinct shard: who counts it in norms and writes it to disk.

        `coordinate` holds the positions along which the parameter may repeat (dp, cp, tp or ep, edp, and for one
        that is tied over `embedding` that too; not pp: stages hold different parameters).
        """
        # the axes along which several ranks hold the same elements; the rank at 0 on all of them owns these
        repeats: tuple[str, ...] = ("edp",) if "ep" in self.split else ("dp", "cp", "tp")
        # only then does the last stage repeat the first's
        if "embedding" in self.partial:
            repeats += ("embedding",)
        return all(coordinate.get(axis, 0) == 0 for axis in repeats if axis not in self.split)

    @property
    def gradient_groups(self) -> tuple[str, ...]:
        """The groups over which this parameter's gradient is summed, data axes first."""
        data = "edp" if "ep" in self.split else "dp-cp"
        return (data, *sorted(self.partial))

    @property
    def numel(self) -> int:
        """True elements of the full tensor."""
        return prod(self.shape)


def set_layout(parameter: Tensor, layout: Layout) -> None:
    """State how `parameter` is spread; done once, where the parameter is made."""
    parameter.parallel_layout = layout  # type: ignore[attr-defined]  # (`Tensor.layout` is torch.strided)


def layout_of(parameter: Tensor) -> Layout:
    """The layout of a parameter; one without (a foreign module's) is replicated everywhere."""
    layout = getattr(parameter, "parallel_layout", None)
    if layout is not None:
        return layout
    return Layout(tuple(parameter.shape))


def has_layout(parameter: Tensor) -> bool:
    """Whether it was stated how `parameter` is spread."""
    return getattr(parameter, "parallel_layout", None) is not None


def true_part(
    local: Tensor, layout: Layout, coordinate: Mapping[str, int], sizes: Mapping[str, int]
) -> Tensor:
    """The view of a local tensor (parameter, gradient, moment) without its padded rows."""
    if not layout.padding:
        return local
    return local[tuple(slice(0, s.stop - s.start) for s in layout.box(coordinate, sizes))]
