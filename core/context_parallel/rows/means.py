"""Notices a mean over each context rank's own rows by its gradient alone, whatever computed it.

Compiled code, an `autograd.Function` and torch.func call nothing that could be heard. But a mean over the rows that
count gives each of them the same weight, 1 / n, and n is another number on each rank: constant weights whose sum is
the same on all ranks, while they themselves differ.
"""

import torch
from torch import Tensor

# smallest and largest weight that is not 0, and how many there are
_NUMBERS = 3


def no_weights(output: Tensor) -> Tensor:
    """[3 * (1 + b)]: none are known, of an output of b sequences."""
    return torch.zeros(_NUMBERS * (1 + len(output)), dtype=torch.float64, device=output.device)


@torch.no_grad()
def numbers_of_weights(weights: Tensor) -> Tensor:
    """[3 * (1 + b)] of rows' `weights` [b, s/cp] in the loss: of all rows, then of each sequence."""
    of_sequences = weights.detach().double().abs()
    counts = (of_sequences > 0).sum(1)
    largest = of_sequences.amax(1)
    smallest = torch.where(of_sequences > 0, of_sequences, torch.inf).amin(1)
    of_all = torch.stack((smallest.amin(), largest.amax(), counts.sum().double()))
    return torch.cat((of_all, torch.stack((smallest, largest, counts.double()), 1).flatten()))


def known_weights(weights: Tensor, before: Tensor) -> Tensor:
    """Their numbers, where any row has a weight; else those of `before`."""
    found = numbers_of_weights(weights)
    return torch.where(found[_NUMBERS - 1] > 0, found, before)


@torch.no_grad()
def weights_in_cross_entropy(gradient: Tensor, logits: Tensor) -> Tensor:
    """[b, s/cp]: w of each row where the gradient is w * (softmax(logits) - one_hot(label)); else zeros."""
    of_label, label = gradient.min(-1, keepdim=True)
    of_other, other = gradient.max(-1, keepdim=True)
    # of no other loss those of a row add up to 0
    size = of_other.double() - of_label.double()
    is_of_label = gradient.sum(-1, keepdim=True, dtype=torch.float64).abs() <= 1e-2 * size
    # of two classes the gradients are in the ratio of their probabilities
    ratio = (logits.gather(-1, label) - logits.gather(-1, other)).double().clamp(max=700).exp()
    weights = of_other.double() * ratio - of_label.double()
    return (weights * is_of_label.all()).squeeze(-1)


def told_of_means(numbers: Tensor, ranks: tuple[int, ...], tolerance: float) -> str:
    """What is said of `numbers_of_weights` [cp, ...]; "" if nothing. tolerance: of the gradients' dtype."""
    of_each = numbers.view(len(numbers), -1, _NUMBERS)
    for part, what in ((of_each[:, :1], "all rows"), (of_each[:, 1:], "a sequence's rows")):
        smallest, largest, counts = part.unbind(-1)
        used = counts > 0
        shared = used.sum(0) > 1
        if not bool(shared.any()):
            continue
        is_constant = (largest - smallest <= tolerance * largest) | ~used
        sums = largest * counts
        highest, lowest = _range(sums, used)
        is_mean = is_constant.all(0) & (highest - lowest <= tolerance * highest) | ~shared
        heaviest, lightest = _range(largest, used)
        differs = shared & (heaviest - lightest > 10 * tolerance * heaviest)
        if not bool(is_mean.all()) or not bool(differs.any()):
            continue
        place = int(differs.nonzero()[0])
        n = [
            f"{int(count)} on rank {rank}"
            for count, rank in zip(counts[:, place], ranks, strict=True)
        ]
        return (
            f"the loss takes a mean over {what} which are this context rank's, each by the number of its own that "
            f"count ({', '.join(n)}). One process divides by that of all, so tokens weigh differently than there"
        )
    return ""


def told_of_shares(numbers: Tensor, size: int, rows: int, tolerance: float) -> str:
    """What is said of `numbers_of_weights` [cp, ...] where gradients are averaged over the ranks; "" if nothing.

    Rows that weigh 1 / n each, n those of all ranks, are a mean of one process; the average takes 1 / cp of it. Only
    where the ranks' own numbers differ: means of one's own, of as many microbatches as ranks, look like it. rows: of
    each rank, by which a program may divide.
    """
    smallest, largest, counts = numbers[:, :_NUMBERS].unbind(-1)
    heaviest = largest.max()
    if not bool((counts > 0).all()) or not bool((counts != counts[0]).any()):
        return ""
    total = float(heaviest * counts.sum())
    differs = float(heaviest - smallest.min()) > tolerance * float(heaviest)
    if differs or abs(total - 1) > tolerance or int(counts.sum()) == rows:
        return ""
    return (
        f"each row that has a loss weighs 1/{int(counts.sum())}, the number of all {size} context ranks' rows that "
        f"have one. DataParallel averages over them, which leaves 1/{size} of one process's gradient: multiply the "
        f"loss by {size}"
    )


def _range(values: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """The largest and the smallest over the ranks that have rows."""
    return torch.where(used, values, -torch.inf).amax(0), torch.where(used, values, torch.inf).amin(
        0
    )
