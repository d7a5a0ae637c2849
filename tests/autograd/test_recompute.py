"""A region that runs again: same numbers bit for bit, twice and never thrice, whatever goes in and comes out."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from core.autograd import StageContext, WeightGradBag, deferred_linear, recompute
from tests.autograd.tiny import SEED, STEP, TOKENS, bags, batch, parameter, stage_dropout


class Region(nn.Module):
    """A linear, both kinds of dropout, a bare parameter; counts its runs."""

    def __init__(self, stage):
        super().__init__()
        self.stage = stage
        self.up, self.down = parameter(8, 5), parameter(5, 8)
        self.norm = nn.LayerNorm(5)
        self.runs = []

    def forward(self, x):
        self.runs.append(self.stage.microbatch)
        h = F.dropout(F.gelu(deferred_linear(self.norm(x), self.up, stage=self.stage)), 0.3)
        return x + stage_dropout(deferred_linear(h, self.down, stage=self.stage), self.stage, 0)


def step(recomputed, order, bag):
    """F of every microbatch, then I in `order`, then W: outputs, gradients, runs, and the RNG's next number."""
    torch.manual_seed(3)
    stage = StageContext()
    region = Region(stage)
    torch.manual_seed(4)
    full, outputs, xs = bags(3), [], []
    for m in range(3):
        stage.begin(seed=SEED, step=STEP, microbatch=m, bag=full[m] if bag else None)
        xs.append(batch(m)[1].requires_grad_(m != 1))
        outputs.append(recompute(region, xs[m], stage=stage) if recomputed else region(xs[m]))
        F.dropout(torch.ones(3))  # the world goes on
    for m in order:
        before = stage.snapshot(), torch.get_rng_state()
        outputs[m].square().sum().backward()
        assert stage.snapshot() == before[0]
        assert torch.equal(torch.get_rng_state(), before[1])
        assert [len(b) for b in full] == [2 * (bag and i in order[: order.index(m) + 1]) for i in range(3)]
    for b in full:
        b.run()
    grads = [p.grad for p in region.parameters()] + [x.grad for x in xs if x.requires_grad]
    assert xs[1].grad is None
    return [*outputs, *grads, torch.rand(3)], region.runs


@pytest.mark.parametrize("bag", [False, True])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_bitwise_equal_and_exactly_twice(order, bag):
    """Also when the stage is at another microbatch by then, and for a microbatch whose input needs no gradient."""
    (plain, once), (again, runs) = step(False, order, bag), step(True, order, bag)
    assert all(torch.equal(a, b) for a, b in zip(again, plain, strict=True))
    assert once == [0, 1, 2]
    assert runs == [0, 1, 2, *order]


def later(fn, *args, **kwargs):
    """A region after its first time, when it was watched."""
    recompute(fn, *args, **kwargs)
    return recompute(fn, *args, **kwargs)


def compare(fn, *inputs):
    """`fn` with and without a region, on leaves: equal outputs and gradients, bit for bit; returns the region's."""
    results = []
    for call in (fn, lambda *args: recompute(fn, *args), lambda *args: later(fn, *args)):
        leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
        out = call(*leaves)
        flat = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        ends = [t for t in flat if t.requires_grad]
        wanted = [t for t in leaves if t.requires_grad]
        grads = torch.autograd.grad(ends, wanted, [torch.ones_like(t) for t in ends], allow_unused=True)
        results.append((out, flat, grads))
    for _, outputs, gradients in results[1:]:
        for plain, ours in zip(results[0][1], outputs, strict=True):
            assert torch.equal(plain, ours)
            assert plain.requires_grad == ours.requires_grad
        for plain, ours in zip(results[0][2], gradients, strict=True):
            assert (plain is None) == (ours is None)
            assert plain is None or torch.equal(plain, ours)
    return results[2][0]


X = torch.arange(6.0, dtype=torch.float64).reshape(2, 3) / 3


def leaf(*shape):
    return (torch.randn(*shape) if shape else X.clone()).requires_grad_()


class Pair(NamedTuple):
    left: torch.Tensor
    right: object


def test_every_shape_of_result():
    assert compare(lambda x: (x * 2, None), leaf())[1] is None
    assert compare(lambda x: (None, x * 2, "s", 3), leaf())[2:] == ("s", 3)
    nested = compare(lambda x: {"a": [x.exp(), (x.sin(), None)], "b": Pair(x * x, 5)}, leaf())
    assert isinstance(nested["b"], Pair)
    assert nested["b"].right == 5
    assert isinstance(nested["a"], list)
    assert compare(lambda x: [x.sum()], leaf())[0].shape == ()


