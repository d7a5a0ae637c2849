"""Weights and masks which a program made of each context rank's rows alike.

`losses * torch.arange(losses.shape[1])` counts from 0 on every rank, though each holds other rows of the sequences.
Numbers that differ from row to row are the same on all ranks for this reason, and hardly ever for another. Advantages
that are whitened by the mean and deviation of a rank's own rows have mean 0 on every rank; of all rows they have not.
"""

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from core.parallel_state.by_hand import split_axes
from core.parallel_state.by_hand.split_tensor import SplitTensor
from core.parallel_state.collectives.checks import fingerprint

# of one backward: how many are compared, each by three numbers
MAX_FACTORS = 4
_NUMBERS = 3
NUM_FACTORS = _NUMBERS * MAX_FACTORS
# of all Python numbers by which rows, their sums and means are scaled: a sum, and how many
NUM_SCALARS = 2
# of all tables in which a batch's rows are looked up: a fingerprint, and how many
NUM_TABLES = 3
# a mean of 0 by rounding, in deviations; half precision rounds too much to tell
_ROUNDING = 1e-5
_WEIGHTS = ("mul", "imul", "rmul", "div", "truediv", "idiv", "itruediv", "matmul", "mv", "dot")
# of losses; of logits they are a head's
_PRODUCTS = ("einsum", "tensordot", "inner", "linear", "addcmul", "mm", "bmm")
# with a threshold: rows that are kept
COMPARISONS = ("gt", "ge", "lt", "le", "greater", "less", "greater_equal", "less_equal")
# along the dim that is split, not another of that size: a bias
_TERMS = ("add", "iadd", "sub", "isub", "rsub", "where", "lerp", "addcmul")
# here only bool tensors choose rows by their place; numbers of rows are judged where they are used
_CHOICES = ("where", "masked_fill", "masked_select", "getitem", "setitem")
# not broadcast to the rows
_UNALIGNED = (
    "matmul",
    "mv",
    "dot",
    "einsum",
    "tensordot",
    "inner",
    "linear",
    "mm",
    "bmm",
    "getitem",
    "setitem",
)

POSITIONS_REMEDY = (
    'Take the rows\' numbers from batch["position_ids"] of context_batch, or make the weights for whole sequences '
    "[b, s] and cut them: ContextRows.of_state(ps).of(weights, 1)"
)
TABLES_REMEDY = (
    "Make them of all ranks' rows: sums and counts of each class, torch.distributed.all_reduce(x, "
    "group=parallel_state.get_context_parallel_group()), before one is divided by the other"
)
SCALARS_REMEDY = (
    "Decide by what all ranks have: mean = loss.detach().clone(); torch.distributed.all_reduce(mean, "
    "group=parallel_state.get_context_parallel_group()), over their number; draw for samples with one seed on the "
    "ranks of a sequence: torch.manual_seed(seed + parallel_state.get_data_parallel_rank())"
)
_WHITENED_REMEDY = (
    "Whiten them for whole sequences [b, s] and cut them, ContextRows.of_state(ps).of(advantages, 1), or take mean "
    "and variance over parallel_state.get_context_parallel_group()"
)


