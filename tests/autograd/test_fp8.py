"""8-bit products of a linear against rounding by a table of all 8-bit values and multiplying in float64."""

import warnings

import pytest
import torch
from torch import nn

from core.autograd import StageContext, deferred_linear, fp8, recompute
from core.autograd.fp8 import E4M3, E5M2, Fp8, plain_product, quantize, scaled_product
from core.autograd.grouped import grouped_linear
from tests.autograd.test_linear import deferring
from tests.autograd.tiny import parameter

RECIPES = [Fp8(E4M3), Fp8(E5M2), Fp8(E4M3, rowwise=True), Fp8(E5M2, rowwise=True)]
IDS = ["e4m3", "hybrid", "e4m3 rowwise", "hybrid rowwise"]
# torch 2.11's CPU has no product with scales of rows: what stands in its place is tried there, and told
MULTIPLIES_BY_ROW = fp8.multiplies("cpu", E4M3, torch.float32, True)
by_row_alone = pytest.mark.skipif(not MULTIPLIES_BY_ROW, reason="8-bit products of this CPU have one scale")
pytestmark = pytest.mark.filterwarnings("ignore:fp8. torch .* has no product of:UserWarning")


def rounded(tensor, dtype, by_row):
    """[r, k], rounded to the nearest value of `dtype` times a power of two: the twin, which knows no conversion."""
    tensor = tensor.double()
    every = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    every = every[every.isfinite()].unique()
    amax = tensor.abs().amax(1, keepdim=True) if by_row else tensor.abs().amax()
    scale = 2 ** torch.floor(torch.log2(torch.finfo(dtype).max / amax))
    distances = ((tensor * scale)[..., None] - every).abs()
    # of two that are as near the one with an even last digit, and every second one has such
    is_odd = (torch.arange(len(every)) - len(every) // 2) % 2
    return every[(distances + 1e-12 * distances.amin(-1, keepdim=True) * is_odd).argmin(-1)] / scale


def expected(x, weight, gy, recipe):
    """(y, dx, dW) in float64 of x [n, i], W [o, i], dy [n, o]."""
    g, by_row = recipe.gradient_dtype, recipe.rowwise
    y = rounded(x, E4M3, by_row) @ rounded(weight, E4M3, by_row).t()
    dx = rounded(gy, g, by_row) @ rounded(weight.t(), E4M3, by_row).t()
    dw = rounded(gy.t(), g, by_row) @ rounded(x.t(), E4M3, by_row).t()
    return y, dx, dw if recipe.wgrad else gy.t().double() @ x.double()


def near(found, want, bound=1e-5):
    error = (found.double() - want.double()).abs().max() / want.abs().max()
    assert error <= bound, error


def operands(dtype, shape=(3, 7), outputs=5, inputs=9):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(*shape, inputs, generator=generator, dtype=torch.float64).to(dtype)
    # rows of unlike size: one scale for all loses digits of some
    weight = torch.randn(outputs, inputs, generator=generator, dtype=torch.float64)
    weight *= 10.0 ** -torch.arange(outputs)[:, None]
    gy = 1e-3 * torch.randn(*shape, outputs, generator=generator, dtype=torch.float64)
    return x.requires_grad_(), nn.Parameter(weight.to(dtype)), gy.to(dtype)


def flat(x, weight, gy):
    return x.detach().flatten(0, -2), weight.detach().flatten(0, -2), gy.flatten(0, -2)


@pytest.mark.parametrize("recipe", RECIPES, ids=IDS)
@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-14), (torch.float32, 1e-5), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("how", ["autograd", "main_grad", "bag", "bag and main_grad", "recompute"])
def test_three_products(recipe, dtype, bound, how):
    x, weight, gy = operands(dtype)
    if "main_grad" in how:
        weight.main_grad = torch.ones(weight.shape, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    stage, bag = deferring() if "bag" in how else (StageContext(), None)

    def linear(x):
        return deferred_linear(x, weight, stage=stage, fp8=recipe)

    y = recompute(linear, x, stage=stage) if how == "recompute" else linear(x)
    assert y.dtype == dtype
    y.backward(gy)
    if bag is not None:
        assert len(bag) == 1 and weight.grad is None
        bag.run()
    want_y, want_dx, want_dw = expected(*flat(x, weight, gy), recipe)
    near(y.detach().flatten(0, -2), want_y, bound)
    near(x.grad.flatten(0, -2), want_dx, bound)
    if "main_grad" in how:
        # 1 was there before; the sum is in float32, not in the product's 16 bits
        near(weight.main_grad - 1, want_dw, max(1e-14, min(bound, 2e-4)))
    else:
        near(weight.grad, want_dw, bound)


def test_weight_gradients_may_stay_as_they_were():
    x, weight, gy = operands(torch.float32)
    recipe = Fp8(E5M2, wgrad=False)
    deferred_linear(x, weight, stage=StageContext(), fp8=recipe).backward(gy)
    near(weight.grad, flat(x, weight, gy)[2].t().double() @ x.detach().flatten(0, -2).double(), 1e-6)
    near(x.grad.flatten(0, -2), expected(*flat(x, weight, gy), recipe)[1])


def test_what_autograd_keeps_is_the_input_itself_with_and_without_a_bag():
    x, weight, _ = operands(torch.float32)
    for stage in (StageContext(), deferring()[0]):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            deferred_linear(x, weight, stage=stage, fp8=Fp8())
        assert [t.data_ptr() for t in kept] == [x.data_ptr()]


@pytest.mark.parametrize(
    "recipe", [*RECIPES[:2], *(pytest.param(recipe, marks=by_row_alone) for recipe in RECIPES[2:])], ids=IDS
)
@pytest.mark.parametrize("m, k, n", [(1, 1, 1), (16, 16, 16), (17, 33, 15), (5, 160, 2)])
def test_a_product_of_8_bit_factors_is_its_plain_twin(recipe, m, k, n):
    a = quantize(torch.randn(m, k, dtype=torch.float32), recipe.gradient_dtype, rowwise=recipe.rowwise)
    b = quantize(torch.randn(n, k, dtype=torch.float32), E4M3, rowwise=recipe.rowwise)
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 8e-3)):
        y = scaled_product(a, b, dtype)
        assert y.is_contiguous() and y.dtype == dtype and y.shape == (m, n)
        near(y, plain_product(a, b, torch.float64), bound)
        near(plain_product(a, b, dtype), plain_product(a, b, torch.float64), bound)


