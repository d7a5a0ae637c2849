"""Who looks at activations between a column and a row linear changes nothing, whatever form a call has."""

import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from core.parallel_state.by_hand import split_axes
from core.parallel_state.by_hand.split_tensor import SplitTensor
from core.tensor_parallel.column_factors import ColumnFactors
from core.tensor_parallel.split_activations import SplitActivations

CALLS = {
    "input by keyword": lambda x: torch.transpose(input=x, dim0=0, dim1=1),
    "all by keyword": lambda x: torch.narrow(input=x, dim=0, start=1, length=2),
    "chunk by keyword": lambda x: torch.chunk(input=x, chunks=2, dim=0)[1],
    "slices of tensors": lambda x: x[torch.tensor(0) : torch.tensor(2)],
    "a mask": lambda x: x[x > 0],
    "indices in a list": lambda x: x[[0, 2]],
    "einsum by numbers": lambda x: torch.einsum(x, [0, 1, 2], torch.ones(8), [2], [0, 1]),
    "einsum, an ellipsis": lambda x: torch.einsum("...h,h->...", x, torch.ones(8)),
    "a product with a vector": lambda x: x @ torch.ones(8),
    "a vector": lambda x: x.flatten() @ torch.ones(96),
    "linear by keyword": lambda x: F.linear(input=x, weight=torch.ones(2, 8)),
    "stack": lambda x: torch.stack([x, x], -1),
    "unfold": lambda x: x.unfold(-1, 2, 2),
    "roll": lambda x: x.roll(1, -1),
    "a sum with dtype": lambda x: x.sum(dtype=torch.float64),
    "max of two": lambda x: torch.max(x, torch.zeros(8)),
    "max over a dim, by names": lambda x: x.max(dim=0).values,
    "tensordot": lambda x: torch.tensordot(x, torch.ones(8, 2), dims=1),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "scatter": lambda x: torch.zeros(4, 3, 8).index_add(0, torch.tensor([0, 1, 2, 3]), x),
    "cat by keyword": lambda x: torch.cat(tensors=[x, x], dim=-1),
    "pad": lambda x: F.pad(x, (0, 1)),
    "a scalar": lambda x: x.new_tensor(3.0) * x[0, 0, 0],
    "movedim": lambda x: torch.movedim(x, (0, 1), (1, 0)),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2),
    "sdpa by keyword": lambda x: F.scaled_dot_product_attention(query=x, key=x, value=x),
    "two dims at once": lambda x: x.softmax(dim=1).norm(dim=(0, 1)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("split_dim", [0, 1])
def test_a_call_gives_what_it_gives_without(call, split_dim):
    whole = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(0))
    seen, x = SplitActivations(SimpleNamespace(size=2), compares_factors=True), whole.clone()
    seen.mark(x, split_axes.axes_of_columns(x.shape, (2, 4), split_dim))
    assert type(x) is SplitTensor
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # which are told is another test's
        found = call(x)
    seen.make_plain()
    assert torch.equal(found, call(whole)) and type(found) is torch.Tensor


# of heads [1, 4 of 8, 3, 2]: what a program does, and whether its numbers are noted as of other heads each
HEADS = torch.arange(4.0)
NOTED = {
    "a bias of each head": (lambda x: x + HEADS[:, None, None], True),
    "slopes in a mask": (
        lambda x: F.scaled_dot_product_attention(x, x, x, HEADS.view(4, 1, 1).expand(4, 3, 3)),
        True,
    ),
    "slopes in a mask with infinities": (
        lambda x: F.scaled_dot_product_attention(x, x, x, HEADS.view(4, 1, 1) + torch.ones(3, 3).tril().log()),
        True,
    ),
    "a causal mask": (lambda x: F.scaled_dot_product_attention(x, x, x, torch.ones(3, 3).tril().bool()), False),
    "a scale": (lambda x: x * torch.tensor(0.5), False),
    "an equal one of each head": (lambda x: x * torch.full((4, 1, 1), 0.5), False),
    "signs that alternate": (lambda x: x * torch.tensor([1.0, -1, 1, -1]).view(4, 1, 1), False),
    "along the sequence": (lambda x: x * torch.arange(3.0)[:, None], False),
    "inside a head": (lambda x: x * torch.arange(2.0), False),
    "flat, the same in each head": (lambda x: flat(x) * torch.arange(2.0).repeat(4), False),
    "flat, other ones": (lambda x: flat(x) * torch.arange(8.0), True),
    "a parameter": (lambda x: x * HEADS[:, None, None].clone().requires_grad_(), False),
    "slopes and products at once": (
        lambda x: torch.baddbmm(HEADS.view(4, 1, 1), x.flatten(0, 1), x.flatten(0, 1).mT),
        True,
    ),
    "a bias of many positions": (lambda x: x.repeat(1, 1, 1, 1 << 19) * long_bias(), True),
    "heads by mask": (lambda x: x[:, HEADS > 2], True),
    "heads in a list": (lambda x: x[:, [0, 2]], True),
    "no heads in a list": (lambda x: x[:, []], False),
    "batches in a list": (lambda x: x[[0]], False),
    "halves of each head exchanged": (lambda x: flat(x)[..., [1, 0, 3, 2, 5, 4, 7, 6]], False),
    "heads exchanged": (lambda x: flat(x)[..., [2, 3, 0, 1, 6, 7, 4, 5]], True),
    "written by mask": (lambda x: x.masked_fill_((HEADS > 2)[:, None, None], 0.0), True),
    "written by number": (lambda x: x.index_fill_(1, torch.tensor([0]), 0.0), True),
    "positions by number": (lambda x: x.index_fill_(2, torch.tensor([0]), 0.0), False),
    "values written": (lambda x: x.__setitem__((slice(None), slice(None), 0, 0), HEADS), True),
    "values written after a number": (lambda x: x.__setitem__((0, slice(None), 0, 0), torch.ones(4)), False),
}


def long_bias():
    """[4, 3, 2^20], which differs from head to head in the second half of the positions only."""
    return HEADS[:, None, None] * (torch.arange(1 << 20) >= 1 << 19).expand(1, 3, -1)


def flat(x):
    return x.transpose(1, 2).flatten(2)


@pytest.mark.parametrize(("call", "is_noted"), NOTED.values(), ids=NOTED)
def test_numbers_of_heads_are_noted_where_they_differ_from_head_to_head(call, is_noted):
    factors = ColumnFactors()
    seen = SplitActivations(SimpleNamespace(size=2), compares_factors=True)
    seen._factors = factors
    x = torch.randn(1, 4, 3, 2, generator=torch.Generator().manual_seed(0))
    seen.mark(x, split_axes.of_dims(x.shape, {1}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call(x)
    assert any(bool(pair.any()) for pair, _ in factors._noted) == is_noted
    assert all(pair.isfinite().all() for pair, _ in factors._noted)
