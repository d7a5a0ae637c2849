"""Masks over the vocabulary that programs make of labels of a batch that context_batch has cut."""

import torch
import torch.nn.functional as F

from tests.models.gpt import VOCAB
from tests.zoo.case import Case, Family
from tests.zoo.context_batches import told
from tests.zoo.context_losses import LAYOUTS, by


def unlikelihood(mask_of):
    """The tokens that a mask names are made less likely, as one does with repeated ones (arXiv 1908.04319)."""

    def loss_of(program):
        logits = program.logits()
        mask = mask_of(program.labels)
        likelihood = logits.softmax(-1)
        unlikely = -(mask * (1 - likelihood).clamp(min=1e-5).log()).sum(-1)
        of_tokens = F.cross_entropy(logits.flatten(0, 1), program.labels.flatten(), reduction="none")
        return (of_tokens.view_as(unlikely) + 0.1 * unlikely).mean()

    return loss_of


def zeros(*shape):
    return torch.zeros(*shape, VOCAB, dtype=torch.float64)


def bag(labels):
    return zeros(len(labels)).scatter_(1, labels, 1.0)[:, None]


def counted(labels):
    return zeros(len(labels)).scatter_add(1, labels, torch.ones(labels.shape, dtype=torch.float64))[:, None]


def of_others(labels):
    b, s = labels.shape
    return zeros(b, s).scatter(2, labels[:, None].expand(b, s, s), 1.0)


def set_at(labels):
    mask = zeros(len(labels))
    mask[torch.arange(len(labels))[:, None], labels] = 1.0
    return mask[:, None]


def found(labels):
    mask = zeros()
    mask[labels.unique()] = 1.0
    return mask


def one_hot(labels):
    return zeros(*labels.shape).scatter_(2, labels[..., None], 1.0)


def one_hot_set(labels):
    mask, places = zeros(labels.numel()), torch.arange(labels.numel())
    mask[places, labels.flatten()] = 1.0
    return mask.view(*labels.shape, VOCAB)


def smoothed(labels):
    """Label smoothing as in the Annotated Transformer: rows of padding are set to zero."""
    mask = torch.full((labels.numel(), VOCAB), 0.1 / VOCAB, dtype=torch.float64)
    mask.scatter_(1, labels.reshape(-1, 1), 0.9)
    mask.index_fill_(0, torch.nonzero(labels.reshape(-1) == 7).squeeze(1), 0.0)
    return mask.view(*labels.shape, VOCAB)


def stop_words(labels):
    return torch.isin(labels, torch.tensor([3, 5, 9])).double()[..., None]


def is_in(labels):
    return torch.isin(torch.arange(VOCAB), labels).double()


def filled(labels):
    return zeros().index_fill(0, labels.flatten(), 1.0)


def put(labels):
    return zeros().index_put_((labels,), torch.ones((), dtype=torch.float64))


CASES = [
    told("`zeros(b, V).scatter_(1, labels, 1)`: a sequence's bag of words", unlikelihood(bag), "scatter_ of"),
    told("`zeros(b, V).scatter_add(1, labels, ones)`", unlikelihood(counted), "scatter_add of"),
    told("`zeros(b, s, V).scatter(2, labels[:, None].expand(b, s, s), 1)`", unlikelihood(of_others), "scatter of"),
    told("`mask[arange(b)[:, None], labels] = 1`", unlikelihood(set_at), "setitem of"),
    told("`mask[labels.unique()] = 1`", unlikelihood(found), "unique of"),
    told("`torch.isin(arange(V), labels)`", unlikelihood(is_in), "isin of"),
    told("`zeros(V).index_fill(0, labels.flatten(), 1)`", unlikelihood(filled), "index_fill of"),
    told("`zeros(V).index_put_((labels,), one)`", unlikelihood(put), "index_put_ of"),
    Case("`zeros(b, s, V).scatter_(2, labels[..., None], 1)`", by(unlikelihood(one_hot))),
    Case("`mask[arange(n), labels.flatten()] = 1`, n = b s", by(unlikelihood(one_hot_set))),
    Case("label smoothing with `index_fill_` of the rows of padding", by(unlikelihood(smoothed))),
    Case("`torch.isin(labels, stop_words)`", by(unlikelihood(stop_words))),
]

FAMILY = Family(
    "Masks over the vocabulary over context ranks",
    "Made of the labels that context_batch has cut, on two context ranks, as on one.",
    CASES,
    tuple(LAYOUTS),
)
