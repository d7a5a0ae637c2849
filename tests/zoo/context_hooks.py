"""Hooks that write rows of hidden states over context ranks by number or by mask: steering, activation patching."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.zoo.case import Case, Family
from tests.zoo.context_losses import LAYOUTS, by, by_number

ROW = 3
POSITIONS = '`batch["position_ids"]`, or `ContextRows.of_state(ps).of(mask, 1)`'
SEEDS, ONE_SEED = "a seed for each rank", "one seed on the ranks of a sequence"
WRITTEN = "which are this context rank's.*position_ids"


def steered(change):
    """The mean of the losses of a model whose first layer's hidden states a hook has changed."""

    def loss_of(program):
        layer = program.model.decoder.layers[0]
        handle = layer.register_forward_hook(lambda module, args, hidden: change(hidden, vectors_like(hidden)))
        loss = program.losses().mean()
        handle.remove()
        return loss

    return loss_of


def deep_supervision(program):
    """The first layer's hidden states, [s/cp, b, h], through the model's own head beside the last one's."""
    model, kept = program.model, []
    handle = model.decoder.layers[0].register_forward_hook(lambda module, args, hidden: kept.append(hidden))
    loss = F.cross_entropy(program.logits().flatten(0, 1), program.labels.flatten())
    handle.remove()
    early = model.gather_logits(model.output_layer(model.decoder.final_layernorm(kept[0]))).transpose(0, 1)
    return loss + 0.3 * F.cross_entropy(early.flatten(0, 1), program.labels.flatten())


def vectors_like(hidden):
    """[b, h], as from a file."""
    _, b, h = hidden.shape
    return torch.linspace(-1, 1, b * h, dtype=torch.float64).view(b, h)


def copied(hidden, v):
    hidden = hidden.clone()
    hidden.narrow(0, ROW, 1).copy_(v[None])
    return hidden


def zeroed(hidden, v):
    hidden = hidden.clone()
    hidden[ROW].zero_()
    return hidden


def one_hot(hidden):
    mask = torch.zeros(len(hidden), 1, 1, dtype=hidden.dtype)
    mask[ROW] = 1
    return mask


def last_by_length(program):
    losses = program.losses()
    return torch.stack([row[n] for row, n in zip(losses, torch.tensor([4, 6]), strict=True)]).mean()