def test_inner_and_last_dims_of_a_product_are_multiples_of_16(monkeypatch):
    """Devices demand it, and a second factor whose columns are contiguous; the CPU takes anything."""
    real, seen = torch._scaled_mm, []
    monkeypatch.setattr(torch, "_scaled_mm", lambda a, b, **more: seen.append((a, b)) or real(a, b, **more))
    x, weight, gy = operands(torch.float32)
    deferred_linear(x, weight, stage=StageContext(), fp8=Fp8()).backward(gy)
    assert len(seen) >= 3
    for a, b in seen:
        assert a.shape[1] % 16 == 0 and b.shape[1] % 16 == 0
        assert a.is_contiguous() and b.t().is_contiguous()


@pytest.mark.parametrize("recipe", RECIPES, ids=IDS)
def test_where_no_product_of_8_bits_is_the_numbers_are_the_same_and_told_once(recipe, monkeypatch):
    x, weight, _ = operands(torch.float32)
    with_it = deferred_linear(x, weight, stage=StageContext(), fp8=recipe)
    fp8._tell_once.cache_clear()
    monkeypatch.setattr(fp8, "multiplies", lambda *a: False)
    with pytest.warns(UserWarning, match=r"no product of torch.float8.* on cpu; .*slower than model.fp8 left out"):
        y = deferred_linear(x, weight, stage=StageContext(), fp8=recipe)
    near(y, with_it)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        deferred_linear(x, weight, stage=StageContext(), fp8=recipe)
    fp8._tell_once.cache_clear()


@by_row_alone
def test_a_device_that_multiplies_into_16_bits_only(monkeypatch):
    monkeypatch.setattr(fp8, "multiplies", lambda kind, left, dtype, rowwise: dtype == torch.bfloat16)
    x, weight, gy = operands(torch.float32)
    y = deferred_linear(x, weight, stage=StageContext(), fp8=Fp8(rowwise=True))
    assert y.dtype == torch.float32
    near(y.flatten(0, -2), expected(*flat(x, weight, gy), Fp8(rowwise=True))[0], 8e-3)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("recipe", RECIPES, ids=IDS)