def test_integer_tensors_in_and_out():
    def fn(x, ids):
        return x[ids] * 2, ids + 1, x.argmax(), x > 0

    _, moved, _, sign = compare(fn, leaf(), torch.tensor([1, 0, 1]))
    assert (moved.tolist(), sign.dtype) == ([2, 1, 2], torch.bool)
    assert not moved.requires_grad


def test_complex_outputs_are_differentiable():
    x = leaf()
    out = recompute(lambda x: torch.complex(x, x * 2), x)
    out.imag.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))


def test_keywords_and_nested_arguments():
    def fn(pair, *, scale, table):
        return pair["x"] * scale * table[0][1]

    x, w = leaf(), leaf(3)
    y = recompute(fn, {"x": x}, scale=3, table=[(None, w)])
    theirs = fn({"x": x}, scale=3, table=[(None, w)])
    assert torch.equal(y, theirs)
    for mine, his in zip(
        torch.autograd.grad(y.sum(), (x, w)), torch.autograd.grad(theirs.sum(), (x, w)), strict=True
    ):
        assert torch.equal(mine, his)


def test_an_input_handed_through():
    compare(lambda x: (x, x * 2), leaf())
    compare(lambda x: x, leaf())
    x = leaf()
    h = x * 1
    out, y = later(lambda h: (h, h * 2), h)
    assert h.grad_fn is not out.grad_fn
    (out + y).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3))


def test_views_and_the_same_tensor_twice_out():
    compare(lambda x: (x[0], x.t(), x.view(-1)), leaf())

    def twice(x):
        y = x.exp()
        return y, y

    compare(twice, leaf())


def test_outputs_may_be_changed_in_place():
    x = leaf()
    y, _ = recompute(lambda x: (x.exp(), x.view(-1)), x)
    y.mul_(2)
    y.sum().backward()
    assert torch.equal(x.grad, 2 * x.detach().exp())


def test_a_buffer_handed_out_keeps_no_history():
    """torch would write the region's node into somebody else's tensor."""
    buffer, w = torch.ones(3), nn.Parameter(torch.ones(3))
    _, mask, weight = later(lambda x: (x * w, buffer, w), leaf(), parameters=[w])
    assert (buffer.requires_grad, buffer.grad_fn, w.grad_fn, w.is_leaf) == (False, None, None, True)
    assert mask is not buffer
    weight.sum().backward()
    assert torch.equal(w.grad, torch.ones(3))


def test_unused_outputs_give_no_gradient_not_zeros():
    a, b, stage, bag = parameter(3, 3), parameter(3, 3), StageContext(), WeightGradBag()
    stage.begin(seed=0, step=0, microbatch=0, bag=bag)
    x, plain = leaf(), nn.Parameter(torch.ones(3))

    def fn(x):
        return deferred_linear(x, a, stage=stage), deferred_linear(x, b, stage=stage) * plain

    y, _ = recompute(fn, x, stage=stage, parameters=[a, b, plain])
    y.sum().backward()
    assert bag.parameters() == [a]
    assert plain.grad is None


def test_a_region_that_nobody_needs_does_not_run_again():
    """Its consumer returns no gradient for it."""

    class Drop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            return x + y

        @staticmethod
        def backward(ctx, g):
            return None, g

    runs, x = [], leaf()
    y = recompute(lambda x: runs.append(1) or x * 2, x)
    Drop.apply(y, x).sum().backward()
    assert runs == [1]
    assert torch.equal(x.grad, torch.ones_like(x))


def test_no_input_needs_a_gradient():
    region = Region(StageContext())
    recompute(region, torch.randn(*TOKENS, 5)).sum().backward()
    assert all(p.grad is not None for p in region.parameters())
    bound = Region(StageContext())
    recompute(bound.forward, torch.randn(*TOKENS, 5)).sum().backward()
    assert all(p.grad is not None for p in bound.parameters())
    named = Region(StageContext())
    recompute(lambda x: named(x), torch.randn(*TOKENS, 5), parameters=named.parameters()).sum().backward()
    assert all(p.grad is not None for p in named.parameters())


def test_nothing_needs_a_gradient():
    region = Region(StageContext()).requires_grad_(False)
    assert not recompute(region, torch.randn(*TOKENS, 5)).requires_grad
    x = torch.randn(*TOKENS, 5, requires_grad=True)
    recompute(region, x).sum().backward()
    assert x.grad is not None
    assert all(p.grad is None for p in region.parameters())


