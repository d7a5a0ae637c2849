"""A recompute policy on any module: what it wraps, what it refuses, what it leaves as it was."""

import copy
import pickle

import pytest
import torch
from torch import nn

from core.autograd import StageContext, WeightGradBag, apply_recompute, deferred_linear
from tests.autograd.tiny import parameter


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.core_attention = nn.Softmax(-1)

    def forward(self, x):
        return self.core_attention(self.proj(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.mlp = Attention(), nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        self.runs = []  # what a forward does to a number on its module is undone after a second run

    def forward(self, x, *, stage=0, parameters=1):
        self.runs.append(1)
        return parameters * (x + self.attention(x) + self.mlp(x)) + stage


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        self.named = nn.ModuleDict({"last": Layer()})
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = self.embed(x)
        for layer in (*self.layers, self.named["last"]):
            x = layer(x)
        return self.head(x)


def gradients(model, x):
    for p in model.parameters():
        p.grad = None
    model(x).square().sum().backward()
    return [p.grad for p in model.parameters()]


def runs(model):
    return [len(layer.runs) for layer in (*model.layers, model.named["last"])]


LAYERS = ["layers.0", "layers.1", "named.last"]
POLICIES = [
    ("none", []),
    ("layer", LAYERS),
    ("selective", [f"{n}.attention.core_attention" for n in LAYERS]),
    (["mlp"], [f"{n}.mlp" for n in LAYERS]),
    (["layers.1.mlp", "head"], ["layers.1.mlp", "head"]),
    (["layers.*.attention", "mlp"], ["layers.0.attention", "layers.0.mlp", "layers.1.attention", "layers.1.mlp",
                                     "named.last.mlp"]),
    ([Layer], LAYERS),
    ([Attention, nn.GELU], [f"{n}.{part}" for n in LAYERS for part in ("attention", "mlp.1")]),
    (["layers.0", "mlp"], ["layers.0", "layers.1.mlp", "named.last.mlp"]),  # a region in a region is part of it
    (["*"], ["embed", *LAYERS, "head"]),
    ((nn.Linear, "core_attention", "0"), None),
]  # fmt: skip


@pytest.mark.parametrize("policy, names", POLICIES)
def test_policies(policy, names):
    model, x = Model(), torch.randn(5, 3)
    keys, types = [n for n, _ in model.named_parameters()], {n: type(m) for n, m in model.named_modules()}
    expected, once = gradients(model, x), runs(model)
    handle = apply_recompute(model, policy)
    if names is not None:
        assert sorted(handle.names) == sorted(names)
    wrapped = {n for n, m in model.named_modules() if "forward" in m.__dict__}
    assert wrapped == set(handle.names)
    assert [n for n, _ in model.named_parameters()] == keys == list(model.state_dict())
    assert {n: type(m) for n, m in model.named_modules()} == types
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, x), expected, strict=True))
    again = [once + 1 + (name in handle.names) for once, name in zip(once, LAYERS, strict=True)]
    assert runs(model) == again
    handle.remove()
    assert not any("forward" in m.__dict__ for m in model.modules())
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, x), expected, strict=True))
    assert runs(model) == [count + 1 for count in again]
    handle.remove()  # twice is harmless


@pytest.mark.parametrize(
    "policy, message",
    [
        ("everything", "known are 'none', 'selective', 'layer'"),
        (["mpl"], "'mpl' matches no module; names here: 0, 1, 2, attention, core_attention, embed, head, last, mlp"),
        (["mlp", "atention"], "'atention' matches no module"),
        (["mlp", nn.Conv2d], "Conv2d.* matches no module"),
        (["layers"], "'layers' matches no module"),  # a ModuleList is never called
        (["layer"], "'layer' matches no module"),
    ],
)
def test_refused(policy, message):
    model = Model()
    with pytest.raises(ValueError, match=message):
        apply_recompute(model, policy)
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_nothing_to_recompute():
    with pytest.raises(ValueError, match="'layer' matches no module; names here: 0"):
        apply_recompute(nn.Sequential(nn.Linear(2, 2)), "layer")
    with pytest.raises(ValueError, match="core_attention"):
        apply_recompute(nn.Sequential(nn.Linear(2, 2)), "selective")


@pytest.mark.parametrize("second", ["layer", ["mlp"], [Model]])
def test_a_second_policy_is_refused(second):
    """Inside a first region it would run a third time."""
    model = Model()
    handle = apply_recompute(model, ["mlp"])
    with pytest.raises(ValueError, match=r"layers\.0\.mlp.*remove\(\)"):
        apply_recompute(nn.ModuleList([model]), second)
    handle.remove()
    apply_recompute(nn.ModuleList([model]), second)


def test_a_policy_on_a_part_of_a_region_adds_no_run():
    model = Model()
    apply_recompute(model, "layer")
    inner = apply_recompute(model.layers[0], ["mlp"])
    assert inner.names == ["mlp"]
    counts = []
    model.layers[0].mlp[0].register_forward_hook(lambda *_: counts.append(1))
    gradients(model, torch.randn(5, 3))
    assert len(counts) == 2


def test_lists_in_lists():
    """Layers as plain lists of sublayers: the inner list is never called, its elements are."""

    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])])

        def forward(self, x):
            for a, b in self.layers:
                x = b(a(x))
            return x

    model = Nested()
    assert apply_recompute(model, "layer").names == ["layers.0.0", "layers.0.1"]
    gradients(model, torch.randn(2, 4))


