"""Any module is a stage: its gradients under a split and under a fused backward are those of a plain one."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from core.autograd import StageContext, WeightGradBag, apply_recompute, reroute
from core.pipeline import stage_backward_input, stage_backward_weight


class Module(nn.Module):
    """A module from a few parts and a function."""

    def __init__(self, run, **parts):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args):
        return self.run(self, *args)


class Fused(torch.autograd.Function):
    """One backward for both gradients, which adds the weight's to main_grad by itself, and counts its runs."""

    @staticmethod
    def forward(ctx, x, w, counts):
        ctx.save_for_backward(x)
        ctx.w, ctx.counts = w, counts
        return x @ w

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        ctx.counts.append(1)
        ctx.w.sums += x.flatten(0, -2).t() @ g.flatten(0, -2)
        return g @ ctx.w.t(), torch.zeros_like(ctx.w), None


def fused():
    module = Module(lambda m, x: Fused.apply(m.b(torch.tanh(Fused.apply(m.a(x), m.w, m.counts))), m.w, m.counts))
    module.a, module.b, module.w, module.counts = (
        nn.Linear(4, 4),
        nn.Linear(4, 4),
        nn.Parameter(torch.randn(4, 4)),
        [],
    )
    module.register_buffer("total", torch.zeros(4, 4))
    module.w.sums = module.total
    return module


def tied():
    module = Module(lambda m, ids: m.head(torch.tanh(m.mid(m.mid(m.embed(ids))))) + m.embed(ids).sum())
    module.embed, module.mid, module.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
    module.head.weight = module.embed.weight
    return module


def partly_frozen():
    parts = {name: nn.Linear(4, 4) for name in "abc"}
    parts["a"].requires_grad_(False)
    parts["b"].bias.requires_grad_(False)
    return Module(lambda m, x: m.b(torch.relu_(m.a(x))), **parts)


def moe():
    def run(m, x):
        gate = m.gate(x)
        out = torch.zeros_like(x)
        for i in range(3):  # expert 2 never gets a token
            rows = (gate[..., :2].argmax(-1) == i).nonzero(as_tuple=True)
            out = out.index_put(rows, m.experts[i](x[rows]), accumulate=True)
        return out * gate.softmax(-1).max(-1, keepdim=True).values

    return Module(run, gate=nn.Linear(4, 3), experts=nn.ModuleList([nn.Linear(4, 4) for _ in range(3)]))


def force_field():
    """A derivative inside forward, which must leave nothing in the bag."""

    def run(m, x):
        with torch.enable_grad():
            place = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(torch.tanh(m.energy(place)).sum(), place)
            (smooth,) = torch.autograd.grad(torch.tanh(m.energy(place)).sum(), place, create_graph=True)
        return m.out(x + force + smooth)

    return Module(run, energy=nn.Linear(4, 1), out=nn.Linear(4, 4))


def normed():
    weight = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    with pytest.warns(FutureWarning):
        old = nn.utils.weight_norm(nn.Linear(4, 4))
    return nn.Sequential(weight, nn.Tanh(), old, nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)))


def special_embeddings():
    module = Module(lambda m, ids: m.a(ids) + m.b(ids) + m.c(ids) + m.d(ids))
    module.a, module.b = nn.Embedding(7, 4, padding_idx=1), nn.Embedding(7, 4, max_norm=1.0)
    module.c, module.d = nn.Embedding(7, 4, scale_grad_by_freq=True), nn.Embedding(7, 4)
    return module


def attention():
    return Module(
        lambda m, x: m.layer(x, src_key_padding_mask=None),
        layer=nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True),
    )


def pair_of(kind):
    return Module(lambda m, x: kind(m.a(x), m.b(x)), a=nn.Linear(4, 4), b=nn.Linear(4, 4))


def two():
    return {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}


