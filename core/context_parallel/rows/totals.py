"""A sum over a context rank's rows that only numbers divide: whether its rows weigh in the loss what a mean's do."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.parallel_state.by_hand.split_names import LINEAR, kind_of

TOTAL = (
    "a sum over rows, divided by numbers only"  # how such a sum, and what is made of it, is marked
)
_PRODUCTS = ("mul", "div", "truediv", "imul", "itruediv")
# what is still that sum, times a number
SCALED = (
    *_PRODUCTS,
    "neg",
    "float",
    "double",
    "half",
    "bfloat16",
    "to",
    "clone",
    "sum",
    "mean",
    "view",
    "reshape",
)
# the sum of several, which what follows divides together
ADDED = ("add", "iadd", "radd", "sub", "isub")

COUNT_REMEDY = (
    "Return the number of tokens, (losses.sum(), losses.numel()); or means of sequences, whose rows are equally many "
    "on each rank: (losses.mean(1).sum(), len(losses)); or count sequences on one context rank only"
)


@dataclass
class Total:
    """What became of one sum over `rows` rows' losses. weight: of these in the program's loss.

    own_counts: how many of this rank's were summed; who divides by that takes a mean, whatever multiplies it.
    kept: how many of the rows have a loss. divisor: the only tensor that divides the sum, of one number.
    """

    rows: float
    own_counts: frozenset[float] = frozenset()
    weight: Tensor | None = None
    unit: Tensor | None = None  # what one row would weigh in an executor's mean
    kept: Tensor | float = 0.0
    divisor: Tensor | None = None
    # it has a number for each sequence: a feature, if what follows is no loss
    may_be_pooled: bool = False
    # by a tensor, or by how many are summed here; or what follows shows that it is no loss
    is_divided: bool = False
    _is_multiplied: bool = False  # by a number of ranks
    _is_over_all: bool = False

    @property
    def knows_ranks(self) -> bool:
        """Whether the program has thought of the ranks: what it divides by may be right."""
        return self.is_divided or self._is_multiplied

    def follow(self, name: str, args: tuple, rank_counts: tuple[int, ...]) -> None:
        """A function of it. A tensor may hold a sum over the ranks; a number of ranks undoes an average."""
        # a mean of sums of sequences, each over the number of all rows: no mean of rows
        if name == "mean" and self._is_over_all:
            self.is_divided = False
        # a ratio of probabilities is a loss's
        is_linear = name in LINEAR or name == "exp" or kind_of(name) != "element"
        if self.may_be_pooled and (name == "all_reduce" or not is_linear):
            self.is_divided = True
        if name not in _PRODUCTS:
            return
        numbers = [x for x in args if not isinstance(x, Tensor)]
        if "mul" not in name and any(x == self.rows for x in numbers):
            self._is_over_all = isinstance(args[0], Tensor) and args[0].dim() > 0
        tensors = [x for x in args[1:] if isinstance(x, Tensor)]
        if tensors:
            is_first = "mul" not in name and self.divisor is None and tensors[0].numel() == 1
            self.divisor = tensors[0].detach().double() if is_first else torch.tensor(torch.nan)
        # numbers of sequences, as advantages, know nothing of ranks
        if "mul" in name and tensors and all(x.numel() > 1 for x in tensors):
            return
        if not numbers:
            self.is_divided = True
        elif "mul" in name:
            self.is_divided |= any(x and 1 / x in self.own_counts for x in numbers)
            # once: the square of a temperature of 2 is no number of ranks
            for _ in filter(rank_counts.__contains__, numbers):
                self._is_multiplied = not self._is_multiplied
        elif any(x in self.own_counts for x in numbers):
            self.is_divided = True


def weight_of_totals(totals: Sequence[Total], gradient: Tensor | None) -> Tensor | float:
    """What this rank's rows weigh in the loss, if sums say so that nobody divided by a tensor; else 0.

    gradient: of the losses [b, s/cp], masks and weights of rows included; None: the output was no losses.
    """
    plain = [total.weight for total in totals if not total.knows_ranks]
    weights = [weight for weight in plain if weight is not None]
    if not weights:
        return 0.0
    return torch.stack(weights).sum() if gradient is None else gradient.sum()


def weight_of_count(total: Total | None, gradient: Tensor | None) -> Tensor | float:
    """What this rank's rows weigh in a sum, over what `loss_fn` counts beside it; 0 where it counts rows."""
    if total is None or total.unit is None:
        return 0.0
    weight = total.weight if gradient is None else gradient.double().sum()
    return 0.0 if weight is None else weight / total.unit


class SharedCounts:
    """Sums over one output's rows that a tensor divides: is it the tokens of all context ranks, and nothing else?

    numbers: [5], of all sums what else scales them, less 1; the tensor; rows with a loss; how far tensors differ;
    whether several tensors scale one, so that this is what they come to.
    """

    def __init__(self, device: torch.device) -> None:
        self.numbers = torch.zeros(5, dtype=torch.float64, device=device)

    def note(self, total: Total, gradient: Tensor) -> None:
        """In backward: of one sum, and its gradient."""
        if total.divisor is None or not total.rows:
            return
        divisor = total.divisor.reshape(()).to(self.numbers)
        size = gradient.detach().double().mean()
        is_of_several = divisor.isnan() & (size != 0)
        divisor = torch.where(is_of_several, (1 / size.abs()).round(), divisor)
        scale = size * divisor
        first = torch.where(self.numbers[1] == 0, divisor, self.numbers[1])
        self.numbers[0] += (scale.abs() - 1).abs()
        self.numbers[1] = first
        self.numbers[2] += total.kept
        self.numbers[3] += (divisor - first).abs()
        self.numbers[4] += is_of_several


