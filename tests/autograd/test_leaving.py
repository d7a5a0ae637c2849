"""Tensors that leave a recomputed region otherwise than as its results keep their gradients."""

import pytest
import torch
from torch import nn

from core.autograd import apply_recompute, recompute
from core.pipeline import Pipeline

WAYS = ("attribute", "list", "append", "outside", "hook", "logged", "result")


class Layer(nn.Module):
    """An auxiliary loss that leaves `how`."""

    def __init__(self, how, sink):
        super().__init__()
        self.linear, self.gate, self.how, self.sink, self.kept, self.runs = (
            nn.Linear(4, 4),
            nn.Linear(4, 4),
            how,
            sink,
            [],
            0,
        )

    def forward(self, x):
        gate = self.gate(x).softmax(-1)
        loss = gate.square().mean()
        self.runs += 1
        if self.how in ("attribute", "logged"):
            self.aux = loss if self.how == "attribute" else loss.detach()
        elif self.how == "list":
            self.kept = [loss]
        elif self.how == "append":
            self.kept.append(loss)
        elif self.how == "outside":
            self.sink.append(loss)
        return x + self.linear(x) * gate


class Model(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.sink = how, []
        self.layers = nn.ModuleList([Layer(how, self.sink) for _ in range(2)])
        if how == "hook":
            for layer in self.layers:
                layer.gate.register_forward_hook(lambda module, args, out: self.sink.append(out))

    def forward(self, x):
        self.sink.clear()
        for layer in self.layers:
            layer.kept.clear()
        for layer in self.layers:
            x = layer(x)
        found = {
            "attribute": lambda: sum(layer.aux for layer in self.layers),
            "outside": lambda: sum(self.sink),
            "hook": lambda: sum(out.softmax(-1).square().mean() for out in self.sink),
        }.get(self.how, lambda: sum(layer.kept[0] for layer in self.layers) if self.layers[0].kept else x.sum() * 0)
        return x, found()


def loss_of(output, _=None):
    x, aux = output
    return x.square().sum() + 5 * aux, 1


def model(how):
    torch.manual_seed(0)
    return Model(how).double()


@pytest.mark.parametrize("how", WAYS)
def test_gradients_are_those_without_recomputation(how, single):
    plain, regions, staged = (model(how) for _ in range(3))
    handle = apply_recompute(regions, "layer")
    pipe = Pipeline([staged], ps=single, schedule="gpipe", num_microbatches=3, recompute="layer")
    for step in range(2):
        x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        for part in x.chunk(3):
            for each in (plain, regions):
                loss_of(each(part))[0].backward()
        pipe.step(x, loss_of)
    for ours in (regions, staged):
        for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12)
        assert [layer.runs for layer in ours.layers] == [6, 6], "a number is counted once per microbatch"
    leaves = [forward.history.leaks_tensors or forward.history.may_leak for forward in handle._forwards]
    assert leaves == [how != "result"] * 2


def test_a_tensor_that_leaves_later_is_noticed():
    plain, ours = (model("result") for _ in range(2))
    apply_recompute(ours, "layer")
    x = torch.randn(3, 4, dtype=torch.float64)
    for how in ("result", "attribute"):
        for each in (plain, ours):
            each.how = how
            for layer in each.layers:
                layer.how = how
            loss_of(each(x))[0].backward()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12)


def test_results_that_want_no_gradient_stay_so():
    def region(x):
        return x.exp(), torch.full_like(x, 2.0)

    x = torch.randn(3, requires_grad=True)
    for _ in range(3):
        y, constant = recompute(region, x)
        assert y.requires_grad and not constant.requires_grad
        (y * constant).sum().backward()
    assert torch.allclose(x.grad, 6 * x.detach().exp())


def test_no_state_of_a_large_buffer_is_guessed():
    class Large(nn.Module):
        def __init__(self, early):
            super().__init__()
            self.linear, self.calls, self.early = nn.Linear(4, 4), [], early
            self.register_buffer("table", torch.zeros(20000, 4))

        def forward(self, x):
            self.calls.append(1)
            if self.early or len(self.calls) > 4:
                self.table += 1
            return self.linear(x) * self.table[0]

    early = nn.ModuleList([Large(True)])
    apply_recompute(early, "layer")
    for count in range(1, 4):
        early[0](torch.ones(1, 4)).sum().backward()
        assert early[0].table[0, 0] == count
    assert torch.equal(early[0].linear.bias.grad, torch.full((4,), 6.0))
    late = nn.ModuleList([Large(False)])
    apply_recompute(late, "layer")
    for _ in range(2):
        late[0](torch.ones(1, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"the buffer table of \[20000, 4\] of a recomputed Large"):
        late[0](torch.ones(1, 4))


def test_under_vmap_a_region_is_a_plain_call():
    layers = nn.ModuleList([nn.Linear(4, 4)])
    apply_recompute(layers, "layer")
    x = torch.randn(3, 4)
    assert torch.allclose(torch.vmap(layers[0])(x), layers[0](x))