X, IDS = (2, 3, 4), "ids"
ZOO = {
    "view": (lambda: Module(lambda m, x: m.a(x).view(2, 12), a=nn.Linear(4, 4)), X),
    "chunks": (lambda: Module(lambda m, x: m.a(x).chunk(2, -1), a=nn.Linear(4, 8)), X),
    "written in place": (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)), X),
    "row of one": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), (4,)),
    "empty batch": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), (0, 4)),
    "tuple": (lambda: pair_of(lambda a, b: (a, a * b, 3)), X),
    "dict": (lambda: pair_of(lambda a, b: {"x": [a, {"y": b.exp()}], "n": None, "c": torch.ones(2)}), X),
    "other arguments": (
        lambda: Module(lambda m, x, how, ids: m.a(x).relu() * how["scale"] + ids.sum(), a=nn.Linear(4, 4)),
        (X, {"scale": 2.0}, IDS),
    ),
    "input without gradient": (lambda: nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4)), IDS),
    "returns its input": (lambda: Module(lambda m, x: (x, m.a(x)), a=nn.Linear(4, 4)), X),
    "identity": (nn.Identity, X),
    "partly frozen": (partly_frozen, X),
    "weight used twice": (lambda: Module(lambda m, x: m.a(x) + m.a(m.a(x)) + m.a(x), a=nn.Linear(4, 4)), X),
    "tied": (tied, IDS),
    "also used bare": (lambda: Module(lambda m, x: F.linear(m.a(x), m.a.weight) @ m.a.weight, a=nn.Linear(4, 4)), X),
    "off the input path": (
        lambda: Module(lambda m, x: m.a(x) + m.b(m.p.exp()).sum(), **two(), p=nn.Parameter(torch.ones(4))),
        X,
    ),
    "fused function": (fused, X),
    "convolution": (lambda: nn.Sequential(nn.Conv1d(3, 3, 3, padding=1), nn.ReLU(True), nn.Linear(4, 4)), X),
    "lstm": (lambda: nn.LSTM(4, 4, batch_first=True), X),
    "attention": (attention, X),
    "buffers": (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(3), nn.Linear(4, 4)), X),
    "parametrized": (normed, X),
    "embeddings with options": (special_embeddings, IDS),
    "experts": (moe, X),
    "derivative inside": (force_field, X),
    "bilinear": (lambda: Module(lambda m, x: m.a(x, m.b(x)), a=nn.Bilinear(4, 4, 4), b=nn.Linear(4, 4)), X),
    "vmap": (lambda: Module(lambda m, x: torch.func.vmap(m.a)(x) + m.a(input=x), a=nn.Linear(4, 4)), X),
    "constant": (lambda: Module(lambda m, x: (m.a(x).detach(), m.b(x)), **two()), X),
    "no grad inside": (lambda: Module(lambda m, x: m.b(x) + torch.no_grad()(m.a)(x), **two()), X),
}  # fmt: skip


def inputs(shape, m):
    generator = torch.Generator().manual_seed(m)

    def make(what):
        if what == IDS:
            return torch.randint(7, (2, 3), generator=generator)
        if isinstance(what, tuple) and all(isinstance(n, int) for n in what):
            return torch.randn(what, generator=generator, dtype=torch.float64).requires_grad_()
        return what

    single = shape == IDS or all(isinstance(n, int) for n in shape)
    return (make(shape),) if single else tuple(make(what) for what in shape)


def gradients_for(out):
    generator = torch.Generator().manual_seed(9)

    def make(t):
        wanted = isinstance(t, torch.Tensor) and t.requires_grad
        return torch.randn(t.shape, generator=generator, dtype=t.dtype) if wanted else None

    return tree_map(make, out)


def collected(module, found):
    return {"inputs": found, **{n: p.grad for n, p in module.named_parameters()}, **dict(module.named_buffers())}


def plain(module, shape, microbatches):
    found = []
    for m in range(microbatches):
        args = inputs(shape, m)
        out = module(*args)
        ends = [
            (o, g) for o, g in zip(tree_leaves(out), tree_leaves(gradients_for(out)), strict=True) if g is not None
        ]
        torch.autograd.backward(*zip(*ends, strict=True))
        found.append([t.grad for t in tree_leaves(args) if isinstance(t, torch.Tensor)])
    return collected(module, found)


