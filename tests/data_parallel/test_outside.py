"""Parameters that share torch's optimizer with a `DataParallel` but lie outside it: summed, or refused."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core.data_parallel import DataParallel
from core.parallel_state.layout import Layout, set_layout
from tests.states import state


def trained(zero_stage, summed):
    """A body under `DataParallel`, and a head beside it; weights of the head after three steps."""
    torch.manual_seed(0)
    body, head = nn.Linear(3, 3), nn.Linear(3, 1)
    DataParallel(body, state(), zero_stage=zero_stage)
    called = nn.parallel.DistributedDataParallel(head) if summed == "ddp" else head
    optimizer = torch.optim.AdamW([*body.parameters(), *head.parameters()], lr=0.1)
    x = torch.randn(3, 4, 3, generator=torch.Generator().manual_seed(dist.get_rank()))
    for step in range(3):
        called(body(x[step]).tanh()).square().mean().backward()
        if summed == "by hand":
            for parameter in head.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
    return head.weight.detach().clone()


def refused(zero_stage):
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=r"2 that lie in no DataParallel; .* number 0 of them, of shape \[1, 3\]"):
        trained(zero_stage, None)


def plain():
    torch.manual_seed(0)
    body, head = nn.Linear(3, 3), nn.Linear(3, 1)
    optimizer = torch.optim.AdamW([*body.parameters(), *head.parameters()], lr=0.1)
    x = [torch.randn(3, 4, 3, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    for step in range(3):
        head(body(torch.cat([rows[step] for rows in x])).tanh()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return head.weight.detach()


def of_experts():
    """What each replica holds other experts of is compared with nobody."""
    body, experts = nn.Linear(3, 3), nn.Linear(3, 1)
    DataParallel(body, state())
    set_layout(experts.weight, Layout((2, 3), split={"ep": 0}))
    optimizer = torch.optim.SGD([*body.parameters(), experts.weight], lr=0.1)
    (experts(body(torch.ones(2, 3))).sum() * (1 + dist.get_rank())).backward()
    optimizer.step()


def test_experts_are_each_ranks_own(ranks):
    ranks(of_experts)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_head_that_nobody_sums_is_refused_before_an_update(ranks, zero_stage):
    ranks(refused, zero_stage)


@pytest.mark.parametrize("summed", ["ddp", "by hand"])
@pytest.mark.parametrize("zero_stage", [0, 1])
def test_a_head_that_is_summed_is_right(ranks, zero_stage, summed):
    expected = ranks(plain, world=1)[0]
    for weight in ranks(trained, zero_stage, summed):
        torch.testing.assert_close(weight, expected, rtol=1e-10, atol=1e-12)


def beside_what_is_frozen(zero_stage):
    """A probe: the body's gradients are nobody's, and the head's the program's."""
    torch.manual_seed(0)
    body, head = nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 1)
    DataParallel(body, state(), zero_stage=zero_stage)
    called, before = nn.parallel.DistributedDataParallel(head), head.weight.detach().clone()
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    x = torch.randn(3, 4, 3, generator=torch.Generator().manual_seed(dist.get_rank()))
    for rows in x:
        called(body(rows)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(head.weight, before)
    return head.weight.detach().clone()


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_an_optimizer_beside_a_dataparallel_of_frozen_weights(ranks, zero_stage):
    first, second = ranks(beside_what_is_frozen, zero_stage)
    assert torch.equal(first, second)
