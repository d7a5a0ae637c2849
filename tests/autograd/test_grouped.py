"""A product per group of rows against torch's own, one by one: at once, deferred, into main_grad, frozen."""

import pytest
import torch

from core.autograd import StageContext
from core.autograd.grouped import grouped_linear
from tests.autograd.test_linear import deferring
from tests.autograd.tiny import close, parameter

COUNTS = [[3, 0, 4], [0, 0, 0], [0, 7, 0], [1, 1, 1]]


def of_torch(x, weight, counts):
    rows = zip(x.split(counts), weight.flatten(1, -2), strict=True)
    return torch.cat([part @ matrix.t() for part, matrix in rows])


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("shape", [(3, 5, 4), (3, 2, 5, 4)])
@pytest.mark.parametrize("how", ["at once", "deferred", "main_grad", "deferred into main_grad"])
def test_every_way_of_a_gradient(counts, shape, how):
    x, weight = torch.randn(sum(counts), 4, requires_grad=True), parameter(*shape)
    if "main_grad" in how:
        weight.main_grad = torch.ones(shape)
    stage, bag = deferring() if "deferred" in how else (StageContext(), None)
    y, want = grouped_linear(x, weight, counts, stage=stage), of_torch(x, weight, counts)
    close(y, want)
    gy = torch.randn_like(want)
    dx, dw = torch.autograd.grad(want, (x, weight), gy)
    y.backward(gy)
    close(x.grad, dx)
    if bag is not None:
        assert len(bag) == 1 and weight.grad is None, "one without rows is counted, too"
        bag.run()
    found = weight.main_grad - 1 if "main_grad" in how else weight.grad
    close(found, dw)


def test_a_frozen_weight_keeps_no_input():
    x, weight = torch.randn(4, 4, requires_grad=True), parameter(2, 3, 4)
    weight.requires_grad_(False)
    y = grouped_linear(x, weight, [1, 3], stage=StageContext())
    assert not y.grad_fn.saved_tensors
    y.sum().backward()
    close(x.grad, torch.autograd.grad(of_torch(x, weight, [1, 3]).sum(), x)[0])


def test_autocast_and_a_weight_that_is_computed():
    x, weight = torch.randn(4, 4), parameter(2, 3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert grouped_linear(x.float(), weight.float(), [2, 2], stage=StageContext()).dtype == torch.bfloat16
    y = grouped_linear(x, 2 * weight, [2, 2], stage=StageContext())
    y.sum().backward()
    close(weight.grad, 2 * torch.autograd.grad(of_torch(x, weight, [2, 2]).sum(), weight)[0])


def test_a_second_derivative_is_refused():
    x, weight = torch.randn(4, 4, requires_grad=True), parameter(2, 3, 4)
    y = grouped_linear(x, weight, [2, 2], stage=StageContext()).square().sum()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(y, x, create_graph=True)


def test_a_weight_written_before_backward_is_refused():
    x, weight = torch.randn(4, 4, requires_grad=True), parameter(2, 3, 4)
    y = grouped_linear(x, weight, [2, 2], stage=StageContext()).sum()
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="was written"):
        y.backward()