def told_of_shared_counts(numbers: Tensor, size: int, tolerance: float) -> str:
    """What is said of the `numbers` [cp, 5] of `SharedCounts`; "" if nothing.

    A mean over the ranks' numbers of tokens is right, as gradients are averaged; so is one of several microbatches.
    """
    scaled, counts, kept, spread, of_several = numbers.unbind(1)
    count = float(counts[0])
    if (
        not numbers.isfinite().all()
        or count < 1
        or count != round(count)
        or bool((counts != count).any())
    ):
        return ""
    if float(scaled.max()) > tolerance or bool(spread.any()):
        return ""
    # a weight of 1/2 makes as much of a rank's own tokens, if all have as many
    if bool(of_several.any()) and not bool((kept != kept[0]).any()):
        return ""
    rows = float(kept.sum())
    # of the rows' mean, which is 1 of one microbatch
    share = rows / (count * size)
    if not 0 < share <= (1 + tolerance) / size:
        return ""
    microbatches = round(1 / share)
    if abs(microbatches * share - 1) < tolerance and microbatches % size:
        return ""
    return (
        f"a sum over rows which are this context rank's is divided by {count:g}, the number of all ranks' tokens or "
        f"more: {rows:g} rows of {size} context ranks have a loss. DataParallel averages over them, which leaves "
        f"1/{size} of one process's gradient: multiply it by {size}"
    )


def counts_of(x: Tensor | None, result: Tensor, known: set[float]) -> frozenset[float]:
    """How many elements of x, and how many rows of hidden states [s, b, h], are in each number of `result`.

    known: numbers of this rank's rows, with a loss and all.
    """
    counts = set(known)
    if x is not None:
        counts |= {x.numel(), x.numel() // max(result.numel(), 1)}
        if x.dim() == 3:
            counts.add(x.shape[0] * x.shape[1])
    return frozenset(counts - {0, 1})


def summed_rows(name: str, args: tuple, kwargs: dict[str, Any]) -> float:
    """How many rows a loss of torch's sums up, over what it divides them by; 0 if it takes a mean."""
    reduction = kwargs.get("reduction", "mean")
    if reduction not in ("sum", "batchmean"):
        return 0
    x, target = (
        args[i] if len(args) > i else kwargs[key] for i, key in enumerate(("input", "target"))
    )
    if name == "kl_div":  # of distributions over the last dim
        rows = x.numel() / x.shape[-1]
        if reduction != "batchmean":
            return rows
        # of [n, classes] it is a mean of rows
        return rows / x.shape[0] if x.dim() > 2 else 0
    if target.is_floating_point():
        return float(target.numel())
    # labels that are not left out
    return float((target != kwargs.get("ignore_index", -100)).sum())


def told_of_totals(weights: Tensor, size: int, tolerance: float) -> str:
    """What is said of the rows' weights on `size` context ranks; "" if nothing. tolerance: of the weights' dtype.

    A mean's weigh 1 on each rank, or 1 / n where gradients of n microbatches are added: DataParallel averages.
    """
    weight = abs(float(weights.mean()))
    if weight == 0 or not weights.isfinite().all():
        return ""
    microbatches = round(1 / weight)
    is_mean = abs(microbatches * weight - 1) < tolerance
    if is_mean and (microbatches == 1 or microbatches % size):
        return ""
    return (
        "a sum over rows which are this context rank's is divided by numbers only: they weigh "
        f"{weight:.6g} together, a mean's weigh 1. DataParallel and DDP average over the {size} context "
        f"ranks, which leaves 1/{size} of one process's gradient: multiply it by {size}, or take the mean"
    )


def is_constant_count(count: Any, shape: tuple[int, ...]) -> bool:
    """Whether what `loss_fn` counts beside rows [b, s/cp] is 1 or their sequences, the same on all context ranks."""
    return isinstance(count, (int, float)) and count in (1, shape[0]) and shape[1] > 1


def told_of_counts(weights: Tensor, size: int) -> str:
    """What is said of rows' weights in sums, over constant counts, on `size` context ranks; "" if nothing."""
    weight = abs(float(weights.mean()))
    if weight == 0 or not weights.isfinite().all() or abs(weight - 1) < 1e-2:
        return ""
    return (
        "loss_fn returns a sum over rows which are this context rank's, and counts no rows: executors add up the "
        f"counts of {size} context ranks, each of which counts the same sequences, so the loss is divided by {size} "
        "times as many"
    )


def told_of_sums(gradients: Tensor, ranks: Sequence[int], tolerance: float) -> str:
    """What is said of the gradients [cp, 2], norm and mean, of each rank's part of a sum; "" if they are equal."""
    # a rank whose rows are all masked adds nothing, whatever it is divided by
    used = [i for i, rank in enumerate(gradients) if rank.isfinite().all() and rank.any()]
    if not used:
        return ""
    off = (gradients[used] - gradients[used[0]]).abs().amax(1)
    if off.max() <= tolerance * gradients[used, 0].max():
        return ""
    other = used[int(off.argmax())]
    one, two = (f"{float(gradients[place, 0]):.6g}" for place in (used[0], other))
    return (
        "what is summed over this context rank's own rows counts otherwise than the same sum of another: its "
        f"gradient's norm is {one} on rank {ranks[used[0]]} and {two} on rank {ranks[other]}. One process goes on "
        "with one sum, so tokens weigh differently than there"
    )