def ours(module, stage, shape, microbatches, split):
    """F F, I I, W W, or F I W for each."""
    bags, calls, found = [], [], {}
    for m in range(microbatches):
        bags.append(WeightGradBag(checked=True))
        stage.begin(seed=0, step=0, microbatch=m, bag=bags[m])
        args = inputs(shape, m)
        calls.append((out := module(*args), gradients_for(out), args))
        stage.release()
        if not split:
            found[m] = stage_backward_input(*calls[m])
            stage_backward_weight(bags[m])
    for m in reversed(range(microbatches if split else 0)):
        found[m] = stage_backward_input(*calls[m])
        calls[m] = None
    for bag in bags:
        stage_backward_weight(bag)
    return collected(module, [tensors_only(inputs(shape, m), found[m]) for m in range(microbatches)])


def tensors_only(args, grads):
    pairs = zip(tree_leaves(args), tree_leaves(grads), strict=True)
    return [g for a, g in pairs if isinstance(a, torch.Tensor)]


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        for mine, theirs in zip(tree_leaves(found[name]), tree_leaves(value), strict=True):
            assert (mine is None) == (theirs is None), name
            if theirs is not None:
                torch.testing.assert_close(
                    mine, theirs, rtol=1e-11, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}"
                )


def twins(make):
    torch.manual_seed(0)
    module = make().double()
    torch.manual_seed(0)
    return module, make().double()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", ZOO)
def test_gradients_are_the_plain_ones(name, split):
    make, shape = ZOO[name]
    module, twin = twins(make)
    if name == "fused function":
        module.w.sums, twin.w.sums = module.total, twin.total
    expected = plain(twin, shape, 2)
    stage = StageContext()
    handle = reroute(module, stage)
    assert_equal(ours(module, stage, shape, 2, split), expected)
    if name == "fused function":
        assert len(module.counts) == len(twin.counts) == 4
    handle.remove()
    assert not any("forward" in m.__dict__ for m in module.modules())


@pytest.mark.parametrize(
    "name", ["written in place", "tuple", "dict", "weight used twice", "attention", "experts", "tied"]
)
def test_with_every_linear_a_region(name):
    """Regions around the rerouted modules themselves, put on first or last."""
    make, shape = ZOO[name]
    for first in (True, False):
        module, twin = twins(make)
        expected, stage = plain(twin, shape, 2), StageContext()
        handles = [reroute(module, stage)] if first else []
        handles.append(apply_recompute(module, [nn.Linear], stage=stage))
        handles += [] if first else [reroute(module, stage)]
        assert_equal(ours(module, stage, shape, 2, True), expected)
        for handle in handles:
            handle.remove()
        assert not any("forward" in m.__dict__ for m in module.modules())


def with_hooks(module, log):
    for name, child in module.named_children():
        child.register_forward_pre_hook(lambda m, args, n=name: log.append((n, "before")))
        child.register_forward_hook(lambda m, args, out, n=name: log.append((n, "after")) or out * 1.5)
        child.register_full_backward_pre_hook(lambda m, g, n=name: log.append((n, "back")) or (g[0] * 2,))
        child.register_full_backward_hook(lambda m, i, g, n=name: log.append((n, "done", i[0] is not None)))
        if name in "02":
            child.weight.register_hook(lambda g, n=name: log.append((n, "weight", g.shape)) or g * 3)
            child.bias.register_hook(lambda g, n=name: log.append((n, "bias", g.shape)) or g * 5)
        if name == "4":
            child.weight.register_post_accumulate_grad_hook(
                lambda p, n=name: log.append((n, "post", p.grad.sum().item()))
            )
    return module


