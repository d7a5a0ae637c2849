"""The deferring linear inside compiled graphs: the gradients of eager code, in the right bag, or a clear error."""

import copy
import gc
import itertools
import os
import pickle
import shutil
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from core.autograd import (
    Comm,
    StageContext,
    WeightGradBag,
    apply_recompute,
    deferred_embedding,
    deferred_linear,
    reroute,
)
from core.autograd import linear as module_under_test
from tests.autograd.tiny import close, parameter
from tests.marks import thinned
from tests.models.gpt import batch, gpt

COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
BACKENDS = [
    "aot_eager",
    pytest.param(
        "inductor", marks=[pytest.mark.full, pytest.mark.skipif(not COMPILER, reason="no C++ compiler found")]
    ),
]  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of its own compiler


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Layer(nn.Module):
    """Every way to use a linear."""

    def __init__(self, stage, bias=True):
        super().__init__()
        self.stage = stage
        self.a, self.a_bias = parameter(2, 3, 4), parameter(2, 3) if bias else None
        self.b, self.square = parameter(4, 6), parameter(4, 4)
        self.frozen = parameter(4, 4).requires_grad_(False)

    def linear(self, x, weight, bias=None):
        return deferred_linear(x, weight, bias, stage=self.stage)

    def forward(self, x):
        h = self.linear(F.gelu(self.linear(x, self.a, self.a_bias)), self.b)
        h = self.linear(h, self.frozen) + self.linear(h, self.square) + self.linear(h, self.square)
        return self.linear(h.sin(), self.square)


def run(module, stage, inputs, defer):
    """F F, I I, W W: gradients of inputs and parameters, and how many thunks."""
    bags, losses = [], []
    for m, x in enumerate(inputs):
        bags.append(WeightGradBag(checked=True))
        stage.begin(seed=0, step=0, microbatch=m, bag=bags[m] if defer else None)
        losses.append(module(x).square().sum())
    stage.release()
    for loss in reversed(losses):
        loss.backward()
    thunks = [len(bag) for bag in bags]
    for bag in bags:
        bag.run()
    found = {n: getattr(p, "main_grad", p.grad) for n, p in module.named_parameters()}
    found |= {str(i): x.grad for i, x in enumerate(inputs)}
    for t in (*module.parameters(), *inputs):
        t.grad = None
        if hasattr(t, "main_grad"):
            t.main_grad = torch.zeros_like(t)
    return found, thunks


def assert_same(mine, theirs, tolerance=1e-12):
    for name, value in theirs.items():
        assert (mine[name] is None) == (value is None), name
        if value is not None:
            close(mine[name], value, tolerance)


COVER = [(True, False, True), (False, True, False)]
PRODUCT = [
    *COVER,
    *thinned([c for c in itertools.product([True, False], repeat=3) if c not in COVER], 2, [pytest.mark.full]),
]


