"""Rows of a split weight that a penalty takes by number, by functions which a table may not know."""

import numpy as np
import torch
import torch.nn.functional as F

from core.parallel_state import layout_of
from tests.models.gpt import VOCAB
from tests.zoo.case import Case
from tests.zoo.split_model import SEQUENCE, gradients, loss_of, only_split, train, weights
from tests.zoo.tools_by_hand import in_buckets

FULL = "`core.tensor_parallel.full_tensor(weight)`"


def penalized(function):
    """The gradients of a loss with a penalty on some of the embedding table."""

    def program(model):
        table = model.embedding.word_embeddings.weight
        (loss_of(model) + 0.1 * function(table).square().mean()).backward()

    return gradients(program, style="llama")


def told(what, function, says):
    return Case(what, penalized(function), remedy=FULL, elsewhere=only_split("told", says))


def refused(what, function, says):
    return Case(what, penalized(function), remedy=FULL, elsewhere=only_split("refused", says))


def of_all_words(table):
    return F.one_hot(torch.tensor([3, 17]), layout_of(table).padded_shape()[0]).double() @ table


def singular_values(table):
    torch.manual_seed(0)
    return torch.svd_lowrank(table, q=4)[1]


def halved(model):
    """Some columns of each row: elementwise."""
    with torch.no_grad():
        model.embedding.word_embeddings.weight.chunk(2, dim=1)[0].mul_(0.5)


def ablated(model):
    """A hook that leaves out the first columns of what a row linear is given: a head, it seems."""

    def masked(module, args):
        mask = torch.ones(args[0].shape[-1]).to(args[0])
        mask[:4] = 0
        return args[0] * mask, *args[1:]

    model.decoder.layers["0"].self_attention.linear_proj.register_forward_pre_hook(masked)
    train(model)


def without_a_head(model):
    def ablate(module, args, heads):
        heads = heads.clone()
        heads[:, 0] = 0
        return heads

    model.decoder.layers["0"].self_attention.core_attention.register_forward_hook(ablate)
    train(model)


def without_a_position(model):
    def ablate(module, args, heads):
        heads = heads.clone()
        heads[:, :, 0] = 0
        return heads

    model.decoder.layers["0"].self_attention.core_attention.register_forward_hook(ablate)
    train(model)


def noisy(shape_of):
    """Noise on gradients, drawn by their shapes."""

    def look(model):
        draws = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for p in model.parameters():
                p.grad.add_(torch.randn(shape_of(p.grad), generator=draws, dtype=torch.float64), alpha=1e-2)

    return in_buckets(look)


def normed(model):
    for p in model.parameters():
        p.grad.mul_(min(1.0, 0.1 / float(np.linalg.norm(p.grad.numpy()))))


def by_parts(what, run, says):
    return Case(what, run, remedy=FULL, elsewhere=only_split("told", says))


def replaced(name, around):
    """A forward of the program's in the place of a part's own: `around(own, x)`."""

    def program(model):
        part = model.get_submodule(name)
        own = part.forward
        part.forward = lambda x, *args: around(lambda x: own(x, *args), x)
        train(model)

    return weights(program)


def table_of(model):
    return model.embedding.word_embeddings.weight


def set_rows(gradient, rows):
    gradient[rows] = 0


def strongest(own, x):
    """k-winners-take-all."""
    return own(x * (x.abs() >= x.abs().topk(4, -1).values[..., -1:]))


FC2 = "decoder.layers.0.mlp.linear_fc2"
REPLACED = {SEQUENCE: ("told", "a forward in the place of its own on .* sees this")}

