"""What a data-parallel step costs in Python calls, which no noise can blur."""

import pytest

from benchmarks.data_parallel_sides import python_calls
from benchmarks.llama import Shape

SHAPE = Shape(hidden=64, layers=4, heads=8, kv_heads=4, ffn=96, seq=32, vocab=128)


@pytest.mark.parametrize("stage", range(4))
def test_python_calls_of_a_step(ranks, stage):
    """Forward, backward, AdamW and `zero_grad` of four layers in a plain loop; FSDP2 has 8,600."""
    for calls in ranks(python_calls, f"zero{stage}", SHAPE):
        assert calls > 300, "the count itself is broken"
        assert calls <= 2000
