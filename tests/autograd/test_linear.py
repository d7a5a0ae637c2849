"""One deferred linear or embedding against torch's own: shapes, dtypes, autocast, frozen and computed weights."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from core.autograd import StageContext, WeightGradBag, deferred_embedding, deferred_linear
from tests.autograd.tiny import close, parameter


def deferring():
    stage, bag = StageContext(), WeightGradBag()
    stage.begin(seed=0, step=0, microbatch=0, bag=bag)
    return stage, bag


@pytest.mark.parametrize("shape", [(4,), (5, 4), (2, 3, 4), (2, 0, 4)])
@pytest.mark.parametrize("bias", [False, True])
def test_plain_use_equals_torch(shape, bias):
    x, w = torch.randn(*shape, requires_grad=True), parameter(3, 4)
    b = parameter(3) if bias else None
    wanted = (x, w, b) if bias else (x, w)
    ours, theirs = deferred_linear(x, w, b, stage=StageContext()), F.linear(x, w, b)
    assert torch.equal(ours, theirs)
    gy = torch.randn_like(ours)
    for mine, his in zip(torch.autograd.grad(ours, wanted, gy), torch.autograd.grad(theirs, wanted, gy), strict=True):
        close(mine, his)
    assert all(t.grad is None for t in wanted)


@pytest.mark.parametrize("shape", [(7, 3), (7, 2, 3), (2, 2, 3, 3)])
@pytest.mark.parametrize("main_grad", [False, True])
def test_deferred_shapes(shape, main_grad):
    x, w, b = torch.randn(5, 2, 3, requires_grad=True), parameter(*shape), parameter(*shape[:-1])
    if main_grad:
        w.main_grad = torch.ones(shape)
    stage, bag = deferring()
    y = deferred_linear(x, w, b, stage=stage)
    theirs = F.linear(x, w.flatten(0, -2), b.flatten())
    assert torch.equal(y, theirs)
    gy = torch.randn_like(y)
    dx, dw, db = torch.autograd.grad(theirs, (x, w, b), gy)
    y.backward(gy.transpose(0, 1).contiguous().transpose(0, 1))  # a dy that is not contiguous
    assert w.grad is None
    bag.run()
    close(x.grad, dx)
    close(b.grad, db)
    close(w.main_grad - 1 if main_grad else w.grad, dw)


def test_expanded_output_gradient():
    """`sum` hands back one number seen through zero strides."""
    x, w = torch.randn(5, 3, requires_grad=True), parameter(2, 3)
    stage, bag = deferring()
    deferred_linear(x, w, stage=stage).sum().backward()
    bag.run()
    close(w.grad, x.detach().sum(0).expand(2, 3))


def test_weight_gradient_accumulates_into_grad_without_main_grad():
    w, stage = parameter(2, 3), StageContext()
    expected = torch.zeros(2, 3)
    for m in range(3):
        bag = WeightGradBag()
        stage.begin(seed=0, step=0, microbatch=m, bag=bag)
        x = torch.randn(5, 3)
        deferred_linear(x, w, stage=stage).square().sum().backward()
        before = w.grad
        bag.run()
        assert m == 0 or w.grad is before
        expected += (2 * x @ w.detach().t()).t() @ x
        close(w.grad, expected)


def test_two_gradients_of_one_bag_do_not_share_memory():
    stage, bag = deferring()
    a, b = parameter(2, 3), parameter(2, 3)
    x = torch.randn(5, 3)
    (deferred_linear(x, a, stage=stage) + deferred_linear(x, b, stage=stage)).sum().backward()
    bag.run()
    assert torch.equal(a.grad, b.grad)
    a.grad.zero_()
    assert b.grad.any()


@pytest.mark.parametrize("bag", [False, True])
def test_frozen_weight(bag):
    stage, full = deferring() if bag else (StageContext(), None)
    x, w = torch.randn(5, 3, requires_grad=True), parameter(2, 3).requires_grad_(False)
    w.main_grad = torch.zeros_like(w)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        deferred_linear(x, w, stage=stage).sum().backward()
    assert torch.equal(x.grad, torch.ones(5, 2) @ w)
    assert w.grad is None
    assert not w.main_grad.any()
    assert not full
    assert not kept  # no gradient of the weight, no need for the input


def test_no_gradient_to_the_input_when_it_needs_none():
    stage, bag = deferring()
    x, w = torch.randn(5, 3), parameter(2, 3)
    y = deferred_linear(x, w, stage=stage)
    y.sum().backward()
    assert x.grad is None
    assert len(bag) == 1


def test_a_computed_weight_goes_through_its_own_graph():
    """Weight norm and other parametrizations: deferring into a tensor that is no leaf would lose the gradient."""
    for defer in (lambda w, stage: deferred_linear(torch.ones(2, 3), w, stage=stage),
                  lambda w, stage: deferred_embedding(torch.tensor([1, 1, 0]), w, stage=stage)):  # fmt: skip
        stage, bag = deferring()
        raw = parameter(4, 3)
        defer(raw * 2, stage).sum().backward()
        bag.run()
        plain = raw.detach().clone().requires_grad_()
        defer(plain * 2, StageContext()).sum().backward()
        assert raw.grad is not None
        close(raw.grad, plain.grad)


@pytest.mark.parametrize("deferred", [False, True])
def test_bfloat16_parameter_with_float32_main_grad(deferred):
    """At least as exact as the float32 sum of the bfloat16 products, far better than a bfloat16 sum."""
    w = nn.Parameter(torch.randn(8, 16).bfloat16())
    w.main_grad = torch.zeros(8, 16, dtype=torch.float32)
    stage, rounded, exact = StageContext(), torch.zeros(8, 16, dtype=torch.float32), torch.zeros(8, 16)
    coarse = torch.zeros(8, 16, dtype=torch.bfloat16)
    for m in range(16):
        bag = WeightGradBag()
        stage.begin(seed=0, step=0, microbatch=m, bag=bag if deferred else None)
        x, gy = torch.randn(32, 16).bfloat16().requires_grad_(), torch.randn(32, 8).bfloat16()
        y = deferred_linear(x, w, stage=stage)
        assert y.dtype == torch.bfloat16
        y.backward(gy)
        assert x.grad.dtype == torch.bfloat16
        bag.run()
        product = gy.t() @ x.detach()
        rounded, coarse, exact = rounded + product, coarse + product, exact + gy.t().double() @ x.detach().double()
    error = lambda t: (t.double() - exact).norm().item()  # noqa: E731
    assert w.main_grad.dtype == torch.float32
    assert error(w.main_grad) <= error(rounded) * 1.000001
    assert error(w.main_grad) < error(coarse) / 2
    assert w.grad is None


def test_float32_main_grad_of_a_float64_use_and_back():
    """Any main_grad dtype works; the sum has main_grad's."""
    for kind in (torch.float32, torch.float64):
        w, (stage, bag) = parameter(2, 3), deferring()
        w.main_grad = torch.zeros(2, 3, dtype=kind)
        x = torch.randn(5, 3)
        deferred_linear(x, w, stage=stage).sum().backward()
        bag.run()
        close(w.main_grad, x.sum(0).expand(2, 3).to(kind), 1e-12 if kind == torch.float64 else 1e-6)


