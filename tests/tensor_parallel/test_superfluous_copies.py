"""`copy_to_tensor_region` where ranks go on alike, and losses over a part of the classes."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from core.tensor_parallel import (
    ColumnParallelLinear,
    Placement,
    copy_to_tensor_region,
    reduce_from_tensor_region,
    vocab_parallel_cross_entropy,
)
from tests.states import state


def said(is_split):
    ps = state(tp=2)
    place = Placement.of(ps)
    place.group.compared_copies = 0  # other tests compare in these ranks, too
    torch.manual_seed(0)
    table = nn.Parameter(torch.randn(12, 8, dtype=torch.float64))
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    h = copy_to_tensor_region(x.tanh(), place.group)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        if is_split:
            part = F.linear(h, table.chunk(2)[place.rank]).logsumexp(-1).exp()
            reduce_from_tensor_region(part, place.group).log().mean().backward()
        else:
            F.linear(h, table).logsumexp(-1).mean().backward()
    return [str(w.message) for w in found]


@pytest.mark.parametrize("is_split", [True, False])
def test_a_copy_before_a_whole_head_is_told(ranks, is_split):
    for messages in ranks(said, is_split, world=2):
        assert len(messages) == (not is_split)
        assert is_split or "adds it up: gradients before it are 2 times too large" in messages[0]


def refused():
    place = Placement.of(state(tp=2))
    head = ColumnParallelLinear(8, 24, place=place, bias=False)
    x, labels = torch.randn(2, 3, 8), torch.tensor([[1, 2, 23], [3, 5, 9]])
    assert vocab_parallel_cross_entropy(head(x), labels, place.group).isfinite().all()
    with pytest.raises(ValueError, match=r"12 columns, this tensor rank.s part of 24, and no group"):
        vocab_parallel_cross_entropy(head(x), labels)
    for label in (-1, 24):
        wrong = labels.masked_fill(labels == 5, label)
        with pytest.raises(ValueError, match=f"labels holds {label}, valid are 0 to 23, or -100"):
            vocab_parallel_cross_entropy(head(x), wrong, place.group)
    ignored = vocab_parallel_cross_entropy(head(x), wrong, place.group, ignore_index=24)
    assert not ignored[1, 1] and ignored[0, 0]


def test_labels_that_are_no_class_and_a_forgotten_group_are_refused(ranks):
    ranks(refused, world=2)
