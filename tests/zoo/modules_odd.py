"""Modules that do something torch allows and a pipeline may not expect."""

import copy
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from tests.zoo.modules_parts import D, Of, lin, twice


def _mlp(m, x):
    return m.b(torch.tanh(m.a(x)))


def _pair(run):
    return twice(lambda: Of(run, a=lin(), b=lin()))


def _selective(m, x):
    def policy(ctx, op, *args, **kwargs):
        keep = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    context = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(partial(_mlp, m), x.sin(), use_reentrant=False, context_fn=context)


def _nested(m, x):
    def inner(y):
        return checkpoint(lambda z: m.b(torch.tanh(z)), m.a(y), use_reentrant=False)

    return checkpoint(inner, x.sin(), use_reentrant=False)


def _sequential(m, x):
    return checkpoint_sequential(m.s, 2, x.sin(), use_reentrant=False)


def _dropout_inside(m, x):
    return checkpoint(lambda y: F.dropout(_mlp(m, y), 0.3), x, use_reentrant=False)


def _inner_loop(m, x):
    """First-order MAML: a step on a copy, inside forward."""
    with torch.enable_grad():
        fast = copy.deepcopy(m.a)
        fast.zero_grad()
        fast(x.detach()).square().mean().backward()
        with torch.no_grad():
            shift = [p - 0.1 * p.grad for p in fast.parameters()]
    return m.b(torch.tanh(m.a(x)) + F.linear(x, shift[0], shift[1]))


def _own_backward(m, x):
    """The norm of a gradient as a weight, by `backward` on the module itself."""
    before = [p.grad for p in m.a.parameters()]
    with torch.enable_grad():
        for p in m.a.parameters():
            p.grad = None
        m.a(x.detach()).square().mean().backward()
        norm = torch.stack([p.grad.norm() for p in m.a.parameters()]).sum()
        for p, old in zip(m.a.parameters(), before, strict=True):
            p.grad = old
    return _mlp(m, x) / (1 + norm)


def _derivative(m, x):
    with torch.enable_grad():
        place = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(_mlp(m, place).sum(), place, create_graph=True)
    return _mlp(m, x) + force


class _Quantizer(nn.Module):
    """Moving averages of codes, as VQ-VAEs have them."""

    def __init__(self, data):
        super().__init__()
        self.lin, self.data = lin(), data
        self.register_buffer("codes", torch.randn(6, D))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        z = self.lin(x)
        ids = torch.cdist(z.detach().reshape(-1, D), self.codes).argmin(-1)
        codes = self.codes[ids].view_as(z)
        with torch.no_grad():
            moved = self.codes.index_add(0, ids, 0.1 * (z.reshape(-1, D) - self.codes[ids]))
            (self.codes.data if self.data else self.codes).copy_(moved)
            self.calls += 1
        return z + (codes - z).detach() + z * codes


class _Replaces(nn.Module):
    """Binds a buffer anew in each forward, and counts in an attribute."""

    def __init__(self):
        super().__init__()
        self.lin, self.count = lin(), 0
        self.register_buffer("mean", torch.zeros(D))

    def forward(self, x):
        y = self.lin(x)
        self.count += 1
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean((0, 1))
        return (y - self.mean) / self.count


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum((0, 1))


def _function():
    return Of(lambda m, x: m.a(_Scaled.apply(x, m.w)), a=lin(), w=nn.Parameter(torch.randn(D)))


def _auxiliary(m, x):
    """An auxiliary loss left on the module, which goes on with the output."""
    y = m.layer(x)
    return y + m.layer.aux * 3


class _Gated(nn.Module):
    """Leaves a list of numbers."""

    def __init__(self):
        super().__init__()
        self.lin, self.gate = lin(), lin()

    def forward(self, x):
        gate = self.gate(x).softmax(-1)
        self.leave(gate)
        return x + self.lin(x) * gate

    def leave(self, gate):
        self.kept = [gate.mean()]


