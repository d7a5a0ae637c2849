"""Buffers that forwards write, where an R runs the forward again: it is no further forward of the step."""

import warnings

import pytest
import torch
from torch import nn

from core.data_parallel import DataParallel
from core.pipeline import Pipeline
from tests.pipeline.tiny import rows, squares
from tests.states import state

WIDTH, MICROBATCHES = 6, 4


class Counting(nn.Module):
    """A table that nobody writes, and a count of forwards (which no output depends on)."""

    def __init__(self, writes):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, WIDTH).double()
        self.register_buffer("table", torch.arange(WIDTH, dtype=torch.float64))
        if writes:
            self.register_buffer("count", torch.zeros(3, dtype=torch.float64))

    def forward(self, x):
        if hasattr(self, "count"):
            self.count += 1
        return self.linear(x * self.table)


def trained(writes, recompute):
    """(warnings, broadcasts over the data group, the count, gradient) of three steps."""
    ps = state()
    module = Counting(writes)
    shard = DataParallel(module, ps, zero_stage=1)
    how = {"schedule": "gpipe", "num_microbatches": MICROBATCHES, "recompute": recompute, "grad_sync": shard}
    pipe = Pipeline([module], ps=ps, **how)
    sent, send = [], shard.copies.send
    shard.copies.send = lambda: sent.append(1) or send()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(3):
            shard.zero_grad()
            pipe.step(rows(MICROBATCHES * 2, seed=10 * step + ps.rank), squares)
            shard.copies.send()
    gradient = torch.cat([buffer.own_gradients for buffer in shard.buffers])
    count = float(module.count[0]) if writes else None
    return [str(w.message) for w in told if "DataParallel" in str(w.message)], len(sent), count, gradient


@pytest.mark.parametrize("writes", [False, True], ids=["reads", "writes"])
def test_a_recomputed_forward_sends_no_buffers(ranks, writes):
    plain = ranks(trained, writes, "none", world=2)
    again = ranks(trained, writes, "stage", world=2)
    for found, expected in zip(again, plain, strict=True):
        assert found[0] == expected[0] == []
        assert found[1] == expected[1], "as many times as without recomputation"
        assert found[2] == expected[2] == (3 * MICROBATCHES if writes else None)
        assert torch.equal(found[3], expected[3])