def test_without_grad_mode_it_is_a_plain_call():
    region, x = Region(StageContext()), torch.randn(*TOKENS, 5, requires_grad=True)
    for mode in (torch.no_grad, torch.inference_mode):
        torch.manual_seed(9)
        with mode():
            ours = recompute(region, x)
        torch.manual_seed(9)
        assert torch.equal(ours, region(x))
        assert not ours.requires_grad
        with mode():
            assert recompute(lambda x: x.mul_(2), torch.ones(1)) == 2  # nothing runs again, so anything goes


def test_a_result_cut_from_the_graph():
    """It wants no gradient, as without a region."""
    x = leaf()
    y, statistic = later(lambda x: (x * 2, x.detach().square()), x)
    (y + statistic).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))
    assert not statistic.requires_grad and not later(lambda x: x.detach() * 2, x).requires_grad


def test_gradients_as_a_value():
    """`torch.autograd.grad` of inputs and parameters, leaving .grad alone; and a graph kept runs again."""
    region, x = Region(StageContext()), torch.randn(*TOKENS, 5, requires_grad=True)
    wanted = (x, region.up, region.norm.weight)
    torch.manual_seed(5)
    expected = torch.autograd.grad(region(x).square().sum(), wanted)
    torch.manual_seed(5)
    y = recompute(region, x).square().sum()
    for _ in range(2):
        ours = torch.autograd.grad(y, wanted, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    assert region.runs == [0] * 4
    assert all(t.grad is None for t in wanted)


def test_a_second_derivative_is_right_or_refused():
    x = leaf()
    cube = lambda x: x**3  # noqa: E731
    (slope,) = torch.autograd.grad(recompute(cube, x).sum(), x, create_graph=True)
    assert torch.equal(torch.autograd.grad(slope.sum(), x)[0], 6 * x.detach())
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(recompute(cube, x).sum(), x, create_graph=True)


def test_one_tensor_passed_twice_stays_one():
    """Self-attention takes another path, and other roundings, when query, key and value are one tensor."""
    same = []

    def fn(q, k, v=None):
        same.append(q is k and k is v)
        return q * k

    x = leaf()
    recompute(fn, x, x, v=x).sum().backward()
    assert same == [True, True]
    assert torch.equal(x.grad, 2 * x.detach())
    attention = nn.MultiheadAttention(6, 2)
    z = torch.randn(4, 1, 6, requires_grad=True)
    wanted = (z, *attention.parameters())
    plain = torch.autograd.grad(attention(z, z, z)[0].sum(), wanted)
    ours = torch.autograd.grad(recompute(attention, z, z, z)[0].sum(), wanted)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_an_argument_that_is_also_a_parameter():
    w, x = nn.Parameter(torch.ones(3)), leaf()
    recompute(lambda x, w2: x * w * w2, x, w, parameters=[w]).sum().backward()
    assert torch.equal(w.grad, 2 * x.detach().sum(0))


def test_a_computed_parameter():
    """What the region reads from outside may be the result of a graph of its own."""
    raw, x = nn.Parameter(torch.ones(3)), leaf()
    computed = raw * 2
    recompute(lambda x: x * computed, x, parameters=[computed]).sum().backward()
    assert torch.equal(raw.grad, 2 * x.detach().sum(0))


def test_writing_into_an_input_is_refused():
    with pytest.raises(RuntimeError, match="writes into its input"):
        recompute(lambda x: x.mul_(2), leaf() * 1)
    h = leaf() * 1
    y = recompute(lambda h: h * h, h)
    h.mul_(2)  # by others, before backward
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_parameter_that_nobody_named():
    lost, named, h = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3)), leaf()
    recompute(lambda x: x * lost + named, h, parameters=[named]).sum().backward()
    assert torch.equal(lost.grad, h.detach().sum(0)) and torch.equal(named.grad, torch.full((3,), 2.0))
    skip = h * named  # an activation from outside
    recompute(lambda x: x + skip, h, parameters=[]).sum().backward()
    assert torch.equal(named.grad, 2 + h.detach().sum(0))
    lost.grad, use = None, []
    fn = lambda x: x * (lost if use else named)  # noqa: E731
    recompute(fn, h, parameters=[named])
    use.append(True)
    y = recompute(fn, h, parameters=[named])  # not so the first time
    with pytest.raises(RuntimeError, match=r"parameter of shape \[3\]"):
        y.sum().backward()
