"""What every room of the checkpoint knows of an array: one global tensor, whoever holds which shard of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from core.parallel_state.flat import Box

Index = tuple[int, ...]  # of a cell in its array's grid

# torch's name -> (zarr data type, fill value): what plain zarr-python cannot name is stored as its bits
STORED_DTYPES: dict[str, tuple[str, Any]] = {
    "float64": ("float64", "NaN"),
    "float32": ("float32", "NaN"),
    "float16": ("float16", "NaN"),
    "bfloat16": ("uint16", 0x7FC0),
    "float8_e4m3fn": ("uint8", 0x7F),
    "float8_e5m2": ("uint8", 0x7F),
    "int64": ("int64", -(2**63)),
    "int32": ("int32", -(2**31)),
    "int16": ("int16", -(2**15)),
    "int8": ("int8", -(2**7)),
    "uint64": ("uint64", 2**64 - 1),
    "uint32": ("uint32", 2**32 - 1),
    "uint16": ("uint16", 2**16 - 1),
    "uint8": ("uint8", 0xFF),
    "bool": ("bool", False),
    "complex128": ("complex128", ["NaN", "NaN"]),
    "complex64": ("complex64", ["NaN", "NaN"]),
}
# bytes of an element, by zarr data type
ITEMSIZE = {
    "complex128": 16,
    "complex64": 8,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "bool": 1,
}


@dataclass(frozen=True)
class ArrayInfo:
    """One array of a checkpoint in canonical form. Pure, hashable, the same on every rank.

    shape: true global shape, the stack axis first if there is one. dtype: torch's name, `bfloat16`.
    tp_dim: the dim that tensor parallelism cuts, None if it cuts none. stacked: dim 0 counts layers.
    ragged: `tp_dim` may be padded in memory (a vocabulary), so its cells need not divide it.
    stack: the name of the list of layers that dim 0 counts, `decoder.layers`, where it is known.
    layers: the numbers of its rows' layers and depth: how many layers the model has, where only some of them have
    this parameter. axis: what cuts `tp_dim`: "ep" of experts.
    """

    shape: tuple[int, ...]
    dtype: str
    tp_dim: int | None = None
    stacked: bool = False
    ragged: bool = False
    stack: str = ""
    layers: tuple[int, ...] = ()
    depth: int = 0
    axis: str = "tp"

    @property
    def layer_numbers(self) -> Sequence[int]:
        """The number of each row's layer in the model; of a stack."""
        return self.layers or range(self.shape[0])

    @property
    def model_layers(self) -> int:
        """How many layers the model has; of a stack."""
        return self.depth or self.shape[0]

    @property
    def cut_dim(self) -> int | None:
        """The dim that tensor ranks divide among them: not that of experts."""
        if self.axis == "tp":
            return self.tp_dim
        return None

    @property
    def itemsize(self) -> int:
        """Bytes of one element on disk."""
        return ITEMSIZE[STORED_DTYPES[self.dtype][0]]

    def to_json(self) -> list[Any]:
        """Plain values, for comparing catalogues across ranks."""
        more = [list(self.layers), self.depth, self.axis]
        return [
            list(self.shape),
            self.dtype,
            self.tp_dim,
            self.stacked,
            self.ragged,
            self.stack,
            *more,
        ]

    @classmethod
    def from_json(cls, value: list[Any]) -> "ArrayInfo":
        """The inverse of `to_json`."""
        shape, dtype, tp_dim, stacked, ragged, stack, layers, depth, axis = value
        return cls(tuple(shape), dtype, tp_dim, stacked, ragged, stack, tuple(layers), depth, axis)


# key (the array's path in the group) -> what it is
Arrays = Mapping[str, ArrayInfo]
# key -> the disjoint boxes of it that one rank holds
Holdings = Mapping[str, tuple[Box, ...]]


def boxes_from_json(boxes: list[list[list[int]]]) -> tuple[Box, ...]:
    """Boxes as they read back from JSON, which has lists only."""
    return tuple([tuple([(start, stop) for start, stop in box]) for box in boxes])
