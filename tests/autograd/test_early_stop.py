"""The second run of a region leaves out its last product, exactly where nobody can tell."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from core.autograd import Comm, StageContext, WeightGradBag, apply_recompute, deferred_linear, recompute, reroute
from tests.autograd.tiny import close, parameter


class Products(TorchDispatchMode):
    """Counts matrix products, also those inside a tensor without a value."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)
        return func(*args, **(kwargs or {}))


class Layer(nn.Module):
    """Two linears and a tail."""

    def __init__(self, tail):
        super().__init__()
        self.up, self.down, self.tail = nn.Linear(4, 8), nn.Linear(8, 4), tail
        self.scale = nn.Parameter(torch.randn(4))
        self.register_buffer("mean", torch.zeros(4))
        self.kept, self.log = None, []

    def forward(self, x):
        return self.tail(self, x, self.down(F.gelu(self.up(x))))


def products(layer, stage, x):
    """Gradients, buffers, and how many products (forward, I) a step of the region took."""
    stage.begin(seed=0, step=0, microbatch=0, bag=(bag := WeightGradBag()))
    torch.manual_seed(1)
    leaf = x.clone().requires_grad_()
    with Products() as forward:
        out = layer(leaf)
    gy = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    gc.disable()
    try:
        with Products() as backward:
            out.backward(gy)
    finally:
        gc.enable()
    bag.run()
    stage.release()
    found = [leaf.grad, *(p.grad for p in layer.parameters()), layer.mean.clone()]
    layer.zero_grad()
    return [out.detach(), *(g for g in found if g is not None)], forward.count, backward.count


def normalized(self, x, y):
    with torch.no_grad():
        self.mean.add_(y.mean((0, 1)))
    return x + y


def overwritten(self, x, y):
    z = x * 1.0
    out = z + y
    z.mul_(2)
    return out + z


def inplace(self, x, y):
    view = y.view(-1, 4)
    y += x
    return view.view(x.shape) * 2


def kept(self, x, y):
    self.kept = y.detach()
    return x + y


def kept_before_a_write(self, x, y):
    x = x * 1.0
    self.kept = (x + y).detach()
    out = x + 2 * y
    x.add_(1)
    return out


def as_numpy(self, x, y):
    self.log.append(float(y.detach().numpy().sum()))
    return x + y


def pointer(self, x, y):
    self.log.append(y.data_ptr() != 0)
    return x + y


def branch(self, x, y):
    return x + y if y.sum() > 0 else x - y


def odd(self, x, y):
    parts = y.unflatten(-1, (2, 2)).transpose(-1, -2).flatten(-2).unsqueeze(0).squeeze(0)
    return (2.5 * x - parts / 3).to(torch.float32).double()


FREE = {
    "residual": lambda self, x, y: x + y,
    "nothing": lambda self, x, y: y,
    "views and sums": odd,
    "dropout": lambda self, x, y: x + F.dropout(y, 0.3) + F.dropout(x, 0.3),
    "fused dropout": lambda self, x, y: x + torch.native_dropout(y, 0.3, True)[0],
    "twice": lambda self, x, y: x + y + y.clone(),
    "a residual that is overwritten": overwritten,
}
USED = {
    "multiplied by a parameter": lambda self, x, y: x + y * self.scale,
    "gated": lambda self, x, y: x * y,
    "nonlinear": lambda self, x, y: x + torch.tanh(y),
    "a running mean": normalized,
    "in place": inplace,
    "kept": kept,
    "kept, then its operand overwritten": kept_before_a_write,
    "numpy": as_numpy,
    "pointer": pointer,
    "branch": branch,
    "sorted": lambda self, x, y: y.sort(-1).values + x,
}


def pair(tail):
    torch.manual_seed(0)
    ours, plain = Layer(tail), Layer(tail)
    plain.load_state_dict(ours.state_dict())
    stage = StageContext()
    holder = nn.ModuleList([ours])
    reroute(holder, stage)
    return ours, plain, stage, holder


@pytest.mark.parametrize("name", [*FREE, *USED])
def test_every_tail_has_the_plain_gradients(name):
    ours, plain, stage, holder = pair({**FREE, **USED}[name])
    other = StageContext()
    x = torch.randn(2, 3, 4)
    apply_recompute(holder, "layer", stage=stage)
    for attempt in range(4):
        found, once, again = products(ours, stage, x)
        ours.mean.zero_(), plain.mean.zero_()
        expected, _, backward = products(plain, other, x)
        for mine, theirs in zip(found, expected, strict=True):
            close(mine, theirs)
        if name in FREE:  # I makes dx of both linears, W their dW: of the second forward only `up`; all at first
            assert (once, again) == (2, backward - 2 + 1 + (attempt == 0))
        elif attempt == 3:
            assert again >= backward - 2 + 2
    assert type(ours.kept) is not torch.Tensor or ours.kept.isfinite().all()


def test_what_was_kept_is_right():
    ours, plain, stage, holder = pair(kept)
    apply_recompute(holder, "layer", stage=stage)
    x = torch.randn(2, 3, 4)
    products(ours, stage, x), products(plain, StageContext(), x)
    close(ours.kept + 0, plain.kept)
    close(torch.from_numpy(ours.kept.numpy()), plain.kept)


def test_numbers_logged_in_both_runs_are_equal():
    ours, _, stage, holder = pair(as_numpy)
    apply_recompute(holder, "layer", stage=stage)
    products(ours, stage, torch.randn(2, 3, 4))
    assert len(ours.log) == 2 and ours.log[0] == ours.log[1]