def by_document(program):
    losses = program.losses().flatten()
    lengths = torch.tensor([losses.numel() // 2] * 2)
    return torch.segment_reduce(losses, "max", lengths=lengths).mean()


def captured(of_hidden, averages=False):
    """What a hook of a forward without gradients saw is added to hidden states of the next one."""

    def loss_of(program):
        layer, seen = program.model.decoder.layers[0], []
        handle = layer.register_forward_hook(lambda module, args, hidden: seen.append(of_hidden(hidden)))
        with torch.no_grad():
            program.losses()
        handle.remove()
        vector = torch.as_tensor(seen[0])
        if averages and program.group is not None:
            dist.all_reduce(vector, group=program.group.process_group)
            vector /= program.ranks
        return steered(lambda hidden, v: hidden + vector)(program)

    return loss_of


def kept(hidden, seed):
    """[1, b, 1]"""
    draws = torch.rand(1, hidden.shape[1], 1, generator=torch.Generator().manual_seed(seed))
    return draws < 0.5


def seeded(change):
    def loss_of(program):
        rank = program.ps.index("cp")
        return steered(lambda hidden, v: change(hidden, rank))(program)

    return loss_of


def replaced(around):
    """A forward of the program's in the place of the first layer's: `around(own, x)`."""

    def loss_of(program):
        layer = program.model.decoder.layers[0]
        own = layer.forward
        layer.forward = lambda x, *args: around(lambda x: own(x, *args), x)
        loss = program.losses().mean()
        del layer.forward
        return loss

    return loss_of


def of_class_in_evaluation(around):
    """The same of the layers' class, in an evaluation whose losses over all ranks weigh the next ones."""

    def loss_of(program):
        kind = type(program.model.decoder.layers[0])
        own = kind.forward
        kind.forward = lambda self, x, *args: around(lambda x: own(self, x, *args), x)
        with torch.no_grad():
            before = program.whole(program.losses().sum())
        kind.forward = own
        return program.losses().mean() * (before / 32)

    return loss_of


def shifted(own, x):
    """RWKV's token shift."""
    return own(0.5 * x + 0.5 * torch.cat((torch.zeros_like(x[:1]), x[:-1])))


class OverItsSize(torch.autograd.Function):
    """The identity, whose gradient has length 1 at each token."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return F.normalize(gradient, dim=-1)


def of_gradients(change):
    """A hook on the gradient of the first layer's hidden states, [s/cp, b, h]."""

    def loss_of(program):
        layer = program.model.decoder.layers[0]
        handle = layer.register_forward_hook(lambda module, args, hidden: hidden.register_hook(change) and None)
        loss = program.losses().mean()
        handle.remove()
        return loss

    return loss_of


def limit_by(ranks):
    return lambda g: ranks * (g / ranks).clamp(-1e-4, 1e-4)


def by_size(what, loss_of):
    return Case(what, by(loss_of), "told", "gradients of rows which are this context rank's", "`n * f(g / n)`")


def numbers():
    return torch.tensor([ROW])


def written(what, change):
    return Case(what, by(steered(change)), "told", WRITTEN, POSITIONS)


CASES = [
    written("a hook, `h.index_copy(0, rows, v)`", lambda h, v: h.index_copy(0, numbers(), v[None])),
    written("a hook, `h.index_fill(0, rows, 0.0)`", lambda h, v: h.index_fill(0, numbers(), 0.0)),
    written("a hook, `h.narrow(0, row, 1).copy_(v)`", copied),
    written("a hook, `h[row].zero_()`", zeroed),
    written(
        "a hook, `torch.slice_scatter(h, v, 0, row, row + 1)`",
        lambda h, v: torch.slice_scatter(h, v[None], 0, ROW, ROW + 1),
    ),
    written("a hook, `h.masked_scatter(mask, v)`", lambda h, v: h.masked_scatter(one_hot(h).bool().expand_as(h), v)),
    Case(
        "a hook, `h + mask * v` with a mask of one row",
        by(steered(lambda h, v: h + one_hot(h) * v)),
        "told",
        "the same on all 2 context ranks",
        POSITIONS,
    ),
    Case("a hook, samples dropped by one seed (DropPath)", by(steered(lambda h, v: h * kept(h, 1)))),
    Case(
        "a hook, samples dropped by a seed of each rank (DropPath)",
        by(seeded(lambda h, seed: h * kept(h, seed))),
        "told",
        SEEDS,
        ONE_SEED,
    ),
    Case(
        "a hook, samples masked by a seed of each rank",
        by(seeded(lambda h, seed: h.masked_fill(~kept(h, seed), 0.0))),
        "told",
        SEEDS,
        ONE_SEED,
    ),
    Case(
        "a hook, a layer dropped by a coin of each rank",
        by(seeded(lambda h, seed: h * kept(h, seed)[0, 0, 0].to(h))),
        "told",
        SEEDS,
        ONE_SEED,
    ),
    Case(
        "a steering vector, the mean of hidden states without gradients",
        by(captured(lambda h: h.mean((0, 1)))),
        "told",
        "mean of rows which are this context rank's",
        "averaged by `all_reduce` before it is added",
    ),
    Case(
        "a steering vector of one position",
        by(captured(lambda h: h[ROW].mean(0))),
        "told",
        "getitem of rows which are this context rank's",
        POSITIONS,
    ),
    Case(
        "a steering vector by `.tolist()`",
        by(captured(lambda h: [sum(x) / len(x) for x in zip(*h.flatten(0, 1).tolist(), strict=True)])),
        "told",
        "values of rows which are this context rank's",
        "`gather_from_context_region` before",
    ),
    Case("a steering vector, averaged over the ranks", by(captured(lambda h: h.mean((0, 1)), averages=True))),
    Case(
        "a hook, `h + h.sign() / h.shape[0] ** 0.5`",
        by(steered(lambda h, v: h + h.sign() / h.shape[0] ** 0.5)),
        "told",
        "by the number of rows which are this context rank's",
        "the length of whole sequences",
    ),
    Case(
        "a hook, `h.view(h.shape[0], -1, 4)`",
        by(steered(lambda h, v: h.view(h.shape[0], h.shape[1], -1, 4).flatten(2))),
    ),
    Case("a hook, `h + v`", by(steered(lambda h, v: h + v))),
    Case("a hook, `h.index_fill(2, columns, 0.0)`", by(steered(lambda h, v: h.index_fill(2, numbers(), 0.0)))),
    Case("deep supervision: a hooked layer through `output_layer` and `gather_logits`", by(deep_supervision)),
    Case(
        "a forward in the place of a layer's: token shift",
        by(replaced(shifted)),
        "told",
        "rows by number, which are this context rank's",
        POSITIONS,
    ),
    Case(
        "a forward in the place of a layer's: less a mean over tokens",
        by(replaced(lambda own, x: own(x) - 0.1 * own(x).mean(0, keepdim=True))),
        "told",
        "mean, in a forward that replaces that of decoder.layers.0, is along rows which are this context rank's",
        "`gather_from_context_region` before it",
    ),
    Case(
        "a forward in the place of that of layers' class, in an evaluation: less a mean over tokens",
        by(of_class_in_evaluation(lambda own, x: own(x - 0.9 * x.mean(0, keepdim=True)))),
        "told",
        "forward that replaces that of decoder.layers.0|rows which are this context rank's",
        "`gather_from_context_region` before it",
    ),
    Case(
        "a forward in the place of that of layers' class, in an evaluation",
        by(of_class_in_evaluation(lambda own, x: 0.9 * own(x))),
    ),
    Case(
        "a forward in the place of a layer's: over its norm by token, `x + 0.9 * (y - x)`",
        by(replaced(lambda own, x: x + 0.9 * (own(x) / own(x).norm(dim=-1, keepdim=True) - x))),
    ),
    by_size("a hook, `h.register_hook(lambda g: g.clamp(-c, c))`", of_gradients(lambda g: g.clamp(-1e-4, 1e-4))),
    by_size(
        "a hook, gradients over their norm by token",
        of_gradients(lambda g: g / (g.norm(dim=-1, keepdim=True) + 1e-8)),
    ),
    by_size(
        "a hook, an own `autograd.Function` that normalises gradients", steered(lambda h, v: OverItsSize.apply(h))
    ),
    Case(
        "a hook, `h.register_hook(lambda g: g.clamp(-c, c))`, of g / n and n times that",
        by(lambda program: of_gradients(limit_by(program.ranks))(program)),
    ),
    Case("a hook, `h.register_hook(lambda g: -0.5 * g)`: gradient reversal", by(of_gradients(lambda g: -0.5 * g))),
    by_number("`for row, n in zip(losses, lengths): row[n]`", last_by_length),
    by_number("`torch.segment_reduce` of losses", by_document),
]

FAMILY = Family(
    "Hidden states over context ranks",
    "Rows that a program's hooks write, or that a loss takes one by one, on two context ranks, as on one.",
    CASES,
    tuple(LAYOUTS),
)
