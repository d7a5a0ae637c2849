"""What a module of one's own does between a column linear and a row linear, where each rank has its columns."""

import torch
from torch import nn
from torch.nn import functional as F

from core.parallel_state.layout import Layout, set_layout
from core.tensor_parallel import (
    ColumnParallelLinear,
    dropout_in_tensor_region,
    gather_from_tensor_region,
    reduce_from_tensor_region,
    scatter_to_tensor_region,
    sum_gradient,
    vocab_parallel_cross_entropy,
)
from tests.zoo.case import Case, compared
from tests.zoo.own_model import (
    FFN,
    HEADS,
    ONE,
    VOCAB,
    Attention,
    Feedforward,
    H,
    batch,
    built,
    states,
    train,
    weights,
    whole_weights,
)

GATHER, PARTS = "`gather_from_tensor_region`", "`(2, f)` with `split_dim=1`"


def between(function, width=FFN, **column):
    """`function(y)` between the two linears of a feed-forward part."""
    return weights(train, feedforward=lambda place: Feedforward(place, function, width, **column))


def grouped(function):
    """`function(y, place)`: it knows the group."""
    return weights(
        train, feedforward=lambda place: Feedforward(place, lambda y, place=place: function(y, place), FFN)
    )


class Flat(Attention):
    """q, k and v in one matrix as nn.Linear has them."""

    def __init__(self, place):
        super().__init__(place)
        self.qkv = ColumnParallelLinear(H, 3 * H, place=place)


