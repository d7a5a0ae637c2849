"""A head and a table of one weight, tied in either direction, are one process's: padded rows are no classes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from core.tensor_parallel import (
    ColumnParallelLinear,
    Placement,
    VocabParallelEmbedding,
    copy_to_tensor_region,
    fill_from_full,
    full_tensor,
    gather_from_tensor_region,
    vocab_parallel_cross_entropy,
)
from tests.states import state

CLASSES, WIDTH = 60, 8


class Tied(nn.Module):
    def __init__(self, place, table_is_the_heads, gather_output):
        super().__init__()
        self.table = VocabParallelEmbedding(CLASSES, WIDTH, place=place)
        self.head = ColumnParallelLinear(WIDTH, CLASSES, bias=False, place=place, gather_output=gather_output)
        if table_is_the_heads:
            self.table.weight = self.head.weight
        else:
            self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.table(ids))


def compare(table_is_the_heads, gather_output, tp):
    ps = state(tp=tp)
    model = Tied(Placement.of(ps), table_is_the_heads, gather_output)
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(CLASSES, WIDTH, generator=generator, dtype=torch.float64)
    fill_from_full(model.table.weight, whole, parallel=ps)
    ids = torch.randint(CLASSES, (5, 3), generator=generator)
    labels = torch.randint(CLASSES, (5, 3), generator=generator)
    logits = model(ids)
    if gather_output:
        assert logits.shape[-1] == CLASSES
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    else:
        loss = vocab_parallel_cross_entropy(logits, labels, ps.group("tp")).mean()
    loss.backward()
    alone = whole.clone().requires_grad_()
    expected = F.cross_entropy((alone[ids] @ alone.T).flatten(0, 1), labels.flatten())
    expected.backward()
    assert torch.allclose(loss, expected, rtol=1e-12)
    gradient = full_tensor(model.table.weight.grad, like=model.table.weight, parallel=ps)[:CLASSES]
    assert torch.allclose(gradient, alone.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("gather_output", [True, False])
@pytest.mark.parametrize("table_is_the_heads", [True, False])
@pytest.mark.parametrize("tp", [1, 2])
def test_tied_tables_are_one_processs(ranks, table_is_the_heads, gather_output, tp):
    ranks(compare, table_is_the_heads, gather_output, tp, world=2)


def tied_by_hand(tp):
    ps = state(tp=tp)
    place = Placement.of(ps)
    table = VocabParallelEmbedding(CLASSES, WIDTH, place=place)
    whole = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    fill_from_full(table.weight, whole, parallel=ps)
    ids = torch.arange(24).view(8, 3)
    x = copy_to_tensor_region(torch.tanh(table(ids)), place.group)
    logits = gather_from_tensor_region(F.linear(x, table.weight), place.group)
    loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten() * 7 % CLASSES)
    expected = F.cross_entropy((torch.tanh(whole[ids]) @ whole.T).flatten(0, 1), ids.flatten() * 7 % CLASSES)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_head_tied_by_hand_has_no_columns_of_padding(ranks, tp):
    ranks(tied_by_hand, tp, world=2)
