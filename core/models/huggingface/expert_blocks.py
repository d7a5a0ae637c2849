"""Experts of Hugging Face models: files hold a matrix per expert, transformers (from 5) one stack for all in memory.

Ours are [E, 2, f, h] (gate, then up) and [E, h, f]; a rank's box holds whole experts.
"""

from collections.abc import Iterator

from core.models.huggingface.blocks import Block, Kind
from core.parallel_state.layout import Slices
from core.transformer.transformer_config import TransformerConfig


def _apart(names: tuple[str, ...], box: Slices, config: TransformerConfig) -> Iterator[Block]:
    experts, *rest = box
    for expert in range(experts.start, experts.stop):
        yield Block(names[expert], tuple(rest), (expert - experts.start,))


def _gates_apart(names: tuple[str, ...], box: Slices, config: TransformerConfig) -> Iterator[Block]:
    """names: the gates of all experts, then the ups of all."""
    experts, halves, *rest = box
    count = len(names) // 2
    for expert in range(experts.start, experts.stop):
        for half in range(halves.start, halves.stop):
            ours = (expert - experts.start, half - halves.start)
            yield Block(names[half * count + expert], tuple(rest), ours)


def _stacked(names: tuple[str, ...], box: Slices, config: TransformerConfig) -> Iterator[Block]:
    yield Block(names[0], box, ())


def _gates_stacked(
    names: tuple[str, ...], box: Slices, config: TransformerConfig
) -> Iterator[Block]:
    experts, halves, width, columns = box
    for half in range(halves.start, halves.stop):
        first = half * config.moe_ffn
        rows = slice(first + width.start, first + width.stop)
        ours = (slice(None), half - halves.start)
        yield Block(names[0], (experts, rows, columns), ours)


def _count(config: TransformerConfig) -> int:
    assert config.num_moe_experts is not None
    return config.num_moe_experts


# a matrix per expert, in the order of the experts; of gates and ups all gates first
experts = Kind(_apart, lambda hf_shape, config: (_count(config), *hf_shape))
expert_gate_up = Kind(_gates_apart, lambda hf_shape, config: (_count(config), 2, *hf_shape))
# one tensor for all: [E, h, f], and [E, 2 f, h] with all gates of an expert before its ups
stacked_experts = Kind(_stacked, lambda hf_shape, config: hf_shape)
stacked_gate_up = Kind(
    _gates_stacked, lambda hf_shape, config: (hf_shape[0], 2, config.moe_ffn, hf_shape[2])
)
