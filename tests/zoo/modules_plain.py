"""torch.nn's own modules, and what everybody builds from them."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.zoo.modules_parts import D, Of, around, channels, lin, twice


def _quiet(wrap, module):
    """Old wrappers warn that they are old."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return wrap(module)


def _attention(**how):
    return lambda: Of(lambda m, x: x + m.a(x, x, x, need_weights=False)[0], a=nn.MultiheadAttention(D, 2, **how))


def _masked():
    def run(m, x):
        mask = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        return x + m.a(x, x, x, attn_mask=mask)[0]

    return Of(run, a=nn.MultiheadAttention(D, 2, batch_first=True))


def _decoder():
    return Of(
        lambda m, x: m.d(x, m.memory(x)), d=nn.TransformerDecoderLayer(D, 2, 12, 0.1, batch_first=True), memory=lin()
    )


def _recurrent(kind, **how):
    return lambda: Of(lambda m, x: x + m.r(x)[0][..., :D], r=kind(D, D, batch_first=True, **how))


def _cell():
    def run(m, x):
        h, out = torch.zeros(x.shape[0], D), []
        for t in range(x.shape[1]):
            h = m.c(x[:, t], h)
            out.append(h)
        return torch.stack(out, 1)

    return Of(run, c=nn.GRUCell(D, D))


def _tokens(embed):
    second = lambda: Of(lambda m, x: m.b(torch.tanh(m.a(x))), a=lin(), b=nn.Linear(D, 16))  # noqa: E731
    return {"make": lambda: [embed(), second()], "kind": "tokens"}


def _bag():
    return Of(
        lambda m, ids: m.e(ids)[:, None] * m.w(ids).sum(1, keepdim=True),
        e=nn.EmbeddingBag(16, D),
        w=nn.Embedding(16, D),
    )


def _tied_in_a_stage():
    def run(m, ids):
        return m.lin(m.table(ids)) @ m.table.weight.t() @ m.table.weight

    return Of(run, table=nn.Embedding(16, D), lin=lin())


def _one_module_twice():
    shared = lin()
    return Of(lambda m, x: m.b(torch.tanh(m.a(x))), a=shared, b=shared)


class _Orthogonal(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).t()


def _parametrized():
    layer = lin()
    parametrize.register_parametrization(layer, "weight", _Orthogonal())
    return layer


def _pruned():
    layer = lin()
    prune.l1_unstructured(layer, "weight", 0.4)
    return layer


def _lazy():
    return Of(lambda m, x: m.b(torch.relu(m.a(x))), a=nn.Linear(D, 2 * D), b=nn.Linear(2 * D, D))


def _res_block():
    def run(m, x):
        y = x.transpose(1, 2)
        y = y + m.c2(m.relu(m.n(m.c1(y))))
        return m.relu(y).transpose(1, 2)

    return Of(
        run, c1=nn.Conv1d(D, D, 3, padding=1), n=nn.BatchNorm1d(D), relu=nn.ReLU(inplace=True), c2=nn.Conv1d(D, D, 1)
    )


class _DropPath(nn.Module):
    def forward(self, x):
        return x * (torch.rand(x.shape[0], 1, 1) > 0.3) / 0.7


def _frozen(module):
    return module.requires_grad_(False)


def _lora():
    def run(m, x):
        return m.base(x) + m.up(m.down(x)) * 0.5

    return Of(run, base=_frozen(lin()), down=nn.Linear(D, 2, bias=False), up=nn.Linear(2, D, bias=False))


def _film():
    return Of(
        lambda m, x: m.f(x) * (1 + m.g(x.mean(1, keepdim=True))) + m.b(x.mean(1, keepdim=True)),
        f=lin(),
        g=lin(),
        b=lin(),
    )


def _hypernetwork():
    def run(m, x):
        w = m.net(m.code).view(D, D)
        return F.linear(x, w)

    return Of(run, net=nn.Linear(3, D * D), code=nn.Parameter(torch.randn(3)))


def _experts():
    def run(m, x):
        flat = x.reshape(-1, D)
        gate = m.gate(flat).softmax(-1)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(m.experts):
            rows = (gate.argmax(-1) == i).nonzero(as_tuple=True)[0]
            out = out.index_add(0, rows, expert(flat[rows]) * gate[rows, i : i + 1])
        return x + out.view_as(x)

    return Of(run, gate=nn.Linear(D, 4), experts=nn.ModuleList([lin() for _ in range(4)]))


def _swiglu():
    return Of(
        lambda m, x: x + m.o(F.silu(m.g(x)) * m.u(x)), g=nn.Linear(D, 12), u=nn.Linear(D, 12), o=nn.Linear(12, D)
    )