@pytest.mark.parametrize("defer, main_grad, needs_gradient", PRODUCT)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_and_bags(backend, defer, main_grad, needs_gradient):
    stage = StageContext()
    layer = Layer(stage, bias=needs_gradient)
    if main_grad:
        for p in layer.parameters():
            if p.requires_grad:
                p.main_grad = torch.zeros_like(p)
    inputs = [torch.randn(2, 3, 4, requires_grad=needs_gradient) for _ in range(2)]
    expected, thunks = run(layer, stage, inputs, defer)
    assert thunks == [5 * defer] * 2
    layer.compile(backend=backend)
    for _ in range(2):  # the first call gives the tickets
        found, compiled_thunks = run(layer, stage, inputs, defer)
        assert compiled_thunks == thunks
        assert_same(found, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_silent_trap_the_thunk_of_an_input_without_gradient_is_not_dropped(backend):
    """The first linear of a stage: nobody uses what its backward returns, so a compiler would remove it."""
    stage, linear, bag = StageContext(), nn.Linear(4, 4), WeightGradBag()
    reroute(linear, stage)
    x = torch.randn(3, 4)
    stage.begin(seed=0, step=0, microbatch=0, bag=bag)
    torch.compile(linear, backend=backend, fullgraph=True)(x).sum().backward()
    assert len(bag) == 1 and linear.weight.grad is None
    bag.run()
    close(linear.weight.grad, x.sum(0).expand(4, 4))


@pytest.mark.parametrize("backend", BACKENDS)
def test_silent_trap_two_equal_calls_are_not_merged(backend):
    stage, linear, bag = StageContext(), nn.Linear(4, 4), WeightGradBag()
    reroute(linear, stage)
    x = torch.randn(3, 4, requires_grad=True)
    stage.begin(seed=0, step=0, microbatch=0, bag=bag)
    torch.compile(lambda x: linear(x) + linear(x), backend=backend, fullgraph=True)(x).sum().backward()
    assert len(bag) == 2
    bag.run()
    close(linear.weight.grad, 2 * x.detach().sum(0).expand(4, 4))


@pytest.mark.parametrize("backend", BACKENDS)
def test_held_tensors_are_not_overwritten(backend):
    """A compiler reuses the memory of what it no longer needs; the bag holds copies."""
    stage = StageContext()
    model = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(8, 8), nn.GELU())])
    twin = copy.deepcopy(model)
    reroute(model, stage)
    model.compile(backend=backend, fullgraph=True)
    inputs = [torch.randn(5, 8, requires_grad=True) for _ in range(3)]
    expected, _ = run(twin, StageContext(), inputs, False)
    found, thunks = run(model, stage, inputs, True)
    assert thunks == [4] * 3
    assert_same(found, expected)


def test_layers_of_one_class_share_their_graphs():
    stage = StageContext()
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(12)])
    reroute(model, stage)
    count = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    for layer in model:
        layer.compile(backend=count, fullgraph=True)
    found, thunks = run(model, stage, [torch.randn(3, 4, requires_grad=True) for _ in range(2)], True)
    assert thunks == [12, 12] and count.frame_count <= 2 and found["0"] is not None


def test_autocast():
    stage, linear = StageContext(), nn.Linear(4, 4, dtype=torch.float32)
    x, twin = torch.randn(3, 4, dtype=torch.float32), copy.deepcopy(linear)
    reroute(linear, stage)
    bag = WeightGradBag()
    stage.begin(seed=0, step=0, microbatch=0, bag=bag)
    with torch.autocast("cpu", torch.bfloat16):
        y, z = torch.compile(linear, backend="aot_eager", fullgraph=True)(x), twin(x)
    assert y.dtype == z.dtype == torch.bfloat16
    y.float().square().sum().backward(), z.float().square().sum().backward()
    assert len(bag) == 1
    bag.run()
    for p, q in zip(linear.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=2e-2, atol=2e-2)


def test_what_cannot_be_in_a_graph_breaks_it_and_is_right(monkeypatch):
    """Collectives around the product, embeddings, a torch without registered effects."""
    stage, w, table = StageContext(), parameter(4, 4), parameter(5, 4)
    comm, ids, calls = Comm(after_forward=lambda y: calls.append(1) or y.clone()), torch.tensor([1, 2, 1]), []

    def fn(ids):
        x = deferred_embedding(ids, table, stage=stage)
        return deferred_linear(deferred_linear(x, w, stage=stage, comm=comm).tanh(), w, stage=stage).sum()

    fn(ids).backward()
    expected, w.grad, table.grad = (w.grad, table.grad), None, None
    monkeypatch.setattr(module_under_test, "CAN_COMPILE", False)
    bag = WeightGradBag()
    stage.begin(seed=0, step=0, microbatch=0, bag=bag)
    torch.compile(fn, backend="aot_eager")(ids).backward()
    assert len(bag) == 3 and len(calls) == 2
    bag.run()
    close(w.grad, expected[0]), close(table.grad, expected[1])


