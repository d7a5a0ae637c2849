"""What a first run notes, the second one takes over: in order, per microbatch, and never shifted."""

import pytest
import torch
from torch import nn

from core.autograd import Notes, StageContext, apply_recompute, note, recompute


class Counted(torch.autograd.Function):
    """x * factor, whose forward is noted."""

    calls = 0

    @staticmethod
    def forward(ctx, x, factor, activation):
        def make():
            Counted.calls += 1
            return x * factor, factor

        out, noted = note(make, activation=activation)
        assert noted == factor
        ctx.factor = factor
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None, None


class Layer(nn.Module):
    def __init__(self, activation=True):
        super().__init__()
        self.linear, self.activation = nn.Linear(3, 3), activation

    def forward(self, x):
        y = Counted.apply(torch.tanh(self.linear(x)), 2.0, self.activation)
        return self.linear(Counted.apply(y, 3.0, self.activation).sin())


class Model(nn.Module):
    def __init__(self, activation=True):
        super().__init__()
        self.layers = nn.ModuleList(Layer(activation) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def gradients(policy, keeps="attention", activation=True, order=(0, 1)):
    """Gradients of two microbatches, and how often noted operations ran."""
    torch.manual_seed(1)
    model = Model(activation)
    apply_recompute(model, policy, stage=StageContext(), keeps=keeps)
    results = []
    for _ in range(2):  # a region's very first run is torch's checkpoint, later ones are our Function
        Counted.calls = 0
        losses = [model(torch.full((2, 3), 0.1 * (m + 1))).square().sum() for m in range(2)]
        for m in order:
            losses[m].backward()
        results.append(Counted.calls)
    return [p.grad for p in model.parameters()], results


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_noted_operations_run_once_and_gradients_stay_bit_for_bit(order):
    plain, calls = gradients("none", order=order)
    kept, kept_calls = gradients("layer", order=order)
    assert all(torch.equal(a, b) for a, b in zip(kept, plain, strict=True))
    assert calls == kept_calls == [8, 8]


def test_keeping_nothing_runs_activations_twice_but_not_decisions():
    assert gradients("layer", "nothing")[1] == [16, 16]
    assert gradients("layer", "nothing", activation=False)[1] == [8, 8]


def test_selective_recomputation_keeps_nothing():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.core_attention = Layer()

        def forward(self, x):
            return self.core_attention(x)

    model = Attention()
    apply_recompute(model, "selective")
    for _ in range(2):
        Counted.calls = 0
        model(torch.ones(2, 3)).sum().backward()
        assert Counted.calls == 4


def test_unknown_keeps_are_refused():
    with pytest.raises(ValueError, match="recompute_keeps='all' is none of the 2 known: attention, nothing"):
        apply_recompute(Model(), "layer", keeps="all")


@pytest.mark.parametrize("second, message", [(0, "called 0 operations that are noted, the first one 1"), (2, "more")])
def test_another_number_of_noted_operations_is_told(second, message):
    runs = []

    def region(x):
        runs.append(1)
        for _ in range(1 if len(runs) % 2 else second):
            x = Counted.apply(x, 2.0, False)
        return x.sin()

    out = recompute(region, torch.ones(3, requires_grad=True))
    with pytest.raises(RuntimeError, match=message):
        out.sum().backward()


def test_a_retained_graph_reads_from_the_start():
    x = torch.ones(3, requires_grad=True)
    for _ in range(2):
        out = recompute(lambda t: Counted.apply(Counted.apply(t, 2.0, False), 3.0, False).sin(), x).sum()
        (first,) = torch.autograd.grad(out, x, retain_graph=True)
        (second,) = torch.autograd.grad(out, x)
        assert torch.equal(first, second)


def test_a_noted_tensor_that_was_written_is_refused():
    def region(x):
        out = Counted.apply(x, 2.0, False)
        with torch.no_grad():
            out.detach().add_(1)
        return out * 1.0

    recompute(region, torch.ones(3, requires_grad=True))
    out = recompute(region, torch.ones(3, requires_grad=True))
    with pytest.raises(RuntimeError, match="noted for the second run was written in place"):
        out.sum().backward()


def test_a_region_inside_a_second_run_takes_what_the_outer_one_noted():
    outer, x = Notes(keeps_activations=True), torch.ones(3, requires_grad=True)
    Counted.calls = 0

    def forward():
        return recompute(lambda t: Counted.apply(t, 2.0, True).sin(), x)

    with torch.no_grad(), outer.first_run():
        forward()
    with outer.second_run():
        out = forward()
    out.sum().backward()
    assert Counted.calls == 1
    torch.testing.assert_close(x.grad, 2 * torch.cos(torch.full((3,), 2.0)))
