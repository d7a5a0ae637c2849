"""A bag takes thunks during its own I only; weights that are written meanwhile; second derivatives."""

import copy
import pickle

import pytest
import torch
from torch import nn

from core.autograd import StageContext, WeightGradBag, reroute
from core.parallel_state.collectives import all_gather_objects
from core.pipeline import Pipeline
from core.tensor_parallel import copy_to_tensor_region
from tests.models.gpt import batch, gpt
from tests.states import state


def begun(open_):
    stage, bag = StageContext(), WeightGradBag(open=open_)
    stage.begin(seed=0, step=0, microbatch=0, bag=bag)
    return stage, bag


@pytest.mark.parametrize("open_", [True, False])
def test_a_closed_bag_takes_nothing_and_nothing_is_lost(open_):
    stage, bag = begun(open_)
    module = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3))
    plain = copy.deepcopy(module)
    reroute(module, stage)
    ids = torch.tensor([1, 2, 1])
    module(ids).square().sum().backward()
    plain(ids).square().sum().backward()
    assert len(bag) == 2 * open_
    bag.run()
    assert all(torch.allclose(p.grad, q.grad) for p, q in zip(module.parameters(), plain.parameters(), strict=True))


def test_a_copy_of_a_context_has_no_bag():
    stage, _ = begun(True)
    module = nn.Linear(2, 2)
    reroute(module, stage)
    for made in (copy.deepcopy(stage), pickle.loads(pickle.dumps(stage))):
        assert made.bag is None and made.driven
    twin = copy.deepcopy(module)
    twin(torch.randn(3, 2)).sum().backward()
    assert twin.weight.grad is not None and module.weight.grad is None


@pytest.mark.parametrize("times", [0, 1])
def test_a_weight_that_is_written_before_backward_is_noticed(times):
    stage, bag = begun(True)
    module = nn.Linear(3, 3)
    reroute(module, stage)
    x = torch.randn(2, 3, requires_grad=True)
    y = module(x)
    with torch.no_grad():
        for _ in range(times):
            module.weight.mul_(0.5)
    if times:
        with pytest.raises(RuntimeError, match=r"\[3, 3\] was written 1 times between a forward and its backward"):
            y.sum().backward()
    else:
        y.sum().backward()
        assert len(bag) == 1


def test_an_optimizer_in_backward_is_refused_with_several_microbatches(single):
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))

    def step(p):
        with torch.no_grad():
            p.sub_(0.1 * p.grad)
        p.grad = None

    for p in module.parameters():
        p.register_post_accumulate_grad_hook(step)
    pipe = Pipeline([module], ps=single, schedule="gpipe", num_microbatches=2)
    with pytest.raises(RuntimeError, match="num_microbatches=1"):
        pipe.step(torch.randn(4, 3), lambda y, _: (y.square().sum(), len(y)))
    one = Pipeline([copy.deepcopy(module)], ps=single, schedule="gpipe", num_microbatches=1)
    one.step(torch.randn(4, 3), lambda y, _: (y.square().sum(), len(y)))


def test_second_derivatives_of_a_rerouted_module_are_torchs():
    stage, bag = begun(True)
    ours = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    plain, x = copy.deepcopy(ours), torch.randn(5, 3, dtype=torch.float64)
    reroute(ours, stage)
    found = []
    for module in (ours, plain):
        first = torch.autograd.grad(module(x).pow(3).sum(), list(module.parameters()), create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), list(module.parameters())))
    assert all(torch.allclose(a, b, atol=1e-14) for a, b in zip(*found, strict=True)) and not len(bag)


@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_second_derivatives_of_our_models_are_refused(style):
    model, (tokens, labels) = gpt(style), batch()
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.autograd.grad(model(tokens, labels=labels).mean(), list(model.parameters())[-1], create_graph=True)


def collective_twice():
    ps = state(tp=2)
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="a collective of tensor parallelism has no second derivative"):
        torch.autograd.grad(copy_to_tensor_region(x, ps.group("tp")).square().sum(), x, create_graph=True)
    return all_gather_objects(1, ps.world)


def test_second_derivatives_of_collectives_are_refused(ranks):
    ranks(collective_twice, world=2)
