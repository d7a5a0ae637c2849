"""What a region must leave alone and put back: memory, random numbers, autocast, the stage, hooks, DDP."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from core.autograd import StageContext, WeightGradBag, apply_recompute, deferred_linear, recompute
from tests.autograd.tiny import parameter


def saved_bytes(run):
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
        out = run()
    return sum(sizes), out


def test_only_the_input_is_kept():
    mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.Tanh())
    inside = []
    mlp[1].register_forward_hook(lambda module, args, out: inside.append(weakref.ref(out)))
    x = torch.randn(16, 8, requires_grad=True)
    plain, _ = saved_bytes(lambda: mlp(x))
    inside.clear()
    ours, y = saved_bytes(lambda: recompute(mlp, x))
    assert ours == x.nbytes
    assert plain > 5 * ours
    assert [ref() for ref in inside] == [None]
    y.sum().backward()
    assert len(inside) == 2
    assert inside[1]() is None  # the second run's activations are gone as well


def test_a_region_keeps_no_argument_but_through_autograd():
    """A pack hook (offloading) must be able to move the input away."""
    x = torch.randn(4, 4, requires_grad=True)
    h = x.exp()
    alive = weakref.ref(h)
    moved = lambda t: (t.data.clone(), t.requires_grad)  # noqa: E731
    sine = lambda h: h.sin()  # noqa: E731
    recompute(sine, x)  # the first time it is watched
    with torch.autograd.graph.saved_tensors_hooks(moved, lambda pair: pair[0]):
        y = recompute(sine, h)
    del h
    gc.collect()
    assert alive() is None
    y.sum().backward()
    assert torch.equal(x.grad, x.detach().exp().cos() * x.detach().exp())


def test_the_region_dies_with_its_backward():
    """No cycle keeps activations or the bag until a garbage collection."""
    gc.disable()
    try:
        mlp = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        refs = []
        x = torch.randn(3, 4, requires_grad=True)
        h = x * 1
        refs.append(weakref.ref(h))
        y = recompute(mlp, h)
        refs.append(weakref.ref(y))
        y.sum().backward()
        del h, y
        assert [ref() for ref in refs] == [None, None]
    finally:
        gc.enable()


def test_the_users_random_numbers_go_on_undisturbed():
    x = torch.randn(8, 8, requires_grad=True)

    def run(call):
        torch.manual_seed(1)
        y = call(lambda x: F.dropout(x, 0.5), x)
        between = torch.rand(2)
        y.sum().backward()
        return y.detach(), between, torch.rand(2), torch.random.get_rng_state()

    plain, ours = run(lambda fn, x: fn(x)), run(recompute)
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


@pytest.mark.parametrize("failing", ["first", "second"])
def test_a_failure_puts_everything_back(failing):
    stage, bag, w = StageContext(), WeightGradBag(), parameter(4, 4)
    runs = []

    def fn(x):
        runs.append(1)
        if len(runs) == (1 if failing == "first" else 2):
            stage.microbatch = -1
            torch.rand(3)
            raise KeyError("broken")
        return deferred_linear(x, w, stage=stage)

    stage.begin(seed=1, step=2, microbatch=3, bag=bag)
    x = torch.randn(2, 4, requires_grad=True)
    if failing == "first":
        with pytest.raises(KeyError, match="broken"):
            recompute(fn, x, stage=stage, parameters=[w])
        return
    y = recompute(fn, x, stage=stage, parameters=[w])
    stage.begin(seed=4, step=5, microbatch=6)
    before, random = stage.snapshot(), torch.get_rng_state()
    with pytest.raises(KeyError, match="broken"):
        y.sum().backward()
    assert stage.snapshot() == before
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.is_grad_enabled()
    assert len(bag) == 0
    assert recompute(lambda x: x * 2, x).requires_grad  # not taken for a part of the failed region


def autocast_step(call, inside, shared):
    """A region and a head under autocast, and backward inside or outside of it: output and gradients."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).float()
    head = nn.Linear(4, 4).float()
    if shared:
        head.weight = model[0].weight
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = call(model, torch.randn(3, 4, dtype=torch.float32))
        loss = head(y).float().square().sum()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return y, [p.grad for p in (*model.parameters(), *head.parameters())]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_autocast_is_as_in_the_first_run(inside, shared):
    """Also with backward under autocast, or a weight shared with the outside: older torch cut such parameters off,
    by remembering 16-bit copies made without grad mode."""
    plain, expected = autocast_step(lambda model, x: model(x), inside, shared)
    ours, grads = autocast_step(recompute, inside, shared)
    assert ours.dtype == plain.dtype == torch.bfloat16
    assert torch.equal(ours, plain)
    for a, b in zip(grads, expected, strict=True):
        # plain sums both uses of a shared weight in 16 bits, a region each in 16 and their sum in 32
        torch.testing.assert_close(a, b, rtol=0.02 * shared, atol=0.05 * shared)