def test_hooks_fire_as_in_the_plain_module():
    def make():
        return nn.Sequential(*[nn.Linear(4, 4) if i % 2 == 0 else nn.Tanh() for i in range(7)])

    logs = [], []
    module, twin = (with_hooks(m, log) for m, log in zip(twins(make), logs, strict=True))
    expected = plain(twin, X, 1)
    stage = StageContext()
    reroute(module, stage)
    assert_equal(ours(module, stage, X, 1, True), expected)
    assert sorted(map(str, logs[0])) == sorted(map(str, logs[1])) and len(logs[0]) > 30
    order = [[event for event in log if event[1] not in ("weight", "bias", "post")] for log in logs]
    assert order[0] == order[1]


def test_trap_05_backward_in_another_thread_fills_the_same_bag():
    module, stage, bag = nn.Linear(4, 4), StageContext(), WeightGradBag()
    reroute(module, stage)
    stage.begin(seed=0, step=0, microbatch=0, bag=bag)
    loss = module(torch.randn(2, 4)).sum()
    stage.begin(seed=0, step=0, microbatch=1, bag=WeightGradBag())
    thread = threading.Thread(target=lambda: stage_backward_input(loss, None, None))
    thread.start()
    thread.join()
    assert len(bag) == 1 and len(stage.bag) == 0


def test_a_module_of_two_stages():
    """It defers into the bag of the stage that runs; while both have one, nobody can know, and nothing waits."""
    shared = nn.Linear(4, 4).double()
    first, last = nn.Sequential(nn.Linear(4, 4).double(), shared), nn.Sequential(shared, nn.Tanh())
    twin = copy.deepcopy(nn.ModuleList([first, last]))
    x = inputs(X, 0)[0]
    twin[1](twin[0](x.detach())).sum().backward()
    a, b = StageContext(), StageContext()
    handles = reroute(first, a), reroute(last, b)
    for release in (True, False):
        bags = WeightGradBag(), WeightGradBag()
        a.begin(seed=0, step=0, microbatch=0, bag=bags[0])
        between = first(x.detach())
        if release:
            a.release()
        b.begin(seed=0, step=0, microbatch=0, bag=bags[1])
        leaf = between.detach().requires_grad_()
        gradient = stage_backward_input(last(leaf).sum(), None, leaf)
        stage_backward_input(between, gradient, None)
        assert [len(bag) for bag in bags] == [2, 1 if release else 0]
        for bag in bags:
            bag.run()
        for p, q in zip(nn.ModuleList([first, last]).parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
            p.grad = None
        a.release(), b.release()
    handles[0].remove()
    assert "forward" in shared.__dict__ and "forward" not in first[0].__dict__
    handles[1].remove()
    assert "forward" not in shared.__dict__


def test_a_derivative_inside_a_region_leaves_nothing_in_the_bag():
    module, twin = twins(force_field)
    expected, stage = plain(twin, X, 2), StageContext()
    reroute(module, stage)
    holder = nn.ModuleList([module])
    apply_recompute(holder, "layer", stage=stage)
    assert_equal(ours(module, stage, X, 2, True), expected)


def llama_layers(transformers):
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2,
        vocab_size=11, attn_implementation="sdpa",
    )  # fmt: skip

    def run(m, x):
        place = m.rotary(x, torch.arange(x.shape[1])[None])
        for layer in m.layers:
            out = layer(x, position_embeddings=place, attention_mask=None)
            x = out[0] if isinstance(out, tuple) else out
        return x

    layers = nn.ModuleList([LlamaDecoderLayer(config, i) for i in range(2)])
    return Module(run, layers=layers, rotary=LlamaRotaryEmbedding(config))


@pytest.mark.parametrize("recomputed", [False, True])
def test_hugging_face_llama_layers(recomputed):
    transformers = pytest.importorskip("transformers")
    module, twin = twins(lambda: llama_layers(transformers))
    shape, stage = (2, 5, 16), StageContext()
    expected = plain(twin, shape, 2)
    assert len(reroute(module, stage).names) == 14
    if recomputed:
        apply_recompute(module, "layer", stage=stage)
    assert_equal(ours(module, stage, shape, 2, True), expected)