PLAIN = {
    "`nn.Linear` stacks": twice(lambda: nn.Sequential(lin(), nn.GELU(), nn.Linear(D, D, bias=False))),
    "`nn.Bilinear`": twice(lambda: Of(lambda m, x: m.b(x, torch.tanh(x)), b=nn.Bilinear(D, D, D))),
    "`nn.MultiheadAttention`": twice(_attention(batch_first=True)),
    "`nn.MultiheadAttention` with dropout": twice(_attention(batch_first=True, dropout=0.3)),
    "`nn.MultiheadAttention` with added keys": twice(_attention(add_bias_kv=True, add_zero_attn=True)),
    "causal attention with a mask": twice(_masked),
    "`nn.TransformerEncoderLayer`": twice(lambda: nn.TransformerEncoderLayer(D, 2, 12, 0.1, batch_first=True)),
    "`nn.TransformerEncoderLayer(norm_first=True)`": twice(
        lambda: nn.TransformerEncoderLayer(D, 2, 12, 0.0, batch_first=True, norm_first=True)
    ),
    "`nn.TransformerEncoder`": twice(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 12, 0.1, batch_first=True), 2)
    ),
    "`nn.TransformerDecoderLayer`": twice(_decoder),
    "`nn.RNN`": twice(_recurrent(nn.RNN)),
    "`nn.LSTM` with dropout between layers": twice(_recurrent(nn.LSTM, num_layers=2, dropout=0.2)),
    "`nn.GRU`, both directions": twice(_recurrent(nn.GRU, bidirectional=True)),
    "`nn.GRUCell` in a loop": twice(_cell),
    "`nn.Conv1d`": channels(lambda: nn.Conv1d(D, D, 3, padding=1)),
    "`nn.ConvTranspose1d`": channels(lambda: nn.ConvTranspose1d(D, D, 3, padding=1)),
    "grouped `nn.Conv1d`": channels(lambda: nn.Conv1d(D, D, 3, padding=1, groups=4)),
    "`nn.Conv2d`, pooled and unfolded": twice(
        lambda: Of(lambda m, x: x + F.adaptive_avg_pool2d(m.c(x[:, None]), x.shape[1:])[:, 0], c=nn.Conv2d(1, 2, 3))
    ),
    "`nn.LayerNorm`": around(lambda: nn.LayerNorm(D)),
    "`nn.RMSNorm`": around(lambda: nn.RMSNorm(D)),
    "`nn.GroupNorm`": channels(lambda: nn.GroupNorm(2, D)),
    "`nn.BatchNorm1d`": channels(lambda: nn.BatchNorm1d(D)),
    "`nn.BatchNorm1d(momentum=None)`": channels(lambda: nn.BatchNorm1d(D, momentum=None)),
    "`nn.BatchNorm1d` in eval mode": channels(lambda: nn.BatchNorm1d(D).eval()),
    "`nn.SyncBatchNorm` in one process": channels(lambda: nn.BatchNorm1d(D, affine=False)),
    "`nn.InstanceNorm1d(track_running_stats=True)`": channels(
        lambda: nn.InstanceNorm1d(D, affine=True, track_running_stats=True)
    ),
    "`nn.InstanceNorm1d`": channels(lambda: nn.InstanceNorm1d(D)),
    "`nn.LocalResponseNorm`": channels(lambda: nn.LocalResponseNorm(3)),
    "`nn.PReLU`, `nn.RReLU`": around(lambda: nn.Sequential(nn.PReLU(), nn.RReLU())),
    "`nn.Dropout`, `nn.AlphaDropout`": around(lambda: nn.Sequential(nn.Dropout(0.3), nn.AlphaDropout(0.2))),
    "stochastic depth (DropPath)": around(_DropPath),
    "`nn.Embedding`": _tokens(lambda: nn.Embedding(16, D)),
    "`nn.Embedding(padding_idx=0)`": _tokens(lambda: nn.Embedding(16, D, padding_idx=0)),
    "`nn.Embedding(scale_grad_by_freq=True)`": _tokens(lambda: nn.Embedding(16, D, scale_grad_by_freq=True)),
    "`nn.EmbeddingBag`": _tokens(_bag),
    "an embedding tied to the head, in one stage": _tokens(_tied_in_a_stage),
    "one module called twice": twice(_one_module_twice),
    "`parametrizations.weight_norm`": around(lambda: parametrizations.weight_norm(lin())),
    "`parametrizations.spectral_norm`": around(lambda: parametrizations.spectral_norm(lin())),
    "`parametrizations.orthogonal`": around(lambda: parametrizations.orthogonal(lin())),
    "a parametrization of one's own": around(_parametrized),
    "`nn.utils.weight_norm` (old)": around(lambda: _quiet(nn.utils.weight_norm, lin())),
    "`nn.utils.spectral_norm` (old)": around(lambda: _quiet(nn.utils.spectral_norm, lin())),
    "`nn.utils.prune`": around(_pruned),
    "a policy that names a layer with old `weight_norm`": twice(lambda: _quiet(nn.utils.weight_norm, lin())),
    "a policy that names a layer with old `spectral_norm`": twice(lambda: _quiet(nn.utils.spectral_norm, lin())),
    "a policy that names a pruned layer": twice(_pruned),
    "layers of another width": twice(_lazy),
    "a residual block with `ReLU(inplace=True)`": twice(_res_block),
    "a stage that begins with `ReLU(inplace=True)`": {
        "make": twice(lambda: nn.Sequential(nn.ReLU(inplace=True), lin())),
        "elsewhere": {f"{s}, layer": ("refused", "writes into its input") for s in ("1f1b", "zb-v", "auto")},
        "remedy": "recompute='stage', or name the layers inside",
    },
    "LoRA": twice(_lora),
    "a frozen stage, then a trained one": lambda: [_frozen(lin()), lin()],
    "a trained stage, then a frozen one": lambda: [lin(), _frozen(lin())],
    "FiLM": twice(_film),
    "a hypernetwork": twice(_hypernetwork),
    "a mixture of experts": twice(_experts),
    "SwiGLU": twice(_swiglu),
    "`nn.Identity` and no parameters": lambda: [lin(), nn.Identity(), nn.Sequential(nn.Tanh(), lin())][::2],
    "`nn.PixelShuffle`, `nn.Fold`-like views": twice(
        lambda: Of(lambda m, x: m.l(x.unflatten(-1, (2, 4)).transpose(-1, -2).flatten(-2)).view_as(x), l=lin())
    ),
}  # fmt: skip