def test_a_hook_put_on_later_is_an_error_and_before_is_right():
    stage, seen = StageContext(), []
    linear = nn.Linear(4, 4)
    compiled, x = torch.compile(linear, backend="aot_eager"), torch.randn(3, 4)
    reroute(linear, stage)

    def backward():
        bag = WeightGradBag()
        stage.begin(seed=0, step=0, microbatch=0, bag=bag)
        compiled(x).sum().backward()
        bag.run()

    backward()
    linear.weight.register_hook(lambda g: seen.append(g))
    with pytest.raises(RuntimeError, match="a hook was put on a parameter of shape"):
        backward()
    other = nn.Linear(4, 4)
    other.weight.register_hook(lambda g: seen.append(g))
    reroute(other, stage)
    compiled = torch.compile(other, backend="aot_eager")
    backward()
    assert len(seen) == 1 and seen[0].shape == (4, 4)


def test_copies_and_pickles_are_their_own():
    stage, linear = StageContext(), nn.Linear(4, 4)
    reroute(linear, stage)
    torch.compile(linear, backend="aot_eager")(torch.randn(2, 4)).sum().backward()
    for twin in (copy.deepcopy(linear), pickle.loads(pickle.dumps(linear))):
        assert getattr(twin.weight, "_deferral", None) is None
        inner = twin.forward.__self__.stages[0]
        bag = WeightGradBag()
        inner.begin(seed=0, step=0, microbatch=0, bag=bag)
        twin.zero_grad()
        for _ in range(2):
            torch.compile(twin, backend="aot_eager")(torch.randn(2, 4)).sum().backward()
        assert bag.parameters() == [twin.weight] * 2


def test_models_and_bags_are_freed():
    stage, linear, bag = StageContext(), nn.Linear(4, 4), WeightGradBag()
    reroute(linear, stage)
    stage.begin(seed=0, step=0, microbatch=0, bag=bag)
    torch.compile(linear, backend="aot_eager")(torch.randn(2, 4)).sum().backward()
    bag.run()
    alive = weakref.ref(linear.weight), weakref.ref(bag)
    stage.release()
    del linear, bag
    torch.compiler.reset()
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


@pytest.mark.full
@pytest.mark.parametrize("style, dropout", thinned([("gpt2", 0.1), ("llama", 0.0)], every=2))
@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_of_a_gpt(single, backend, style, dropout):
    tokens, labels = batch()
    model = gpt(style, parallel=single, facts={"dropout": dropout})

    def step(defer):
        model.zero_grad()
        bag = WeightGradBag()
        model.stage.begin(seed=3, step=1, microbatch=2, bag=bag if defer else None)
        model(tokens, labels=labels).sum().backward()
        model.stage.release()
        thunks = len(bag)
        bag.run()
        return {n: p.grad for n, p in model.named_parameters()}, thunks

    expected, thunks = step(True)
    for layer in model.decoder.layers.values():
        layer.compile(backend=backend)
    for defer in (True, False, True):
        found, now = step(defer)
        assert now == thunks * defer
        assert_same(found, expected, 1e-10)


@pytest.mark.full
@pytest.mark.parametrize("compiled_first", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_with_regions(backend, compiled_first):
    stage = StageContext()
    model = nn.ModuleList([Layer(stage) for _ in range(2)])
    inputs = [torch.randn(2, 3, 4, requires_grad=True) for _ in range(2)]
    both = nn.Sequential(*model)
    expected, thunks = run(both, stage, inputs, True)
    if not compiled_first:
        apply_recompute(model, "layer", stage=stage)
    for layer in model:
        layer.compile(backend=backend)
    if compiled_first:
        apply_recompute(model, "layer", stage=stage)
    for _ in range(2):
        found, now = run(both, stage, inputs, True)
        assert now == thunks
        assert_same(found, expected)