CASES = [
    by_parts(
        "A forward in the place of a row linear's: the strongest units",
        replaced(FC2, strongest),
        "topk between ColumnParallelLinear and RowParallelLinear|a forward in the place",
    ),
    Case(
        "A forward in the place of a row linear's: elementwise",
        replaced(FC2, lambda own, x: 0.9 * own(1.1 * x)),
        remedy="a general word under sequence parallelism",
        elsewhere=REPLACED,
    ),
    Case(
        "A forward in the place of a layer's: a mean over tokens",
        replaced("decoder.layers.0", lambda own, x: own(x - 0.5 * x.mean(0, keepdim=True))),
        remedy="`gather_from_sequence_region`",
        elsewhere=REPLACED,
    ),
    by_parts("A hook, columns times a mask that leaves some out", weights(ablated), "tensor rank's|a forward hook"),
    by_parts(
        "A hook on `core_attention`, `heads[:, 0] = 0`", weights(without_a_head), "tensor rank's|a forward hook"
    ),
    Case(
        "A hook on `core_attention`, `heads[:, :, 0] = 0`: a position",
        weights(without_a_position),
        remedy="a general word under sequence parallelism",
        elsewhere={SEQUENCE: ("told", "a forward hook on")},
    ),
    *[
        by_parts(
            f"the first rows of a table's gradient in a DataParallel, {what}", in_buckets(change), "by hand sees"
        )
        for what, change in {
            "`p.grad[:90] = 0`": lambda model: set_rows(table_of(model).grad, slice(None, 90)),
            "`p.grad[ids] = 0`": lambda model: set_rows(table_of(model).grad, torch.arange(60)),
            "`p.grad.data[ids] = 0`": lambda model: set_rows(table_of(model).grad.data, torch.arange(60)),
        }.items()
    ],
    by_parts("`p.grad += randn(p.grad.shape)` in a DataParallel", noisy(lambda g: g.shape), "shape by hand sees"),
    by_parts("`p.grad += randn(p.grad.size())` in a DataParallel", noisy(lambda g: g.size()), "size by hand sees"),
    by_parts("`np.linalg.norm(p.grad.numpy())` in a DataParallel", in_buckets(normed), "numpy by hand sees"),
    refused("`one_hot @ weight`", of_all_words, "this rank's part of.*full_tensor"),
    refused(
        "`F.embedding(ids, weight)` with ids of other ranks",
        lambda w: F.embedding(torch.tensor([3, VOCAB - 1]), w),
        "this rank's part of.*full_tensor",
    ),
    told("`weight.split(8)[1]`", lambda w: w.split(8)[1], "split by hand sees"),
    told("`weight.tensor_split(4)[1]`", lambda w: w.tensor_split(4)[1], "tensor_split by hand sees"),
    told("`torch.take(weight, numbers)`", lambda w: torch.take(w, torch.tensor([40, 41])), "take by hand sees"),
    told(
        "`weight.take_along_dim(rows, 0)`",
        lambda w: w.take_along_dim(torch.tensor([[3], [5]]), 0),
        "take_along_dim by hand sees",
    ),
    told("`torch.svd_lowrank(weight)`", singular_values, "svd_lowrank by hand sees"),
    told("`F.max_pool1d(weight.T, 3)`", lambda w: F.max_pool1d(w.T, 3), "max_pool1d by hand sees"),
    told("`weight.diff(dim=0)`", lambda w: w.diff(dim=0), "diff by hand sees"),
    told("`F.pdist(weight)`", F.pdist, "pdist by hand sees"),
    told("`F.avg_pool1d(weight.T, 3)`", lambda w: F.avg_pool1d(w.T, 3), "avg_pool1d by hand sees"),
    told("`weight.chunk(2, dim=1)[0].square().mean()`", lambda w: w.chunk(2, dim=1)[0], "mean by hand sees"),
    told("`weight.diff(dim=1).square().mean()`", lambda w: w.diff(dim=1), "mean by hand sees"),
    told("the mean of `torch.stack(weight.split(8, 1))`", lambda w: torch.stack(w.split(8, 1)), "mean by hand sees"),
    Case("`weight.chunk(2, dim=1)[0].mul_(0.5)`", weights(halved, style="llama")),
]