def test_what_is_not_finite_is_not_finite_after_a_product(recipe, value):
    x, weight, gy = operands(torch.float32)
    with torch.no_grad():
        x[1, 2, 3] = value
    y = deferred_linear(x, weight, stage=StageContext(), fp8=recipe)
    assert not y[1, 2].isfinite().any()
    y.backward(gy)
    assert not weight.grad[:, 3].isfinite().any()
    x, weight, gy = operands(torch.float32)
    gy[1, 2, 3] = value
    deferred_linear(x, weight, stage=StageContext(), fp8=recipe).backward(gy)
    assert not weight.grad[3].isfinite().any() and not x.grad[1, 2].isfinite().any()


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_scales_at_the_ends_of_a_dtype(dtype, by_row):
    zero = quantize(torch.zeros(2, 3, dtype=dtype), E4M3, rowwise=by_row)
    assert not zero.values.float().any() and zero.inverse.isfinite().all()
    largest = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    for value in (largest, 448.0, 449.0, 1.0, torch.finfo(dtype).tiny if dtype == torch.float16 else 2.0**-110):
        for format_ in (E4M3, E5M2):
            q = quantize(torch.full((2, 3), value, dtype=dtype), format_, rowwise=by_row)
            near(q.values.double() * q.inverse.double(), torch.full((2, 3), value, dtype=torch.float64), 0.0667)
            assert (q.inverse.log2() % 1 == 0).all(), "a power of two"


@pytest.mark.parametrize("shape", [(0, 4), (2, 0, 4)])
def test_no_rows(shape):
    x, weight = torch.randn(*shape, requires_grad=True), parameter(3, 4)
    deferred_linear(x, weight, stage=StageContext(), fp8=Fp8()).sum().backward()
    assert x.grad.shape == shape and not weight.grad.any()


def test_biases_shapes_autocast_and_no_grad():
    x, weight, bias = torch.randn(2, 3, 4), parameter(2, 3, 4), parameter(2, 3)
    stage = StageContext()
    y = deferred_linear(x, weight, bias, stage=stage, fp8=Fp8())
    near(y, deferred_linear(x, weight, stage=stage, fp8=Fp8()) + bias.detach().flatten(), 1e-12)
    with torch.no_grad():
        assert torch.equal(deferred_linear(x, weight, bias, stage=stage, fp8=Fp8()), y)
    with torch.autocast("cpu", torch.bfloat16):
        low = deferred_linear(x.float(), weight.float(), stage=stage, fp8=Fp8())
    assert low.dtype == torch.bfloat16
    with torch.device("meta"):
        assert deferred_linear(torch.randn(2, 4), parameter(3, 4), stage=stage, fp8=Fp8()).shape == (2, 3)


def test_a_second_derivative_is_refused():
    x, weight = torch.randn(5, 4, requires_grad=True), parameter(3, 4)
    y = deferred_linear(x, weight, stage=StageContext(), fp8=Fp8()).square().sum()
    with pytest.raises(RuntimeError, match="a linear with fp8 has no second derivative"):
        torch.autograd.grad(y, x, create_graph=True)


@pytest.mark.parametrize("recipe", RECIPES, ids=IDS)
@pytest.mark.parametrize("how", ["at once", "bag", "main_grad"])
@pytest.mark.parametrize("counts", [[3, 0, 4], [0, 7, 0]])
def test_groups_are_linears_of_their_own(recipe, how, counts):
    x, weight = torch.randn(7, 4, requires_grad=True), parameter(3, 2, 5, 4)
    if how == "main_grad":
        weight.main_grad = torch.ones(weight.shape)
    stage, bag = deferring() if how == "bag" else (StageContext(), None)
    y = grouped_linear(x, weight, counts, stage=stage, fp8=recipe)
    gy = torch.randn_like(y)
    y.backward(gy)
    if bag is not None:
        bag.run()
    found = weight.main_grad - 1 if how == "main_grad" else weight.grad
    parts = zip(x.detach().split(counts), gy.split(counts), y.split(counts), x.grad.split(counts), strict=True)
    for group, (rows, gradients, outputs, dx) in enumerate(parts):
        if not len(rows):
            assert not found[group].any()
            continue
        want = expected(rows, weight.detach()[group].flatten(0, 1), gradients, recipe)
        near(outputs.detach(), want[0], 1e-12)
        near(dx, want[1], 1e-12)
        near(found[group].flatten(0, 1), want[2], 1e-12)