class _Aux(_Gated):
    def leave(self, gate):
        self.aux = gate.square().mean()


class _Collects(nn.Module):
    """Router logits collected by hooks, as Hugging Face does."""

    def __init__(self):
        super().__init__()
        self.layer, self.found = _Gated(), []
        self.layer.gate.register_forward_hook(lambda module, args, out: self.found.append(out))

    def forward(self, x):
        self.found.clear()
        y = self.layer(x)
        return y + self.found[0].logsumexp(-1).mean() + self.layer.kept[0]


@dataclass
class _Output:
    hidden: Tensor
    scale: Tensor
    name: str = "out"


class _Opaque:
    def __init__(self, value):
        self.value = value


def _held(kind):
    """An object between the stages."""
    return lambda: [
        Of(lambda m, x: kind(m.a(x)), a=lin()),
        Of(lambda m, given: m.a(given if isinstance(given, Tensor) else _of(given)), a=lin()),
    ]


def _of(given):
    if isinstance(given, tuple | list):
        return given[0]
    if isinstance(given, _Output):
        return given.hidden * given.scale
    return given.value


def _float_mask():
    def first(m, x):
        mask = torch.zeros(x.shape[1], x.shape[1]).masked_fill(
            torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -1e9
        )
        return m.a(x), mask

    def second(m, x, mask):
        assert not mask.requires_grad
        return m.b(x + F.scaled_dot_product_attention(x, x, x, mask))

    return [Of(first, a=lin()), Of(second, b=lin())]


def _in_place(m, x):
    x += 1
    x.mul_(0.5)
    return _mlp(m, x)


def _vmap(m, x):
    return x + torch.vmap(lambda row: torch.tanh(m.a(row)))(x)


def _functional_call(m, x):
    return torch.func.functional_call(m.a, {n: p * 2 for n, p in m.a.named_parameters()}, x) + m.b(x)


def _jacobian(m, x):
    with torch.enable_grad():
        return m.b(x) + torch.func.vmap(torch.func.vmap(torch.func.jacrev(lambda v: torch.tanh(m.a(v)))))(x).sum(-1)


def _nested_tensor(m, x):
    parts = torch.nested.nested_tensor([x[0, :2], x[1]], layout=torch.jagged)
    return m.a(x) + m.b(parts).values().sum(0)


def _compiled(backend):
    def make():
        inner = nn.Sequential(lin(), nn.Tanh(), lin())
        inner.compile(backend=backend)
        return inner

    return twice(make)


def _traced():
    return torch.jit.trace(nn.Sequential(lin(), nn.Tanh(), lin()), torch.zeros(2, 5, D), check_trace=False)


def _weights_written(m, x):
    """Clips a weight in each forward."""
    with torch.no_grad():
        m.a.weight.clamp_(-0.2, 0.2)
    return _mlp(m, x)


def _cuts(m, x):
    return m.a(x.detach()) + m.b(x)


def _straight_through(m, x):
    y = m.a(x)
    return m.b(y + (y.round() - y).detach())


def _momentum_encoder():
    def run(m, x):
        with torch.no_grad():
            for slow, fast in zip(m.slow.parameters(), m.a.parameters(), strict=True):
                slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
            target = m.teacher(x)
        return m.a(x) - target

    return Of(run, a=lin(), slow=lin().requires_grad_(False), teacher=lin().requires_grad_(False))


def _mask_loss(output, microbatch):
    return output.square().mean(), 1


def _layer(says):
    return {f"{schedule}, layer": ("refused", says) for schedule in ("1f1b", "zb-v", "auto")}


WRITTEN = r"written .* between a forward and its backward|modified by an inplace operation"