@pytest.mark.parametrize("bias", [False, True])
def test_the_collectives_of_the_product_go_with_it(bias):
    """Row-parallel: the second all-reduce of a recomputed layer is saved."""
    calls = []
    comm = Comm(after_forward=lambda y: calls.append("reduce") or y.clone())
    w, b, stage = parameter(3, 4), parameter(3) if bias else None, StageContext()
    x, r = torch.randn(2, 4, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    region = lambda x, r: r + deferred_linear(torch.tanh(x), w, b, stage=stage, comm=comm)  # noqa: E731
    wanted = [x, r, w] + [b] * bias
    expected = torch.autograd.grad(region(x, r).square().sum(), wanted)
    recompute(region, x, r, parameters=wanted[2:])  # the first time it is watched
    calls.clear()
    found = torch.autograd.grad(recompute(region, x, r, parameters=wanted[2:]).square().sum(), wanted)
    assert calls == ["reduce"]
    for mine, theirs in zip(found, expected, strict=True):
        close(mine, theirs)


def test_a_product_that_is_only_garbage_on_one_rank_calls_no_collective():
    calls, kept = [], []
    comm = Comm(after_forward=lambda y: calls.append("reduce") or y.clone())
    w, stage = parameter(3, 4), StageContext()
    x, r = torch.randn(2, 4, requires_grad=True), torch.randn(2, 3, requires_grad=True)

    def region(x, r):
        y = deferred_linear(torch.tanh(x), w, stage=stage, comm=comm)
        kept.append(y)
        if len(kept) == 1:
            kept.clear()
        return r + y

    recompute(region, x, r, parameters=[w])  # the first time it is watched
    calls.clear(), kept.append(None)
    loss = recompute(region, x, r, parameters=[w]).square().sum()
    torch.autograd.grad(loss, [x, r, w])
    assert calls == ["reduce"] and len(kept) == 3
    assert torch.equal(kept[2] + 0, kept[1] + 0) and calls == ["reduce"] * 2, "who looks gets the value"


def test_outputs_in_any_form_and_regions_in_regions():
    w, v, stage = parameter(4, 4), parameter(4, 4), StageContext()
    x = torch.randn(2, 4, requires_grad=True)

    def inner(x):
        return x + deferred_linear(x.tanh(), w, stage=stage)

    def outer(x):
        h = recompute(inner, x, parameters=[w])
        y = deferred_linear(h, v, stage=stage)
        return {"a": (y, h), "b": [y.view(-1), x], "c": 3}

    def loss(out):
        return out["a"][0].square().sum() + out["a"][1].sum() + (out["b"][0].sin() * out["b"][1].reshape(-1)).sum()

    expected = torch.autograd.grad(loss(outer(x)), (x, w, v))
    recompute(outer, x, parameters=[w, v])  # the first time it is watched
    with Products() as forward:
        total = loss(recompute(outer, x, parameters=[w, v]))
    with Products() as backward:
        found = torch.autograd.grad(total, (x, w, v))
    for mine, theirs in zip(found, expected, strict=True):
        close(mine, theirs)
    assert (forward.count, backward.count) == (2, 1 + 4)  # again only the first; dx and dW of both


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dtypes_of_a_tail_with_numbers(dtype):
    """A Python number must not widen what it multiplies."""
    stage, w = StageContext(), nn.Parameter(torch.randn(4, 4, dtype=dtype))
    x = torch.randn(2, 4, dtype=dtype, requires_grad=True)
    region = lambda x: 2.5 * deferred_linear(x, w, stage=stage) + 1  # noqa: E731
    expected = torch.autograd.grad(region(x), (x, w), torch.ones_like(x))
    found = torch.autograd.grad(recompute(region, x, parameters=[w]), (x, w), torch.ones_like(x))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_retained_graph_stops_early_each_time():
    ours, _, stage, holder = pair(FREE["residual"])
    apply_recompute(holder, "layer", stage=stage)
    stage.begin(seed=0, step=0, microbatch=0, bag=WeightGradBag())
    ours(torch.randn(2, 3, 4))  # the first time it is watched
    loss = ours(torch.randn(2, 3, 4)).sum()
    counts = []
    for _ in range(3):
        with Products() as backward:
            loss.backward(retain_graph=True)
        counts.append(backward.count)
    assert counts == [2] * 3  # `up` again, and dx of `down`


class Frozen(nn.Module):
    """Its last product is read after its input was written into, which a frozen weight allows."""

    def __init__(self, in_place):
        super().__init__()
        self.up, self.down, self.in_place = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False), in_place

    def forward(self, x):
        h = self.up(x)
        y = self.down(h)
        h = h.relu_() if self.in_place else h.relu()
        return torch.sin(y) + h


def test_the_input_of_a_frozen_linear_written_after_it():
    found = []
    for in_place in (False, True):
        torch.manual_seed(0)
        model, stage = nn.ModuleList([Frozen(in_place).double()]), StageContext()
        reroute(model, stage)
        apply_recompute(model, "layer", stage=stage)
        stage.begin(seed=0, step=0, microbatch=0, bag=(bag := WeightGradBag()))
        model[0](torch.randn(3, 4).double()).square().sum().backward()
        bag.run()
        found.append(model[0].up.weight.grad)
    close(found[1], found[0])