def test_no_autocast_in_a_region_from_outside_of_it():
    """Backward under autocast of a region that ran without: the second run is without, too."""
    seen, lin = [], nn.Linear(4, 4).float()
    y = recompute(lambda x: seen.append(torch.is_autocast_enabled("cpu")) or lin(x),
                  torch.randn(3, 4, dtype=torch.float32), parameters=list(lin.parameters()))  # fmt: skip
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y.sum().backward()
        assert torch.is_autocast_enabled("cpu")
    assert seen == [False, False]


def test_meta_tensors():
    lin = nn.Linear(4, 3, device="meta")
    y = recompute(lin, torch.empty(2, 4, device="meta"))
    y.sum().backward()
    assert (y.shape, lin.weight.grad.shape) == ((2, 3), (3, 4))


def test_a_region_in_a_region_runs_twice_not_thrice():
    runs, w = [], nn.Parameter(torch.ones(3))

    def inner(x):
        runs.append("inner")
        return x * w

    def outer(x):
        runs.append("outer")
        return recompute(inner, x, parameters=[w]).exp()

    x = torch.zeros(3, requires_grad=True)
    recompute(outer, x, parameters=[w]).sum().backward()
    assert runs == ["outer", "inner"] * 2
    assert torch.equal(x.grad, torch.ones(3))


def test_post_accumulate_hooks_fire_once_per_parameter():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    shared, fired = parameter(4, 4), []
    for name, p in [("shared", shared), *model.named_parameters()]:
        p.register_post_accumulate_grad_hook(lambda p, name=name: fired.append(name))

    def fn(x):
        return model(x @ shared) @ shared

    recompute(fn, torch.randn(2, 4), parameters=[shared, *model.parameters()]).sum().backward()
    assert sorted(fired) == sorted(["shared", *dict(model.named_parameters())])


def test_tensor_hooks_and_module_hooks():
    """Hooks of the region itself fire once, those of its parts once per run."""
    model, calls = nn.ModuleList([nn.Sequential(nn.Linear(4, 4))]), []
    model[0].register_forward_hook(lambda *_: calls.append("region"))
    model[0].register_full_backward_hook(lambda *_: calls.append("backward"))
    model[0][0].register_forward_hook(lambda *_: calls.append("part"))
    apply_recompute(model, "layer")
    x = torch.randn(2, 4, requires_grad=True)
    x.register_hook(lambda g: calls.append("gradient"))
    model[0](x).sum().backward()
    assert calls == ["part", "region", "part", "backward", "gradient"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(3)])
        self.blocks[2][2].weight = self.blocks[0][0].weight  # shared by two regions

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x


def gradients_under_ddp(policy):
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    net = Net()
    apply_recompute(net, policy)
    fired = []
    for name, p in net.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: fired.append(name))
    ddp = DistributedDataParallel(net, bucket_cap_mb=1e-4)
    torch.manual_seed(10 + dist.get_rank())
    for _ in range(2):
        ddp(torch.randn(5, 4)).square().sum().backward()
    assert sorted(fired) == sorted([name for name, _ in net.named_parameters()] * 2)
    return [p.grad.tolist() for p in net.parameters()]


def test_ddp_on_two_ranks(ranks):
    """DDP's buckets are reduced in backward, while regions run again inside it."""
    plain, ours = ranks(gradients_under_ddp, "none", world=2), ranks(gradients_under_ddp, "layer", world=2)
    assert ours == plain
    assert ours[0] == ours[1]


@pytest.mark.parametrize(("rate", "expected"), [(0.0, 0), (0.5, 2)], ids=["draws-nothing", "draws"])
def test_generators_are_set_only_where_the_first_run_drew(monkeypatch, rate, expected):
    """Set to the first run's state and back again."""
    layers = (nn.Dropout(rate), nn.Linear(8, 4)) if rate else (nn.Linear(8, 4),)
    module, x = nn.Sequential(*layers), torch.randn(4, 8, requires_grad=True)
    recompute(module, x).sum().backward()  # its first run is watched
    calls, real = [], torch.set_rng_state
    monkeypatch.setattr(torch, "set_rng_state", lambda state: calls.append(state) or real(state))
    x.grad, state = None, torch.get_rng_state()
    y = recompute(module, x)
    assert torch.equal(torch.get_rng_state(), state) == (rate == 0.0)
    y.sum().backward()
    assert len(calls) == expected
    found, x.grad = x.grad, None
    real(state)
    module(x).sum().backward()
    assert torch.equal(found, x.grad)