ODD: dict[str, Any] = {
    "`checkpoint(use_reentrant=False)`": _pair(
        lambda m, x: checkpoint(partial(_mlp, m), x.sin(), use_reentrant=False)
    ),
    "`checkpoint(use_reentrant=True)`": {
        "make": _pair(lambda m, x: m.b(checkpoint(partial(_mlp, m), m.a(x), use_reentrant=True))),
        "elsewhere": {
            **_layer("use_reentrant=False"),
            **{f"{s}, stage": ("told", "None of the inputs have requires_grad") for s in ("zb-v", "auto")},
        },
        "remedy": "`use_reentrant=False`",
    },
    "selective `checkpoint`": {
        "make": _pair(_selective),
        "elsewhere": _layer("not found in storage"),
        "remedy": "one of the two: `recompute='none'`, or no checkpoint inside",
    },
    "nested `checkpoint`": _pair(_nested),
    "`checkpoint_sequential`": twice(lambda: Of(_sequential, s=nn.Sequential(lin(), nn.Tanh(), lin(), nn.Tanh()))),
    "`checkpoint` with dropout inside": _pair(_dropout_inside),
    "an inner loop on a deep copy (first-order MAML)": _pair(_inner_loop),
    "`loss.backward()` inside forward": {
        "make": _pair(_own_backward),
        "remedy": "return the loss beside the output, or recompute='none' or 'layer'",
        "elsewhere": {f"{s}, stage": ("refused", r"calls backward\(\) in its forward") for s in ("zb-v", "auto")},
    },
    "a derivative inside forward (force fields)": _pair(_derivative),
    "a vector quantizer with moving averages": twice(lambda: _Quantizer(False)),
    "a vector quantizer that writes `.data`": twice(lambda: _Quantizer(True)),
    "a buffer bound anew, a counter in an attribute": twice(_Replaces),
    "an `autograd.Function` of one's own": twice(_function),
    "an auxiliary loss on a module (`self.aux = ...`)": twice(lambda: Of(_auxiliary, layer=_Aux())),
    "what hooks collect (router logits)": twice(_Collects),
    "a dataclass between stages": _held(lambda y: _Output(y, y.mean())),
    "a list between stages": _held(lambda y: [y, None, "text", 3]),
    "an object that holds a tensor between stages": {
        "make": _held(_Opaque),
        "outcome": "refused",
        "says": "stage 0 returns a .*_Opaque.* that holds a tensor",
        "remedy": "return tensors in tuples, lists, mappings or dataclasses",
        "elsewhere": {f"1f1b, {policy}": ("right", "") for policy in ("none", "layer", "stage")},
    },
    "a `SimpleNamespace` between stages": {
        "make": _held(lambda y: SimpleNamespace(value=y)),
        "outcome": "refused",
        "says": "stage 0 returns a types.SimpleNamespace that holds a tensor",
        "remedy": "return tensors in tuples, lists, mappings or dataclasses",
        "elsewhere": {f"1f1b, {policy}": ("right", "") for policy in ("none", "layer", "stage")},
    },
    "a float mask between stages": {"make": _float_mask},
    "a stage that writes into its input": {
        "make": lambda: [lin(), Of(_in_place, a=lin(), b=lin())],
        "elsewhere": _layer("writes into its input"),
        "remedy": "clone it, or name the layers inside",
    },
    "`torch.vmap`": _pair(_vmap),
    "`torch.func.functional_call`": _pair(_functional_call),
    "`torch.func.jacrev`": _pair(_jacobian),
    "nested tensors inside a stage": _pair(_nested_tensor),
    "`module.compile(backend='eager')`": _compiled("eager"),
    "`module.compile(backend='aot_eager')`": _compiled("aot_eager"),
    "`torch.jit.trace`": twice(_traced),
    "weights written in forward (clipping)": {
        "make": _pair(_weights_written),
        "elsewhere": _layer(WRITTEN),
        "remedy": "write weights between steps",
    },
    "`detach` inside": _pair(_cuts),
    "a straight-through estimator": _pair(_straight_through),
    "a frozen momentum encoder": twice(_momentum_encoder),
    "a loss that is a mean": {"make": _pair(_mlp), "loss_fn": _mask_loss},
}
