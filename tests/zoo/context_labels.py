"""Labels that programs leave out of a batch that context_batch has cut: by windows, places, drawn masks."""

import torch
import torch.nn.functional as F

from tests.models.gpt import VOCAB
from tests.zoo.case import Case, Family
from tests.zoo.context_batches import summed_over_ranks, told
from tests.zoo.context_losses import LAYOUTS, by

IGNORED, WINDOW = -100, 4
TABLE = torch.rand(1009, generator=torch.Generator().manual_seed(3))
BY_NUMBER = "takes rows of a batch by number"
ON_ALL = "the same on all 2 context ranks"


def mean_of_kept(program, labels):
    """The mean over the labels of all ranks that are kept."""
    kept = summed_over_ranks(program, (labels != IGNORED).sum())
    logits = program.logits().flatten(0, 1)
    total = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / kept * program.ranks


def goldfish(program):
    """The goldfish loss: a hash of the last tokens leaves a label out."""
    labels = program.labels.clone()
    hashed = TABLE[labels.unfold(1, WINDOW, 1).prod(-1) % len(TABLE)]
    labels[:, WINDOW - 1 :][hashed < 0.3] = IGNORED
    return mean_of_kept(program, labels)


def prompts(write):
    """The first tokens of each sequence, left out in place through a view."""

    def loss_of(program):
        labels = program.labels.clone()
        write(labels[:, :WINDOW])
        return mean_of_kept(program, labels)

    return loss_of


def drawn(choose):
    def loss_of(program):
        labels = program.labels.clone()
        mask = torch.rand(labels.shape, generator=torch.Generator().manual_seed(5)) < 0.3
        return mean_of_kept(program, choose(labels, mask))

    return loss_of


def written(labels, mask):
    labels[mask] = IGNORED
    return labels


def of_frequent_tokens(program):
    labels = program.labels.clone()
    labels[labels < VOCAB // 3] = IGNORED
    return mean_of_kept(program, labels)


def by_position(program):
    labels = program.labels.clone()
    labels[program.rows["position_ids"] < WINDOW] = IGNORED
    return mean_of_kept(program, labels)


CASES = [
    told("the goldfish loss: `labels[:, 3:][hash(labels.unfold(1, 4, 1)) < p] = -100`", goldfish, BY_NUMBER),
    told("`labels[:, :n].fill_(-100)`", prompts(lambda part: part.fill_(IGNORED)), BY_NUMBER),
    told("`part = labels[:, :n]; part *= 0`", prompts(lambda part: part.__imul__(0)), BY_NUMBER),
    told("`labels[torch.rand(labels.shape, generator=g) < p] = -100`", drawn(written), ON_ALL),
    told(
        "`labels.masked_fill(torch.rand(labels.shape, generator=g) < p, -100)`",
        drawn(lambda labels, mask: labels.masked_fill(mask, IGNORED)),
        ON_ALL,
    ),
    Case("`labels[labels < n] = -100`", by(of_frequent_tokens)),
    Case("`labels[position_ids < n] = -100`", by(by_position)),
]

FAMILY = Family(
    "Labels over context ranks",
    "What a program leaves out of the labels that context_batch has cut, on two context ranks, as on one.",
    CASES,
    tuple(LAYOUTS),
)