def test_keywords_of_the_same_name_as_ours():
    model = Model()
    apply_recompute(model, "layer")
    x = torch.randn(2, 4, requires_grad=True)
    expected = Layer.forward(model.layers[0], x, stage=3, parameters=2)
    assert torch.equal(model.layers[0](x, stage=3, parameters=2), expected)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_runs_on_its_own_parameters(duplicate):
    stage = StageContext()
    model = Model()
    apply_recompute(model, "layer", stage=stage)
    twin = duplicate(model)
    x = torch.randn(5, 3)
    expected = gradients(model, x)
    before = runs(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(2)
    plain = Model()
    plain.load_state_dict(twin.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(gradients(twin, x), gradients(plain, x), strict=True))
    assert runs(model) == before
    assert runs(twin) == [2, 2, 2]
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))


def test_parameters_that_change_after_wrapping():
    """Unfrozen, frozen, replaced: the region asks at every call."""
    model, x = Model(), torch.randn(5, 3)
    model.layers.requires_grad_(False)
    apply_recompute(model, "layer")
    found = gradients(model, x)
    assert [g is None for g in found] == [n.startswith("layers") for n, _ in model.named_parameters()]
    model.layers.requires_grad_(True)
    plain = Model()
    plain.load_state_dict(model.state_dict())
    expected = gradients(plain, x)
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, x), expected, strict=True))
    model.layers[1].mlp[0].weight = nn.Parameter(model.layers[1].mlp[0].weight.detach().clone())
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, x), expected, strict=True))
    model.embed.requires_grad_(False)
    model.layers[0].requires_grad_(False)  # a region of frozen parameters whose input needs nothing either
    assert gradients(model, x)[2] is None
    model.embed.requires_grad_(True)
    assert torch.equal(gradients(model, x)[0], expected[0])


def test_frozen_between_forward_and_backward():
    model, x = Model(), torch.randn(5, 3)
    apply_recompute(model, "layer")
    expected = gradients(model, x)
    loss = model(x).square().sum()
    for p in model.parameters():
        p.grad = None
    model.layers[0].mlp[0].weight.requires_grad_(False)
    loss.backward()
    for (name, p), g in zip(model.named_parameters(), expected, strict=True):
        assert p.grad is None if name == "layers.0.mlp.0.weight" else torch.equal(p.grad, g)


def test_no_grad_and_eval():
    model, x = Model(), torch.randn(5, 3)
    apply_recompute(model, "layer")
    with torch.no_grad():
        assert not model(x).requires_grad
    assert runs(model) == [1] * 3
    model.eval()
    gradients(model, x)
    assert runs(model) == [3] * 3


def test_the_forward_of_somebody_else_is_kept_and_comes_back():
    model, x = Model(), torch.randn(5, 3)
    replaced = lambda x: x * 2  # noqa: E731
    model.head.forward = replaced
    handle = apply_recompute(model, ["head"])
    h = torch.randn(2, 4, requires_grad=True)
    assert torch.equal(model.head(h), h * 2)
    handle.remove()
    assert model.head.forward is replaced
    model(x)


def test_deferral_inside_a_region_fills_the_right_bag_once():
    class Deferring(nn.Module):
        def __init__(self, stage):
            super().__init__()
            self.stage, self.weight = stage, parameter(4, 4)

        def forward(self, x):
            return deferred_linear(x, self.weight, stage=self.stage).tanh()

    stage = StageContext()
    model = nn.Sequential(nn.ModuleList([Deferring(stage)])[0], Deferring(stage))
    holder = nn.ModuleList(model)
    for layer in holder:
        layer.weight.main_grad = torch.zeros(4, 4)
    handle = apply_recompute(holder, "layer", stage=stage)
    bags, losses = [WeightGradBag() for _ in range(3)], []
    xs = [torch.randn(2, 4) for _ in range(3)]
    for m in range(3):
        stage.begin(seed=0, step=0, microbatch=m, bag=bags[m])
        losses.append(model(xs[m]).sum())
    for m in (1, 0, 2):
        assert len(bags[m]) == 0
        losses[m].backward()
        assert bags[m].parameters() == [model[1].weight, model[0].weight]
    for bag in bags:
        bag.run()
    handle.remove()
    stage.release()
    ours = [layer.weight.main_grad.clone() for layer in holder]
    for layer in holder:
        layer.weight.main_grad.zero_()
    for x in xs:
        model(x).sum().backward()
    assert all(layer.weight.grad is None for layer in holder)
    for mine, layer in zip(ours, holder, strict=True):
        torch.testing.assert_close(mine, layer.weight.main_grad, rtol=1e-12, atol=1e-12)


def test_a_parameter_of_another_module():
    """A head that borrows the embedding's weight behind its module's back."""

    class Borrowing(nn.Module):
        def __init__(self, lender):
            super().__init__()
            self.own, self.lender = nn.Linear(4, 4), [lender]

        def forward(self, x):
            return self.own(x) @ self.lender[0].weight

    model = nn.ModuleList([Borrowing(nn.Linear(4, 4))])
    handle = apply_recompute(model, "layer")
    x, found = torch.randn(2, 4), []
    for _ in range(3):
        model[0](x).sum().backward()
        weights = (model[0].own.weight, model[0].lender[0].weight)
        found.append([w.grad for w in weights])
        for w in weights:
            w.grad = None
        if len(found) == 2:
            handle.remove()
    assert all(torch.equal(a, b) for each in found for a, b in zip(each, found[-1], strict=True))
