"""What rerouting replaces, what it leaves alone, and that nothing of it stays."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from core.autograd import StageContext, WeightGradBag, apply_recompute, has_regions, reroute
from core.tensor_parallel import ColumnParallelLinear
from tests.autograd.tiny import close


class Odd(nn.Linear):
    """A subclass may compute anything."""

    def forward(self, x):
        return 2 * super().forward(x)


def zoo():
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "linear": nn.Linear(4, 4),
            "embedding": nn.Embedding(5, 4),
            "frozen": nn.Linear(4, 4).requires_grad_(False),
            "odd": Odd(4, 4),
            "lazy": nn.LazyLinear(4),
            "quantizable": NonDynamicallyQuantizableLinear(4, 4),
            "complex": nn.Linear(4, 4, dtype=torch.complex128),
            "padded": nn.Embedding(5, 4, padding_idx=0),
            "clipped": nn.Embedding(5, 4, max_norm=1.0),
            "frequent": nn.Embedding(5, 4, scale_grad_by_freq=True),
            "sparse": nn.Embedding(5, 4, sparse=True),
            "bag": nn.EmbeddingBag(5, 4),
            "conv": nn.Conv1d(4, 4, 1),
            "attention": nn.MultiheadAttention(4, 2),
            "ours": ColumnParallelLinear(4, 4),
        }
    )


def rerouted(module):
    return [name for name, m in module.named_modules() if "forward" in m.__dict__]


def test_exactly_these():
    model, stage = zoo(), StageContext()
    classes, keys = {n: type(m) for n, m in model.named_modules()}, list(model.state_dict())
    model["replaced"] = nn.Linear(4, 4)
    mine = model["replaced"].forward = lambda x: x
    handle = reroute(model, stage)
    assert handle.names == ["linear", "embedding", "frozen"]
    assert rerouted(model) == [*handle.names, "replaced"]
    assert {n: type(m) for n, m in model.named_modules() if n != "replaced"} == classes
    assert [k for k in model.state_dict() if "replaced" not in k] == keys
    assert reroute(model, stage).names == []  # once is enough
    handle.remove()
    handle.remove()
    assert rerouted(model) == ["replaced"] and model["replaced"].forward is mine


def test_one_module_and_many_names():
    """The module itself; one that stands twice in the tree."""
    single = nn.Linear(4, 4)
    assert reroute(single, StageContext()).names == [""]
    shared = nn.Linear(4, 4)
    assert reroute(nn.Sequential(shared, shared), StageContext()).names == ["0"]


def test_a_module_that_somebody_else_reduces_is_left_alone():
    """DistributedDataParallel counts gradients in hooks of its own."""
    wrapped = nn.Module.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = nn.Linear(4, 4)
    model = nn.ModuleDict({"outside": nn.Linear(4, 4), "inside": wrapped})
    assert reroute(model, StageContext()).names == ["outside"]


def step(module, stage, x, bagged=True):
    bag = WeightGradBag()
    stage.begin(seed=0, step=0, microbatch=0, bag=bag if bagged else None)
    module.zero_grad()
    y = module(x)
    y.double().square().sum().backward()
    waited = len(bag)
    bag.run()
    stage.release()
    return [y.detach(), *(p.grad for p in module.parameters())], waited


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_defer_into_their_own_stage(duplicate):
    class Owner(nn.Module):
        def __init__(self):
            super().__init__()
            self.stage, self.layer = StageContext(), nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x)

    globals()["Owner"] = Owner
    Owner.__qualname__ = "Owner"
    model = Owner()
    reroute(model, model.stage)
    twin = duplicate(model)
    with torch.no_grad():
        twin.layer.weight.mul_(2)
    x = torch.randn(3, 4)
    mine, waited = step(twin, twin.stage, x)
    assert waited == 1 and twin.stage is not model.stage and model.layer.weight.grad is None
    close(mine[0], F.linear(x, 2 * model.layer.weight, model.layer.bias).detach())
    assert list(twin.state_dict()) == ["layer.weight", "layer.bias"]


def test_without_a_bag_the_modules_own_forward_runs():
    module, stage = nn.Linear(4, 4), StageContext()
    reroute(module, stage)
    assert module(torch.randn(2, 4)).grad_fn.name() == "AddmmBackward0"
    (_, weight, _), waited = step(module, stage, torch.randn(2, 4), bagged=False)
    assert waited == 0 and weight.shape == (4, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast(dtype):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).to(dtype)
    twin, stage, x = copy.deepcopy(model), StageContext(), torch.randn(3, 4, dtype=dtype)
    reroute(model, stage)
    with torch.autocast("cpu", torch.bfloat16):
        mine, waited = step(model, stage, x)
        theirs, _ = step(twin, StageContext(), x)
    assert waited == 2 and mine[0].dtype == theirs[0].dtype
    for a, b in zip(mine, theirs, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("undo", ["regions first", "rerouting first"])
@pytest.mark.parametrize("first", ["regions", "rerouting"])
def test_with_regions_in_any_order(first, undo):
    model, stage = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), StageContext()
    x = torch.randn(3, 4)
    expected, _ = step(model, stage, x)
    puts = {
        "regions": lambda: apply_recompute(model, [nn.Linear], stage=stage),
        "rerouting": lambda: reroute(model, stage),
    }
    order = ["regions", "rerouting"] if first == "regions" else ["rerouting", "regions"]
    handles = {name: puts[name]() for name in order}
    assert has_regions(model)
    for found, waited in [step(model, stage, x)]:
        assert waited == 2
        for mine, theirs in zip(found, expected, strict=True):
            close(mine, theirs)
    one, other = ("regions", "rerouting") if undo == "regions first" else ("rerouting", "regions")
    handles[one].remove()
    found, waited = step(model, stage, x)
    assert (waited, has_regions(model)) == ((2, False) if one == "regions" else (0, True))
    for mine, theirs in zip(found, expected, strict=True):
        close(mine, theirs)
    handles[other].remove()
    assert not rerouted(model) and not has_regions(model)


def test_under_somebody_elses_wrapper_it_falls_silent():
    """An offloader put its own forward around ours; what we take back is ours alone."""
    module, stage = nn.Linear(4, 4), StageContext()
    handle = reroute(module, stage)
    inner = module.forward
    module.forward = outer = lambda x: inner(x) * 2
    x = torch.randn(3, 4)
    (doubled, *_), waited = step(module, stage, x)
    assert waited == 1
    handle.remove()
    assert module.forward is outer
    (again, *_), waited = step(module, stage, x)
    assert waited == 0
    close(again, doubled)


def test_parameters_that_are_replaced_and_frozen_later():
    module, stage, x = nn.Linear(4, 4), StageContext(), torch.randn(3, 4)
    reroute(module, stage)
    module.weight = nn.Parameter(torch.ones(4, 4))
    found, waited = step(module, stage, x)
    assert waited == 1
    close(found[1], (2 * found[0]).t() @ x)
    module.weight.requires_grad_(False)
    (_, frozen, bias), waited = step(module, stage, x)
    assert waited == 0 and frozen is None and bias is not None
    module.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.complex128))
    module.bias = None
    y = module(x.to(torch.complex128))
    assert y.dtype == torch.complex128


def test_a_second_derivative_under_a_bag_goes_through_autograd():
    module, stage = nn.Linear(4, 4), StageContext()
    x = torch.randn(3, 4, requires_grad=True)
    (g,) = torch.autograd.grad(torch.tanh(module(x)).sum(), x, create_graph=True)
    expected = torch.autograd.grad(g.square().sum(), (module.weight, module.bias))
    reroute(module, stage)
    bag = WeightGradBag()
    stage.begin(seed=0, step=0, microbatch=0, bag=bag)
    (g,) = torch.autograd.grad(torch.tanh(module(x)).sum(), x, create_graph=True)
    found = torch.autograd.grad(g.square().sum(), (module.weight, module.bias))
    assert len(bag) == 0
    for mine, theirs in zip(found, expected, strict=True):
        close(mine, theirs)


def test_gradients_that_somebody_asks_for_by_name():
    """torch.autograd.grad for the weight itself must return it and leave no thunk."""
    module, stage, bag = nn.Linear(4, 4), StageContext(), WeightGradBag()
    reroute(module, stage)
    x = torch.randn(3, 4)
    stage.begin(seed=0, step=0, microbatch=0, bag=bag)
    (found,) = torch.autograd.grad(module(x).sum(), module.weight)
    close(found, x.sum(0).expand(4, 4))
    assert len(bag) == 0


@pytest.mark.parametrize("deferring", [False, True])
def test_hooks_on_parameters_of_a_region_run_once(deferring):
    """Also on one that waits in no bag because of them."""

    def step(recomputed):
        torch.manual_seed(3)
        model, stage, log = nn.ModuleList([nn.Linear(4, 4)]), StageContext(), []
        weight = model[0].weight
        weight.register_hook(lambda g: log.append(("tensor", g.sum().item())) or g * 3)
        weight.register_post_accumulate_grad_hook(lambda p: log.append(("after", p.grad.sum().item())))
        if deferring:
            reroute(model, stage)
        if recomputed:
            apply_recompute(model, "layer", stage=stage)
        stage.begin(seed=0, step=0, microbatch=0, bag=WeightGradBag())
        for _ in range(2):
            model[0](torch.ones(2, 4)).square().sum().backward()
        assert len(stage.bag) == 0 and len(weight._backward_hooks) == 1
        return log, weight.grad

    (log, gradient), (plain_log, plain) = step(True), step(False)
    assert log == plain_log and len(log) == 4
    close(gradient, plain)
