"""A masked loss over context ranks: divided by a rank's own tokens it is told, by those of all ranks it is right."""

import re
import warnings

import pytest
import torch
import torch.distributed as dist

from core.parallel_state import context_batch
from tests.states import state

S = 8
UNEQUAL = torch.tensor([[1.0, 1, 1, 1, 0, 0, 0, 1]] * 2)  # rank 0 of 2 holds rows 0 1 6 7, rank 1 2 3 4 5


def rows(mask):
    ps = state(cp=2)
    batch = {"tokens": torch.zeros(2, S, dtype=torch.int64), "loss_mask": mask, "losses": None}
    mine = context_batch(batch, ps)
    losses = torch.linspace(0.0, 1.0, 2 * S // 2).view(2, S // 2).requires_grad_()
    return losses, mine["loss_mask"]


OWN = {
    "sum / sum": lambda loss, mask: (loss * mask).sum() / mask.sum(),
    "torch.sum": lambda loss, mask: torch.sum(loss.view(-1) * mask.view(-1)) / torch.sum(mask),
    "float, clamp": lambda loss, mask: (loss * mask.float()).sum() / mask.float().sum().clamp(min=1),
    "eps": lambda loss, mask: (loss * mask).sum().div(mask.sum() + 1e-8),
    "bool": lambda loss, mask: (loss * mask).sum() / mask.bool().sum(),
    "in place": lambda loss, mask: (loss * mask).sum().div_(mask.sum()),
    "count_nonzero": lambda loss, mask: (loss * mask).sum() / torch.count_nonzero(mask),
    "selected": lambda loss, mask: loss[mask.bool()].mean(),
    "masked_select": lambda loss, mask: torch.masked_select(loss, mask > 0).mean(),
}


def by_all_tokens(loss, mask):
    n = mask.sum()
    dist.all_reduce(n)
    return (loss * mask).sum() * 2 / n


def by_ours(loss, mask):
    from core.parallel_state.collectives import all_reduce

    n = mask.sum()
    all_reduce(n, state(cp=2).group("cp"))
    return (loss * mask).sum() * 2 / n


def in_megatron(loss, mask):
    both = torch.cat([(loss * mask).sum().view(1), mask.sum().view(1)]).detach()
    dist.all_reduce(both)
    return (loss * mask).sum() / both[1]


RIGHT = {
    "all_reduce": by_all_tokens,
    "ours": by_ours,
    "megatron": in_megatron,
    "logged": lambda loss, mask: (loss * mask).sum() + 0 * ((loss * mask).sum().detach() / mask.sum()),
    "by the width": lambda loss, mask: (loss * mask).sum() / mask.shape[1],
    "sum of selected": lambda loss, mask: loss[mask.bool()].sum(),
}


def heard(loss_of, mask):
    """(messages, gradient, gradient with a plain mask)"""
    losses, mine = rows(mask)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (gradient,) = torch.autograd.grad(loss_of(losses, mine), losses)
    (plain,) = torch.autograd.grad(loss_of(losses, mine.as_subclass(torch.Tensor)), losses)
    assert type(gradient) is torch.Tensor
    return [str(w.message) for w in caught], gradient, plain


def all_heard(table, mask):
    return {name: heard(loss_of, mask) for name, loss_of in table.items()}


def own(mask):
    return all_heard(OWN, mask)


def right(mask):
    return all_heard(RIGHT, mask)


def test_a_ranks_own_tokens_are_told(ranks):
    for found in ranks(own, UNEQUAL):
        for name, (messages, gradient, plain) in found.items():
            assert len(messages) == 1 and re.search("of this context rank's own rows", messages[0]), name
            assert torch.equal(gradient, plain), name


@pytest.mark.parametrize("job, mask", [(right, UNEQUAL), (own, torch.ones(2, S)), (right, torch.ones(2, S))])
def test_right_programs_hear_nothing(ranks, job, mask):
    for found in ranks(job, mask):
        for name, (messages, gradient, plain) in found.items():
            assert not messages, name
            assert torch.equal(gradient, plain), name