@pytest.mark.parametrize("bag", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_autocast_equals_nn_linear(bag, bias):
    theirs = nn.Linear(6, 5, bias=bias, dtype=torch.float32)
    ours = nn.Linear(6, 5, bias=bias, dtype=torch.float32)
    ours.load_state_dict(theirs.state_dict())
    stage, full = deferring() if bag else (StageContext(), WeightGradBag())
    xs = [torch.randn(2, 3, 6, dtype=torch.float32).requires_grad_() for _ in range(2)]
    xs[1].data = xs[0].data
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mine, his = deferred_linear(xs[0], ours.weight, ours.bias, stage=stage), theirs(xs[1])
    assert mine.dtype == torch.bfloat16
    assert torch.equal(mine, his)
    gy = torch.randn(2, 3, 5).bfloat16()
    mine.backward(gy)
    his.backward(gy)
    full.run()
    for a, b in [(xs[0], xs[1]), *zip(ours.parameters(), theirs.parameters(), strict=True)]:
        assert a.grad.dtype == torch.float32
        assert torch.equal(a.grad, b.grad)


def test_autocast_saves_the_cast_input_and_leaves_float64_alone():
    w, kept = nn.Parameter(torch.randn(5, 6, dtype=torch.float32)), []
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.dtype) or t, lambda t: t),
    ):
        deferred_linear(torch.randn(2, 6, dtype=torch.float32), w, stage=StageContext())
        assert kept == [torch.bfloat16]
        y = deferred_linear(torch.randn(2, 6), w.double().requires_grad_(), stage=StageContext())
        assert y.dtype == F.linear(torch.randn(2, 6), w.double()).dtype == torch.float64