class RowFactors:
    """Notes the plain tensors by which followed rows are multiplied or chosen."""

    def __init__(self, device: torch.device, *, of_losses: bool = True) -> None:
        # of hidden states and logits, a plain number is the same on all ranks: a layer that is dropped, a temperature
        self._of_losses = of_losses
        # a fingerprint of each, 0 where it is the same for all rows; whether its mean is 0
        self.of_tensors = torch.zeros(NUM_FACTORS, dtype=torch.float64, device=device)
        self._of_tables = torch.zeros(NUM_TABLES, dtype=torch.float64, device=device)
        self._count = 0
        self._of_scalars = 0.0
        # of numbers that each sequence, or class, has one of
        self._of_sequences = torch.zeros((), dtype=torch.float64, device=device)
        self._scalars = 0

    @property
    def numbers(self) -> Tensor:
        """[2 + 3 * MAX_FACTORS], to be compared by `told_of_scalars` and `told_of_factors`."""
        scalars = self.of_tensors.new_tensor([self._of_scalars, self._scalars])
        scalars[0] += self._of_sequences
        return torch.cat((scalars, self.of_tensors))

    @property
    def batch_numbers(self) -> Tensor:
        """[3 * MAX_FACTORS + 3] of a batch's rows, to be compared by `told_of_factors` and `told_of_tables`."""
        return torch.cat((self.of_tensors, self._of_tables))

    @torch.no_grad()
    def note_table(self, table: Tensor) -> None:
        """A plain tensor, [classes], in which a batch's rows are looked up: `weights[labels]`."""
        if table.dim() == 1 and table.is_floating_point():
            self._of_tables[2] += 1
            self._of_tables[:2] += fingerprint(table) * self._of_tables[2]

    def note_scalars(self, name: str, args: tuple) -> None:
        """A function of followed rows, or of a loss made of them."""
        if name in _WEIGHTS or name in COMPARISONS:
            for x in args:
                if isinstance(x, (int, float)) and not isinstance(x, bool):
                    self._scalars += 1
                    self._of_scalars += self._scalars * float(x)

    @torch.no_grad()
    def note(self, name: str, inputs: list[SplitTensor], args: tuple, kwargs: dict) -> None:
        """A function of followed rows."""
        name = name.rstrip("_")
        of_losses = name in _PRODUCTS and all(x.dim() == 2 for x in inputs)
        if name not in _WEIGHTS and name not in _CHOICES and name not in _TERMS and not of_losses:
            return
        sizes = {x.shape[dim] for x in inputs for dim in split_axes.split_dims(x.axes)}
        for factor in pytree.tree_leaves((args, kwargs)):
            if type(factor) is not Tensor or self._count == MAX_FACTORS:
                continue
            is_mask = factor.dtype is torch.bool
            if name in _UNALIGNED:
                dim = next((d for d, n in enumerate(factor.shape) if n > 1 and n in sizes), None)
            else:
                dim = _aligned_dim(factor, inputs)
            if name in _CHOICES and name not in _TERMS and not is_mask:
                continue
            is_weight = name in _WEIGHTS or (is_mask and name in _CHOICES)
            if dim is None and is_weight and factor.numel() > self._of_losses:
                self._scalars += 1
                self._of_sequences += self._scalars * fingerprint(factor.double()).sum()
            elif dim is not None:
                first = _NUMBERS * self._count
                values = factor.double()
                varies = (factor != factor.narrow(dim, 0, 1)).any()
                self.of_tensors[first : first + 2] = fingerprint(values) * varies
                is_centered = values.mean().abs() < _ROUNDING * values.std()
                self.of_tensors[first + 2] = is_centered * varies
                self._count += 1


def _aligned_dim(factor: Tensor, inputs: list[SplitTensor]) -> int | None:
    """The dim of `factor` that is broadcast along a split one."""
    for x in inputs:
        for split_dim in split_axes.split_dims(x.axes):
            dim = split_dim - x.dim()
            if -dim <= factor.dim() and factor.shape[dim] == x.shape[dim] > 1:
                return dim
    return None


def told_of_scalars(scalars: Tensor) -> str:
    """What is said where ranks scaled by other Python numbers, [ranks, 2]; "" where not as often on each."""
    sums, counts = scalars.unbind(1)
    if bool((counts != counts[0]).any()) or torch.allclose(sums, sums[:1], rtol=1e-9, atol=0):
        return ""
    return (
        "rows or their losses are multiplied by, divided by or compared with Python numbers, or one for each "
        "sequence, that differ between context ranks, as `loss.item()`, percentiles of a rank's own rows and a seed "
        "for each rank (DropPath, mixup) make them"
    )


def told_of_tables(numbers: Tensor) -> str:
    """What is said where ranks look their rows up in other numbers, [ranks, 3]; "" where not as often on each."""
    counts = numbers[:, 2]
    if bool((counts != counts[0]).any()) or torch.allclose(numbers, numbers[:1], rtol=1e-6, atol=0):
        return ""
    return (
        "a batch's rows are weighted by numbers of their class (`weights[domains]`) that differ between context "
        "ranks, as means of a rank's own rows do"
    )


def told_of_factors(numbers: Tensor) -> tuple[str, str]:
    """What is said, and the remedy, where two ranks multiply by the same, or each by numbers of mean 0; else "".

    numbers: [ranks, 3 * MAX_FACTORS].
    """
    of_each = numbers.view(len(numbers), MAX_FACTORS, _NUMBERS)
    pairs = of_each[..., :2]
    is_same = ((pairs == pairs[:1]) & pairs.isfinite()).all(2).all(0)
    if bool((is_same & (pairs[0, :, 0] != 0)).any()):
        return (
            "rows are weighted or chosen by numbers that differ from row to row and are the same on all "
            f"{len(numbers)} context ranks, which hold other rows of the sequences: made by `torch.arange(s)`, they "
            "count from each rank's first row; drawn with one seed, all draw alike",
            POSITIONS_REMEDY,
        )
    if bool((of_each[..., 2] == 1).all(0).any()):
        return (
            f"rows are weighted by numbers of mean 0 on each of {len(numbers)} context ranks: whitened by the mean "
            "of a rank's own rows, not by that of the sequences",
            _WHITENED_REMEDY,
        )
    return "", ""
