"""Labels that programs leave out of a batch that context_batch has cut: by windows, places, drawn masks."""

import math

import numpy as np
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


def unlikely(seen_before):
    """Unlikelihood of the tokens that a sequence has had already (Welleck et al., arXiv 1908.04319)."""

    def loss_of(program):
        labels, logits = program.labels, program.logits()
        chances = logits.softmax(-1).clamp(max=0.999)
        told = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return told - (torch.log1p(-chances) * seen_before(labels)).sum(-1).mean()

    return loss_of


def carried(labels):
    b, s = labels.shape
    before, seen = torch.zeros(b, s, VOCAB, dtype=torch.bool), torch.zeros(b, VOCAB, dtype=torch.bool)
    for place in range(s):
        before[:, place] = seen
        seen = seen.scatter(1, labels[:, place : place + 1], True)
    return before


def written_through_views(labels):
    before = torch.zeros(*labels.shape, VOCAB, dtype=torch.bool)
    for place in range(1, labels.shape[1]):
        before[:, place] = before[:, place - 1]
        before[:, place].scatter_(1, labels[:, place - 1 : place], True)
    return before


def listed(labels):
    before = torch.zeros(*labels.shape, VOCAB)
    for number, sequence in enumerate(labels.tolist()):
        for place in range(len(sequence)):
            before[number, place, sequence[:place]] = 1
    return before


def own_label(labels):
    """Each row's own."""
    return torch.zeros(*labels.shape, VOCAB).scatter_(2, labels[..., None], 1)


def of_all_ranks(what, loss_of):
    return Case(what, by(loss_of), "told", COUNT, "times the data and context ranks")


def after_separator(array):
    """Answers alone, behind the first separator of a sequence: as scripts for instructions make it."""

    def loss_of(program):
        kept = np.cumsum(array(program.rows["tokens"]) < 4, axis=1) > 0
        return (program.losses() * torch.from_numpy(kept.copy())).mean()

    return loss_of


def prior_of(counts_of):
    """Logit adjustment (arXiv 2007.07314) by the tokens of each batch."""

    def loss_of(program):
        counts = np.ones(VOCAB)
        counts_of(program.labels, counts)
        logits = program.logits() + torch.from_numpy(np.log(counts / counts.sum()))
        return F.cross_entropy(logits.flatten(0, 1), program.labels.flatten())

    return loss_of


def counted_by_numpy(labels, counts):
    counts += np.bincount(labels.flatten().numpy(), minlength=VOCAB)


def counted_one_by_one(labels, counts):
    for row in labels:
        for label in row:
            counts[int(label)] += 1


def counted_by_index(labels, counts):
    for label in labels.flatten():
        counts[label] += 1


def weighted_by(seen_of):
    """A warm-up by tokens seen: the number is in `program.model`, as a loop keeps it beside its model."""

    def loss_of(program):
        before = getattr(program.model, "seen", 0) if program.step else 0
        program.model.seen = seen_of(program, before)
        return program.losses().mean() * (program.model.seen / 100)

    return loss_of


def seen_by_numel(program, seen):
    seen += program.rows["tokens"].numel()
    return seen


def seen_by_shape(program, seen):
    b, s = program.rows["tokens"].shape
    return seen + b * s


def seen_by_all(program, seen):
    b, s = program.rows["tokens"].shape
    return seen + b * s * program.ps.size("dp") * program.ps.size("cp")


def by_root(program):
    """A rate by the root of a batch's size."""
    return program.losses().mean() * math.sqrt(program.labels.numel())


def over_size(program):
    """Steps of an epoch."""
    return program.losses().mean() * (200 / program.labels.size(1))


def over_all(program):
    """A count that is summed over the ranks, beside another number."""
    numbers = summed_over_ranks(program, torch.tensor([0.5, program.labels.numel()]))
    return program.losses().sum() / numbers[1] * program.ranks


def as_shapes(program):
    b, s = program.labels.shape
    assert list(range(s)) == torch.arange(s).tolist() and s // 2 + 1 > 0
    return program.losses().view(b * s).sum() / program.labels.numel()


NUMPY, COUNT = "numpy of a batch's rows", "the size of rows which are this context rank's makes a count or a rate"
CASES = [
    told("a mask behind a separator, by `tokens.numpy()`", after_separator(lambda x: x.numpy()), NUMPY),
    told("by `np.asarray(tokens)`", after_separator(lambda x: np.asarray(x)), "array of a batch's rows"),
    told("by `tokens.data.cpu().numpy()`", after_separator(lambda x: x.data.cpu().numpy()), NUMPY),
    told("a prior by `np.bincount(labels.flatten().numpy())`", prior_of(counted_by_numpy), NUMPY),
    told("a prior by `counts[int(label)] += 1`", prior_of(counted_one_by_one), "int of a batch's rows"),
    told("a prior by `counts[label] += 1`", prior_of(counted_by_index), "index of a batch's rows"),
    of_all_ranks("a warm-up by tokens seen, `seen += tokens.numel()`", weighted_by(seen_by_numel)),
    of_all_ranks("`b, s = tokens.shape; seen += b * s`", weighted_by(seen_by_shape)),
    of_all_ranks("`math.sqrt(labels.numel())`", by_root),
    of_all_ranks("`200 / labels.size(1)`", over_size),
    Case("tokens seen, times the data and context ranks", by(weighted_by(seen_by_all))),
    Case("`torch.tensor([x, labels.numel()])`, summed over the context ranks", by(over_all)),
    Case("sizes of a batch as shapes, `x.view(b * s)`, `x.sum() / labels.numel()`", by(as_shapes)),
    told(
        "unlikelihood: `before[:, t] = seen; seen = seen.scatter(1, labels[:, t : t + 1], True)`", unlikely(carried)
    ),
    told("unlikelihood: `before[:, t].scatter_(1, labels[:, t - 1 : t], True)`", unlikely(written_through_views)),
    told("unlikelihood: `for row in labels.tolist()`", unlikely(listed), "tolist of a batch's rows"),
    Case(
        "unlikelihood of a row's own label, `zeros(b, s, v).scatter_(2, labels[..., None], 1)`",
        by(unlikely(own_label)),
    ),
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
