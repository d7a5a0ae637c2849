"""A model that nobody uses any more is freed with its buckets, its optimizer and its hooks."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from core.data_parallel import DataParallel
from core.optimizer import OptimizerConfig, ShardedSGD
from tests.states import state


def trained(zero_stage, sharded):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    wrapped = DataParallel(model, state(), zero_stage=zero_stage)
    if sharded:
        optimizer = ShardedSGD(wrapped, OptimizerConfig(lr=0.1))
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(torch.randn(2, 4)).sum().backward()
    return model, wrapped, [p.grad for p in model.parameters()]


def let_go(zero_stage, sharded):
    gc.collect()
    hooks_before = len(torch_optimizer._global_optimizer_pre_hooks)
    model, wrapped, gradients = trained(zero_stage, sharded)
    references = [weakref.ref(object_) for object_ in (model, wrapped, model[0].weight)]
    del model, wrapped
    gc.collect()
    assert [reference() for reference in references] == [None] * 3
    assert len(torch_optimizer._global_optimizer_pre_hooks) == hooks_before
    assert "gone" in repr(gradients[0])
    with pytest.raises(RuntimeError, match=r"kept longer than its model.* keep p.grad.clone\(\)"):
        gradients[0].norm()


@pytest.mark.parametrize("sharded", [True, False], ids=["ours", "torch"])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_nothing_keeps_a_model(ranks, zero_stage, sharded):
    ranks(let_go, zero_stage, sharded)


def wrapper_dropped(zero_stage):
    """The module alone is kept: its gradients are summed still."""
    model = nn.Linear(2, 1, bias=False)
    DataParallel(model, state(), zero_stage=zero_stage)
    gc.collect()
    x = torch.full((1, 2), 1.0 + torch.distributed.get_rank())
    model(x).sum().backward()
    assert model.weight.grad.tolist() == [[1.5, 1.5]]


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_module_keeps_its_wrapper(ranks, zero_stage):
    ranks(wrapper_dropped, zero_stage)
