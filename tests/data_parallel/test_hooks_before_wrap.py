"""Hooks that a program put on parameters before `DataParallel` had them: they act on a replica's own gradients, as
under DDP, of our linears too, which add their gradient past autograd where nobody looks."""

import pytest
import torch

from core.data_parallel import DataParallel
from tests.models.gpt import batch, gpt
from tests.pool import RankError
from tests.states import state

LIMIT = 1e-4


def clamp(parameter):
    if parameter.grad is not None:
        parameter.grad.clamp_(-LIMIT, LIMIT)


def trained(zero, passes=1):
    """Weights of a GPT whose gradients are clamped as they come; zero: None without DataParallel."""
    ps = state()
    model = gpt(parallel=ps)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(clamp)
    if zero is not None:
        shard = DataParallel(model, ps, zero_stage=zero)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(3):
        for _ in range(passes):
            tokens, labels = batch()
            model(tokens, labels=labels).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if zero is not None:
        shard.remove()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("zero", range(4))
def test_a_hook_that_clamps_acts(ranks, zero):
    (plain,) = ranks(trained, None, world=1)
    # replicas with the same rows: their mean is one's
    for ours in ranks(trained, zero, world=2):
        for name, weight in plain.items():
            torch.testing.assert_close(ours[name], weight, atol=1e-12, rtol=0)


def test_a_hook_that_would_see_sums_of_ranks_is_refused(ranks):
    """In the second backward of an accumulation `.grad` holds what the ranks may have summed already."""
    with pytest.raises(RankError, match="asked for inside of a backward"):
        ranks(trained, 1, 2, world=2)
