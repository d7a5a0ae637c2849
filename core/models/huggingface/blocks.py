"""How a tensor of ours is made of Hugging Face tensors: the same blocks serve to read, to slice and to write.

Ours are fused and grouped for tensor parallelism: query, key and value are one [g, r+2, d, h] (g query groups, r
query heads per group, d head size), the two halves of a gated MLP one [2, f, h]. Hugging Face's are [out, in]
matrices, except GPT-2's, which are [in, out].
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from core.parallel_state.layout import Slices
from core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class Block:
    """`hf_slices` of the Hugging Face tensor `name` hold the numbers of `ours`, counted within the requested box."""

    name: str
    hf_slices: Slices
    ours: Slices
    transposed: bool = False

    def to_ours(self, values: Tensor, box: Tensor) -> None:
        """Copy the Hugging Face block into the tensor of our box."""
        target = box[self.ours]
        if self.transposed:
            values = values.t()
        target.copy_(values.reshape(target.shape))

    def to_huggingface(self, box: Tensor, values: Tensor) -> None:
        """Copy ours into the Hugging Face block."""
        if self.transposed:
            values = values.t()
        values.copy_(box[self.ours].reshape(values.shape))


Shape = tuple[int, ...]


@dataclass(frozen=True)
class Kind:
    """One memory layout of a parameter in Hugging Face files.

    blocks(Hugging Face names, a box of ours, the model) -> the blocks of which the box is made. our_shape(shape of
    the first Hugging Face tensor, the model) -> the shape of ours.
    """

    blocks: Callable[[tuple[str, ...], Slices, TransformerConfig], Iterator[Block]]
    our_shape: Callable[[Shape, TransformerConfig], Shape]


def _same(names: tuple[str, ...], box: Slices, config: TransformerConfig) -> Iterator[Block]:
    yield Block(names[0], box, ())


def _transposed(names: tuple[str, ...], box: Slices, config: TransformerConfig) -> Iterator[Block]:
    yield Block(names[0], box[::-1], (), transposed=len(box) == 2)


def _qkv_apart(names: tuple[str, ...], box: Slices, config: TransformerConfig) -> Iterator[Block]:
    yield from _qkv(names, (0, 0, 0), box, config, transposed=False)


def _qkv_in_rows(names: tuple[str, ...], box: Slices, config: TransformerConfig) -> Iterator[Block]:
    yield from _qkv(names * 3, _qkv_starts(config), box, config, transposed=False)


def _qkv_in_columns(
    names: tuple[str, ...], box: Slices, config: TransformerConfig
) -> Iterator[Block]:
    yield from _qkv(names * 3, _qkv_starts(config), box, config, transposed=True)


def _qkv_shape(columns: Shape, config: TransformerConfig) -> Shape:
    return (
        config.groups,
        config.num_attention_heads // config.groups + 2,
        config.head_size,
        *columns,
    )


def _qkv_starts(config: TransformerConfig) -> tuple[int, int, int]:
    queries = config.num_attention_heads * config.head_size
    keys = config.groups * config.head_size
    return 0, queries, queries + keys


def _qkv(
    names: tuple[str, ...],
    starts: tuple[int, ...],
    box: Slices,
    config: TransformerConfig,
    *,
    transposed: bool,
) -> Iterator[Block]:
    groups, heads, dims, *rest = box  # bias: no rest
    per_group = config.num_attention_heads // config.groups
    has_whole_groups = (heads.start, heads.stop) == (0, per_group + 2)
    has_whole_heads = (dims.start, dims.stop) == (0, config.head_size)
    assert has_whole_groups and has_whole_heads, "tensor parallelism splits groups, never a head"
    # of a group: per_group query heads, one key head, one value head
    for name, start, first, count in zip(
        names, starts, (0, per_group, per_group + 1), (per_group, 1, 1), strict=True
    ):
        width = count * config.head_size
        rows = slice(start + groups.start * width, start + groups.stop * width)
        hf_slices = (rows, *rest)
        flip = transposed and bool(rest)
        ours = (slice(None), slice(first, first + count))
        yield Block(name, hf_slices[::-1] if flip else hf_slices, ours, flip)


def _gate_up_apart(
    names: tuple[str, ...], box: Slices, config: TransformerConfig
) -> Iterator[Block]:
    yield from _gate_up(names, 0, box)


def _gate_up_in_rows(
    names: tuple[str, ...], box: Slices, config: TransformerConfig
) -> Iterator[Block]:
    yield from _gate_up(names * 2, config.ffn, box)


def _gate_up(names: tuple[str, ...], offset: int, box: Slices) -> Iterator[Block]:
    halves, width, *rest = box
    for half in range(halves.start, halves.stop):
        rows = slice(half * offset + width.start, half * offset + width.stop)
        yield Block(names[half], (rows, *rest), (half - halves.start,))


def _heads(names: tuple[str, ...], box: Slices, config: TransformerConfig) -> Iterator[Block]:
    heads, dims, *rest = box
    assert dims.start == 0, "tensor parallelism splits heads, never a head"
    rows = slice(heads.start * dims.stop, heads.stop * dims.stop)
    yield Block(names[0], (rows, *rest), ())


def _heads_shape(hf_shape: Shape, config: TransformerConfig) -> Shape:
    heads = config.num_attention_heads
    return (heads, hf_shape[0] // heads, *hf_shape[1:])


# the tensor itself
same = Kind(_same, lambda hf_shape, config: hf_shape)
# GPT-2's Conv1D keeps [in, out]
transposed = Kind(_transposed, lambda hf_shape, config: hf_shape[::-1])
# query, key and value, a tensor each: rows are (group, head of the group, dim)
qkv = Kind(_qkv_apart, lambda hf_shape, config: _qkv_shape(hf_shape[1:], config))
# all queries, then all keys, then all values: in the rows of one tensor (Phi-3), or in its columns (GPT-2)
qkv_fused = Kind(_qkv_in_rows, lambda hf_shape, config: _qkv_shape(hf_shape[1:], config))
qkv_fused_transposed = Kind(
    _qkv_in_columns, lambda hf_shape, config: _qkv_shape(hf_shape[:-1], config)
)
# [a, d, c] of latent attention: rows are (head, dim)
heads = Kind(_heads, _heads_shape)
# the two halves of a gated MLP, a tensor each; or all gates, then all ups, in the rows of one (Phi-3)
gate_up = Kind(_gate_up_apart, lambda hf_shape, config: (2, *hf_shape))
gate_up_fused = Kind(_gate_up_in_rows, lambda hf_shape, config: (2, config.ffn, *hf_shape[1:]))