class FlatInThree(Flat):
    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = (y.view(b, s, -1, H // HEADS).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Heads(Attention):
    """Heads by number. of_rank: how many are this rank's, by the heads in all and the tensor ranks."""

    def __init__(self, place, of_rank, name="n_head"):
        super().__init__(place)
        self.n_head, self.ranks, self.of_rank = HEADS, place.tp, of_rank
        if name != "n_head":
            del self.n_head
            setattr(self, name, HEADS // place.tp)

    def forward(self, x):
        b, s, _ = x.shape
        heads = self.of_rank(self)
        q, k, v = self.qkv(x).view(b, s, 3, heads, -1).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def heads(of_rank, name="n_head"):
    return weights(train, attention=lambda place: Heads(place, of_rank, name))


class ByHand(Attention):
    """Attention as everybody writes it: softmax over keys, an einsum, rotary halves, norms of each head."""

    def __init__(self, place, dropout=0.0, has_summed_norm=True):
        super().__init__(place)
        self.norm = nn.LayerNorm(H // HEADS)
        self.dropout, self.group = dropout, place.group if has_summed_norm else None

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, s, 3, -1, H // HEADS).unbind(2)
        weight, bias = (sum_gradient(p, self.group) for p in self.norm.parameters())
        q, k = F.layer_norm(q, q.shape[-1:], weight, bias), F.normalize(k, dim=-1)
        q = torch.cat([-q[..., H // HEADS // 2 :], q[..., : H // HEADS // 2]], -1) + q.cumsum(-1)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / (H // HEADS) ** 0.5
        scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), float("-inf"))
        chances = F.dropout(scores.softmax(-1), self.dropout)
        y = chances @ v.transpose(1, 2)
        return self.out(y.permute(0, 2, 1, 3).reshape(b, s, -1))


class Channels(Feedforward):
    """PReLU with a slope for each of this rank's columns. mark(slope): what is said of it where it is made."""

    def __init__(self, place, mark=lambda slope: None, has_summed_slope=False):
        super().__init__(place)
        self.slope = nn.Parameter(torch.full((FFN // place.tp,), 0.25))
        self.group = place.group if has_summed_slope else None
        mark(self.slope)

    def forward(self, x):
        y = self.up(x)
        return self.down(torch.where(y > 0, y, y * sum_gradient(self.slope, self.group)))


def channels(**how):
    return weights(train, feedforward=lambda place: Channels(place, **how))


def split_by_rows(parameter):
    set_layout(parameter, Layout((FFN,), {"tp": 0}))


class Queries(Attention):
    """Fewer keys and values than queries, each in a matrix of its own."""

    def __init__(self, place):
        super().__init__(place)
        self.q, self.kv = (
            ColumnParallelLinear(H, H, place=place),
            ColumnParallelLinear(H, (2, H // 2), split_dim=1, place=place),
        )
        del self.qkv

    def forward(self, x):
        q = self.q(x).unflatten(-1, (-1, H // HEADS)).transpose(1, 2)
        k, v = (
            y.unflatten(-1, (-1, H // HEADS)).transpose(1, 2) for y in self.kv(x).split(self.kv.weight.shape[1], -1)
        )
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        return self.out((torch.softmax(q @ k.mT, dim=-1) @ v).transpose(1, 2).flatten(2))


def gated(y):
    gate, up = y.chunk(2, dim=-1)
    return F.silu(gate) * up


def manual_norm(y):
    return y / (y.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


def whole_norm(y, place):
    squares = reduce_from_tensor_region(y.pow(2).sum(-1, keepdim=True) / FFN, place.group)
    return y / (squares.detach() + 1e-6).sqrt()


def gathered(y, place):
    whole = gather_from_tensor_region(y, place.group)
    return scatter_to_tensor_region(F.layer_norm(whole, whole.shape[-1:]), place.group)


class Penalized(Feedforward):
    """Keeps a penalty of its activations for the loss."""

    def forward(self, x):
        y = F.relu(self.up(x))
        self.penalty = y.abs().mean()
        return self.down(y)


def penalized(model):
    def loss(model, step):
        tokens, labels = batch(step)
        return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()) + 0.1 * model.feedforward.penalty

    train(model, loss=loss)


class Twice(Feedforward):
    def forward(self, x):
        y = self.up(x)
        return self.down(torch.cat([y[..., : y.shape[-1] // 2].relu(), (-y[..., : y.shape[-1] // 2]).relu()], -1))


class Doubled(Feedforward):
    """[relu(y), relu(-y)] into one row linear."""

    def __init__(self, place):
        super().__init__(place, width=FFN // 2)

    def forward(self, x):
        y = self.up(x)
        return self.down(torch.cat([F.relu(y), F.relu(-y)], -1))


class WholeIntoRow(Feedforward):
    def __init__(self, place):
        super().__init__(place, gather_output=True)


class Hooked(Feedforward):
    """A program's hooks on the two linears: on what the first returns, on gradients of what the second takes."""

    def __init__(self, place, *, forward=None, backward=None, look=None):
        super().__init__(place)
        if look is not None:
            self.up.register_full_backward_hook(lambda module, _, gradients: look(gradients[0]))
        if forward is not None:
            self.up.register_forward_hook(lambda module, args, y: forward(y))
        if backward is not None:
            self.down.register_full_backward_hook(lambda module, gradients, _: (backward(gradients[0]),))


class HookedBetween(Feedforward):
    """A program's backward hook, or pre-hook, on the activation between the linears."""

    def __init__(self, place, backward, pre):
        super().__init__(place, nn.GELU())
        if pre:
            self.between.register_full_backward_pre_hook(lambda module, gradients: (backward(gradients[0]),))
        else:
            self.between.register_full_backward_hook(lambda module, gradients, _: (backward(gradients[0]),))


def hooked_between(backward, pre=False):
    return weights(train, feedforward=lambda place: HookedBetween(place, backward, pre))


def hooked(**hooks):
    return weights(train, feedforward=lambda place: Hooked(place, **hooks))


def small(gradient):
    return gradient * (1e-3 / gradient.norm()).clamp(max=1)


def seen(gradient):
    print(f"{float(gradient.norm()):.3f}")


def by_tensor_hook(function):
    """`y.register_hook(function)` between the two linears."""

    def register(y):
        y.register_hook(function)
        return y

    return between(register)


def own_head(loss, **column):
    """A head over the vocabulary, split by columns, and its loss."""

    def run(variation):
        found = []
        for ps in states():
            model = built(ps, head=lambda place: ColumnParallelLinear(H, VOCAB, place=place, **column))

            def loss_of(model, step, ps=ps):
                tokens, labels = batch(step)
                return loss(model(tokens), labels, ps)

            train(model, loss=loss_of)
            found.append(whole_weights(model, ps))
        return compared(*found)

    return run


def plain_loss(logits, labels, ps):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def split_loss(logits, labels, ps):
    return vocab_parallel_cross_entropy(logits, labels, ps.group("tp")).mean()


def told(what, run, remedy, says):
    return Case(what, run, "told", says, remedy, elsewhere={ONE: ("right", "")})


def refused(what, run, says, remedy):
    return Case(what, run, "refused", says, remedy, elsewhere={ONE: ("right", "")})


SPLIT = '`set_layout(parameter, Layout((n,), {"tp": 0}))` of `core.parallel_state.layout`'
REDUCED = "gather_from_tensor_region"

CASES = [
    Case("attention by hand, softmax over keys", weights(train, attention=ByHand)),
    refused(
        "a norm of each head with weights of its own",
        weights(train, attention=lambda place: ByHand(place, has_summed_norm=False)),
        "sum_gradient",
        "`core.tensor_parallel.sum_gradient(weight, group)`",
    ),
    refused(
        "a slope for each of a rank's columns (PReLU)",
        channels(),
        r"set_layout.*Layout\(\(32,\), \{.tp.: 0\}\)",
        SPLIT,
    ),
    told(
        "a slope for each of a rank's columns by `sum_gradient`", channels(has_summed_slope=True), SPLIT, "set_layout"
    ),
    Case("a slope for each of a rank's columns, with a layout", channels(mark=split_by_rows)),
    Case("attention with fewer keys and values", weights(train, attention=Queries)),
    told(
        "all heads on a rank's columns, `view(b, s, 3, self.n_head, -1)`",
        heads(lambda module: module.n_head),
        "`view(b, s, 3, -1, d)`",
        "4 heads .n_head. on each of 2 ranks are 8 in all",
    ),
    Case("a rank's heads, `self.n_head // tp`", heads(lambda module: module.n_head // module.ranks)),
    Case(
        "a rank's heads, `self.num_heads_per_partition`",
        heads(lambda module: module.num_heads_per_partition, "num_heads_per_partition"),
    ),
    told("q, k and v flat, `chunk(3, -1)` of `3 * h`", weights(train, attention=FlatInThree), PARTS, "split_dim=1"),
    told("q, k and v flat, `view(b, s, 3, -1, d)`", weights(train, attention=Flat), PARTS, "split_dim=1"),
    Case("gate and up as `(2, f)`, `chunk(2, -1)`", between(gated, (2, FFN), split_dim=1)),
    Case("gate and up as `(2, f)`, `F.glu`", between(F.glu, (2, FFN), split_dim=1)),
    told("gate and up flat, `chunk(2, -1)` of `2 * f`", between(gated, 2 * FFN), PARTS, "split_dim=1"),
    told("gate and up flat, `F.glu`", between(F.glu, 2 * FFN), PARTS, "split_dim=1"),
    told("a layer norm over the width", between(lambda y: F.layer_norm(y, y.shape[-1:])), GATHER, REDUCED),
    told("a softmax over the width", between(lambda y: y.softmax(-1)), GATHER, REDUCED),
    told("a norm by hand, `y.pow(2).mean(-1)`", between(manual_norm), GATHER, REDUCED),
    told(
        "`F.normalize`, top-k over the width", between(lambda y: y * (y >= y.topk(2)[0][..., -1:])), GATHER, REDUCED
    ),
    told("columns by number", between(lambda y: torch.cat([y[..., :3] * 0, y[..., 3:]], -1)), PARTS, "split_dim=1"),
    told(
        "a penalty on activations", weights(penalized, feedforward=Penalized), "`reduce_from_tensor_region`", REDUCED
    ),
    told(
        "a forward hook on the first linear, `y / y.std(-1)`",
        hooked(forward=lambda y: y / y.std(-1, keepdim=True)),
        GATHER,
        REDUCED,
    ),
    told("a backward hook on the second linear, a norm of its gradient", hooked(backward=small), GATHER, REDUCED),
    told("a backward hook on the first linear, a norm is printed", hooked(look=seen), GATHER, REDUCED),
    told("`y.register_hook`, a norm of the gradient", by_tensor_hook(small), GATHER, REDUCED),
    told("a backward hook between the linears, a norm", hooked_between(small), GATHER, REDUCED),
    told("a backward pre-hook between the linears, a norm", hooked_between(small, pre=True), GATHER, REDUCED),
    Case("a backward hook between the linears, `g * 2`", hooked_between(lambda g: g * 2)),
    Case("a forward hook on the first linear, `y * 2`", hooked(forward=lambda y: y * 2)),
    Case("a backward hook on the second linear, `g * 2`", hooked(backward=lambda g: g * 2)),
    Case("`y.register_hook(lambda g: g.clamp(-1e-3, 1e-3))`", by_tensor_hook(lambda g: g.clamp(-1e-3, 1e-3))),
    Case("a norm summed by `reduce_from_tensor_region`", grouped(whole_norm)),
    Case("a layer norm of gathered columns", grouped(gathered)),
    Case("a softmax over the sequence", between(lambda y: y * y.softmax(1))),
    told(
        "`cat` of two activations into one row linear",
        weights(train, feedforward=Doubled),
        "a row linear each",
        "several",
    ),
    Case(
        "the whole input into a row linear",
        weights(train, feedforward=WholeIntoRow),
        "refused",
        "gather_output",
        "leave `gather_output` out",
        elsewhere={ONE: ("right", "")},
    ),
    told(
        "`F.dropout` between the linears",
        between(lambda y: F.dropout(y, 0.2)),
        "`dropout_in_tensor_region`",
        "same mask",
    ),
    Case("`dropout_in_tensor_region`", grouped(lambda y, place: dropout_in_tensor_region(y, 0.2, place.group))),
    told(
        "dropout on attention's probabilities",
        weights(train, attention=lambda place: ByHand(place, 0.2)),
        "`dropout_in_tensor_region(x, p, group, dim=1)`",
        "same mask",
    ),
    refused(
        "a head split by columns and `F.cross_entropy`",
        own_head(plain_loss),
        "vocab_parallel_cross_entropy",
        "`vocab_parallel_cross_entropy` or `gather_output=True`",
    ),
    Case("a head split by columns and `vocab_parallel_cross_entropy`", own_head(split_loss)),
    Case("a head with `gather_output=True`", own_head(plain_loss, gather_output=True)),
]