def test_meta_tensors():
    """Shapes without numbers, for planners."""
    w, b = nn.Parameter(torch.empty(2, 5, 6, device="meta")), nn.Parameter(torch.empty(2, 5, device="meta"))
    y = deferred_linear(torch.empty(3, 6, device="meta"), w, b, stage=StageContext())
    y.sum().backward()
    assert (y.shape, w.grad.shape) == ((3, 10), (2, 5, 6))


IDS = torch.tensor([[0, 4, 4], [9, 1, 4]])


@pytest.mark.parametrize("main_grad", [None, torch.float64, torch.float32])
@pytest.mark.parametrize("bag", [False, True])
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_embedding_in_parts(parts, bag, main_grad):
    """The parts of a table, each with the ids of others masked, sum to the whole table."""
    whole = parameter(10, 3)
    gy = torch.randn(2, 3, 3)
    F.embedding(IDS, whole).backward(gy)
    stage, full = deferring() if bag else (StageContext(), WeightGradBag())
    tables = [nn.Parameter(part.detach().clone()) for part in whole.chunk(parts)]
    rows = 10 // parts
    for table in tables:
        if main_grad is not None:
            table.main_grad = torch.zeros(rows, 3, dtype=main_grad)
    ys = [
        deferred_embedding(IDS, table, first=rows * i, is_full_table=parts == 1, stage=stage)
        for i, table in enumerate(tables)
    ]
    assert torch.equal(sum(ys), F.embedding(IDS, whole))
    sum(ys).backward(gy)
    assert len(full) == parts * bag
    full.run()
    found = torch.cat([table.grad if main_grad is None else table.main_grad for table in tables])
    close(found, whole.grad.to(found.dtype), 1e-12 if main_grad != torch.float32 else 1e-6)
    assert main_grad is None or all(table.grad is None for table in tables)
    assert IDS.tolist() == [[0, 4, 4], [9, 1, 4]]


def test_embedding_accumulates_and_counts_repeated_ids():
    table, stage = parameter(10, 3), StageContext()
    table.main_grad = torch.full((10, 3), 2.0)
    for m in range(2):
        bag = WeightGradBag()
        stage.begin(seed=0, step=0, microbatch=m, bag=bag)
        deferred_embedding(IDS, table, stage=stage).sum().backward()
        bag.run()
    assert table.main_grad[:, 0].tolist() == [4, 4, 2, 2, 8, 2, 2, 2, 2, 4]


@pytest.mark.parametrize(("dtype", "dense_gradients"), [(torch.float32, 1), (torch.bfloat16, 3)])
@pytest.mark.parametrize("has_bag", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
def test_later_microbatches_add_rows_to_grad(dtype, dense_gradients, has_bag, parts):
    """One gradient of the table's size for all of them; in 16 bits each has one: rows would round token by token."""
    rows = 10 // parts
    table, whole = (nn.Parameter(torch.ones(n, 3, dtype=dtype)) for n in (rows, 10))
    stage = StageContext()
    gy = torch.randn(3, *IDS.shape, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    with DenseTables() as made:
        for m in range(3):
            bag = WeightGradBag() if has_bag else None
            stage.begin(seed=0, step=0, microbatch=m, bag=bag)
            deferred_embedding(IDS, table, is_full_table=parts == 1, stage=stage).backward(gy[m])
            if bag is not None:
                bag.run()
    for m in range(3):
        F.embedding(IDS, whole).backward(gy[m])
    close(table.grad, whole.grad[:rows], 1e-6 if dtype == torch.float32 else 1e-2)
    assert made.count == dense_gradients


class DenseTables(TorchDispatchMode):
    """Counts gradients of a whole table."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.embedding_dense_backward.default
        return func(*args, **(kwargs or {}))


def test_embedding_equals_torch_under_autograd_grad_and_frozen():
    table = parameter(10, 3)
    y, theirs = deferred_embedding(IDS, table, stage=StageContext()), F.embedding(IDS, table)
    (mine,), (his,) = torch.autograd.grad(y.square().sum(), table), torch.autograd.grad(theirs.square().sum(), table)
    close(mine, his)
    assert table.grad is None
    assert not deferred_embedding(IDS, table.requires_grad_(False), stage=StageContext()).requires_grad


def test_an_id_outside_a_whole_table_is_refused():
    with pytest.raises(IndexError):
        deferred_embedding(torch.tensor([10]), parameter(10, 3), stage=StageContext())
