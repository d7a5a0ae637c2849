"""Notices a loss that goes on differently with what each context rank summed over its own rows.

Context ranks hold rows of the same sequences, so what a program sums over rows is a rank's part of a sum. One process
goes on with the whole sum: the gradient of every rank's part must be the same. It is where a sum is scaled by numbers
that all ranks share, or is summed over the ranks first. It is not where a rank divides by the tokens of its own rows,
squares its part, or gives it to a head. So in some forwards the model's output is of a class that is followed to
where its rows are summed; in backward these sums' gradients are compared.
"""

import warnings
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from core.context_parallel import row_factors
from core.context_parallel.row_totals import SCALED, TOTAL, Total, summed_rows, told_of_totals
from core.parallel_state.by_hand import split_axes
from core.parallel_state.by_hand.split_axes import Axes
from core.parallel_state.by_hand.split_functions import Finding, Followed, outcome_of
from core.parallel_state.by_hand.split_tensor import Follower, SplitTensor
from core.parallel_state.collectives import Group, all_gather
from core.parallel_state.collectives.checks import fingerprint

_BY_CLASS = ("cross_entropy", "nll_loss")  # of [n, classes, ...]
_BY_ELEMENT = [
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "kl_div",
    "binary_cross_entropy",
]
_BY_ELEMENT += ["binary_cross_entropy_with_logits"]
_LARGEST = ("max", "min", "amax", "amin")  # of the rows: no sums
_MEANS = ("mean", "nanmean")
_REMEDY = (
    "A mean over tokens is divided by those of all ranks: n = mask.sum(); all_reduce(n, group=parallel_state."
    "get_data_parallel_group(with_context_parallel=True)), and under DataParallel, which averages over that group, "
    "times its size; executors take (sum, tokens). What a head, a norm or a square takes is summed first: "
    "torch.distributed.nn.functional.all_reduce(x, group=parallel_state.get_context_parallel_group())"
)


class RowSums:
    """Follows the outputs of a model's forwards 1, 2, 4, 8 ... with gradients; tells once."""

    def __init__(self, group: Group | None, replicas: int = 1) -> None:
        # None: one rank has all rows
        self.group = group
        self.told = False
        # data ranks, over which gradients are averaged together with cp
        self.replicas = replicas
        self._forwards = 0
        self._latest: weakref.ref[_Sums] | None = None

    def __deepcopy__(self, memo: dict) -> "RowSums":
        return RowSums(self.group, self.replicas)

    def follow(self, output: Tensor, rows_dim: int = 1) -> None:
        """Of a forward whose rows are this rank's. In its backward: one all-gather of some numbers over cp.

        rows_dim: 1 of losses and logits [b, s/cp, ...], 0 of a model's hidden states without its head [s/cp, b, h].
        """
        if self.group is None:
            return
        self._forwards += 1
        if not self._forwards & (self._forwards - 1) and not self.told:
            sums = _Sums(self, output)
            output.register_hook(sums.compare)
            sums.mark(output, _axes_of_rows(output, rows_dim))
            self._latest = weakref.ref(sums)

    def mark_gathered(self, gathered: Tensor) -> None:
        """Follow [b, s/cp, v] that was gathered from tensor ranks' parts, as the output of that forward."""
        sums = self._latest() if self._latest is not None else None
        if sums is not None:
            sums.mark(gathered, _axes_of_rows(gathered))

    def tell(self, what: str, remedy: str = _REMEDY) -> None:
        """Warn of `what` with the remedy, once for this model."""
        if not self.told:
            self.told = True
            warnings.warn(f"context parallelism: {what}. {remedy}", stacklevel=6)


def _axes_of_rows(x: Tensor, rows_dim: int = 1) -> Axes:
    axes = split_axes.plain(x.shape)
    return (*axes[:rows_dim], ((x.shape[rows_dim], True),), *axes[rows_dim + 1 :])


class _Sums(Follower):
    """What is summed over the rows of one output."""

    def __init__(self, owner: RowSums, output: Tensor) -> None:
        super().__init__()
        self._owner = owner
        self._count = 0
        self._compared = False
        # norm and mean of the sums' gradients; what all rows together weigh in the loss, if sums alone say so
        self._numbers = torch.zeros(3, dtype=torch.float64, device=output.device)
        # [b, s/cp]: else the rows' losses are the program's
        self._is_loss = output.dim() == 2
        self._totals: list[Total] = []
        self._factors = row_factors.RowFactors(output.device)

    def mark(self, tensor: Any, axes: Axes | None, partial: str = "") -> None:
        if isinstance(tensor, Tensor) and (tensor.is_floating_point() or partial):
            super().mark(tensor, axes, partial)

    def follow(
        self,
        func: Any,
        name: str,
        inputs: list[SplitTensor],
        args: tuple,
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        # a tensor made like it has values of its own
        if name.endswith("_like") or name.startswith("new_"):
            return
        if any(x.partial == TOTAL for x in inputs):
            self._follow_total(name, inputs, args, kwargs, result)
            return
        if any(x.partial for x in inputs):
            self._follow_statistic(name, inputs, args, kwargs, result)
            return
        try:
            if any(x.requires_grad for x in inputs):
                self._factors.note(name, inputs, args, kwargs)
            outcome: Finding | Followed | str | float | None = _selected(name, args, result)
            outcome = (
                outcome
                or _follow_loss(name, args, kwargs, result)
                or outcome_of(func, name, args, kwargs, result)
            )
        except Exception:
            # who looks on must not end a right program: a call of a form unknown here is not followed
            return
        if outcome in _LARGEST:
            outcome = Finding("reduction", name, tuple(inputs[0].shape))
        if not any(x.requires_grad for x in inputs):
            if isinstance(outcome, (str, float)) or (
                isinstance(outcome, Finding) and outcome.kind == "reduction"
            ):
                self._mark_statistic(result, name)
            elif isinstance(outcome, list):
                for tensor, axes in outcome:
                    self.mark(tensor, axes)
        elif isinstance(outcome, Finding):
            self._tell_if_used(outcome, result)
        elif isinstance(outcome, str):
            if name == "nanmean":
                numbers = inputs[0].isnan().logical_not().sum().item()
            else:
                numbers = inputs[0].numel()
            if name in _MEANS and isinstance(result, Tensor):
                self._compare_later(result, numbers / max(result.numel(), 1))
            else:
                self._compare_later(result, 1.0, rows=inputs[0].numel())
        elif isinstance(outcome, (int, float)):
            rows = summed_rows(name, args, kwargs)
            self._compare_later(result, outcome, rows=rows)
        elif outcome is not None:
            for tensor, axes in outcome:
                self.mark(tensor, axes)

    def _mark_statistic(self, result: Any, name: str) -> None:
        """Numbers of this rank's rows that have no gradient, and what was made of them: a baseline, a selection."""
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and (
                tensor.is_floating_point() or tensor.dtype is torch.bool
            ):
                self.mark(tensor, None, name)
            if isinstance(tensor, SplitTensor):
                tensor.counted = tensor.as_subclass(Tensor).clone()  # type: ignore[attr-defined]

    def _follow_statistic(
        self, name: str, inputs: list[SplitTensor], args: tuple, kwargs: dict[str, Any], result: Any
    ) -> None:
        """Told where it meets what has a gradient, unless somebody has summed it over the ranks meanwhile."""
        numbers = [x for x in inputs if x.partial and torch.equal(x, x.counted)]  # type: ignore[attr-defined]
        if not numbers or name in ("all_reduce", "backward"):
            return
        if any(
            isinstance(x, Tensor) and x.requires_grad for x in pytree.tree_leaves((args, kwargs))
        ):
            first = numbers[0]
            self._owner.tell(
                f"{first.partial} of rows which are this context rank's comes to the loss by {name}"
            )
        else:
            self._mark_statistic(result, numbers[0].partial)

    def _tell_if_used(self, finding: Finding, result: Any) -> None:
        """Where a gradient comes back through it: nothing is said of what is only looked at."""
        if finding.kind not in ("reduction", "cut"):
            return
        does = "works across rows"
        if finding.kind == "cut":
            does = "takes rows by number"
        what = f"{finding.name} of {list(finding.shape)} {does}, which are this context rank's, not all of a sequence"
        if finding.name == "setitem":
            self._owner.tell(what)
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda gradient: self._owner.tell(what))

    def _compare_later(self, result: Any, divisor: float, rows: float = 0) -> None:
        """Note a rank's part of a sum, which was divided by `divisor`, and its gradient once there is one.

        rows: how many rows' losses it is the sum of, over what torch divided it by; 0 where it is a mean.
        """
        if not isinstance(result, Tensor) or not result.requires_grad:
            return
        self._count += 1
        place = self._count
        total = Total(rows)
        if rows and (self._is_loss or result.dim() == 0):
            self._totals.append(total)
            self._mark_total(result, total)

        def note(gradient: Tensor) -> None:
            if not self._compared and not torch._C._are_functorch_transforms_active():
                self._numbers[:2] += fingerprint(gradient.detach()) * (place / divisor)
                total.weight = gradient.detach().sum().double() * rows

        result.register_hook(note)

    def _mark_total(self, result: Tensor, total: Total) -> None:
        self.mark(result, None, TOTAL)
        if isinstance(result, SplitTensor):
            result.total = total  # type: ignore[attr-defined]

    def _follow_total(
        self, name: str, inputs: list[SplitTensor], args: tuple, kwargs: dict[str, Any], result: Any
    ) -> None:
        """Until a tensor divides it, or a number of ranks multiplies it: the program knows the ranks then."""
        total: Total = next(x for x in inputs if x.partial == TOTAL).total  # type: ignore[attr-defined]
        group = self._owner.group
        assert group is not None
        total.follow(name, args, (group.size, group.size * self._owner.replicas))
        if name in SCALED and isinstance(result, Tensor):
            self._mark_total(result, total)

    def compare(self, gradient: Tensor) -> None:
        """The first backward has come back to the output: all its sums have their gradients. Warns on every rank."""
        if self._compared or torch._C._are_functorch_transforms_active():
            return
        self._compared = True
        group = self._owner.group
        assert group is not None
        self._numbers[2] = self._weight_of_totals(gradient)
        numbers = torch.cat((self._numbers, self._factors.numbers))
        gathered = all_gather(numbers[None], group).cpu()
        if message := row_factors.told_of_factors(gathered[:, 3:]):
            self._owner.tell(message, row_factors.REMEDY)
        if message := told_of_totals(gathered[:, 2], group.size):
            self._owner.tell(message)
        gathered = gathered[:, :2]
        used = [
            rank
            for rank in range(group.size)
            if gathered[rank].isfinite().all() and gathered[rank].any()
        ]
        # e.g. a rank whose rows are all masked adds nothing, whatever it is divided by
        if not used:
            return
        sizes = gathered[used, 0]
        tolerance = 1e-2
        if gradient.dtype in (torch.float32, torch.float64):
            tolerance = 1e-6
        off = (gathered[used] - gathered[used[0]]).abs().amax(1)
        if off.max() > tolerance * sizes.max():
            first = group.ranks[used[0]]
            other = group.ranks[used[int(off.argmax())]]
            one, two = (f"{float(sizes[place]):.6g}" for place in (0, int(off.argmax())))
            self._owner.tell(
                "what is summed over this context rank's own rows counts otherwise than the same sum of another: its "
                f"gradient's norm is {one} on rank {first} and {two} on rank {other}. One process goes on with one "
                "sum, so tokens weigh differently than there"
            )

    def _weight_of_totals(self, gradient: Tensor) -> Tensor | float:
        """What this rank's rows weigh in the loss, if sums say so that nobody divided by a tensor; else 0."""
        plain = [total.weight for total in self._totals if not total.knows_ranks]
        weights = [weight for weight in plain if weight is not None]
        if not weights:
            return 0.0
        if self._is_loss:  # masks and weights of rows included
            return gradient.detach().sum()
        return torch.stack(weights).sum()


def _selected(name: str, args: tuple, result: Any) -> Finding | Followed | None:
    """Rows that are taken by a mask or by their numbers in this rank's rows: as many as each rank has."""
    x = args[0] if args else None
    if name not in ("getitem", "masked_select", "index_select") or not isinstance(x, SplitTensor):
        return None
    if name == "masked_select":
        if split_axes.is_split(x.axes):
            return [(result, _own_rows(result))]
        return None
    index = args[1]
    if name == "index_select":
        if index == 0 and split_axes.is_split(x.axes, [0]):
            return [(result, (*_own_rows(result), *x.axes[1:]))]
        return None
    if (
        isinstance(index, tuple)
        and index
        and all(isinstance(i, Tensor) and i.dim() == 1 for i in index)
    ):
        if not split_axes.is_split(x.axes, range(len(index))):
            return None
        of_each = torch.arange(len(x), device=index[0].device)
        # `hidden[arange(b), last]`
        if len(index) > 1 and torch.equal(index[0], of_each):
            return Finding("cut", name, tuple(x.shape))
        return [(result, (*_own_rows(result), *x.axes[len(index) :]))]
    if isinstance(index, tuple):  # `hidden[:, last]`
        numbered = [dim for dim, i in enumerate(index) if isinstance(i, Tensor)]
        by_number = split_axes.is_split(x.axes, numbered) and not any(
            i is None or i is Ellipsis for i in index
        )
        if by_number:
            return Finding("cut", name, tuple(x.shape))
        return None
    if not isinstance(index, Tensor):
        return None
    dims = index.dim() if index.dtype is torch.bool else 1
    if not split_axes.is_split(x.axes, range(dims)):
        return None
    if index.dtype is not torch.bool and index.dim() != 1:
        return None
    return [(result, (*_own_rows(result), *x.axes[dims:]))]


def _own_rows(result: Tensor) -> Axes:
    """Of dim 0: rows that a rank selected among its own."""
    return (((result.shape[0], True),),)


def _follow_loss(
    name: str, args: tuple, kwargs: dict[str, Any], result: Any
) -> Finding | Followed | float | None:
    """A loss of torch's: by what it divided, or its elements' axes."""
    if name not in _BY_CLASS and name not in _BY_ELEMENT:
        return None
    x, target = (
        args[place] if len(args) > place else kwargs[key]
        for place, key in enumerate(("input", "target"))
    )
    if not isinstance(x, SplitTensor):
        return None
    reduction = kwargs.get("reduction", "mean")
    class_dim = min(1, x.dim() - 1)
    # classes that are rows, as of spans: a softmax over this rank's
    if name in _BY_CLASS and split_axes.is_split(x.axes, [class_dim]):
        return Finding("reduction", name, tuple(x.shape))
    if reduction == "none":
        return [(result, split_axes.without(x.axes, [class_dim]) if name in _BY_CLASS else x.axes)]
    if reduction == "sum":
        return 1.0
    if reduction == "batchmean":
        return float(x.shape[0])
    if name in _BY_ELEMENT:
        return float(x.numel())
    if target.is_floating_point():
        return x.numel() / x.shape[class_dim]
    counted_labels = target[target != kwargs.get("ignore_index", -100)]
    weight = kwargs.get("weight", args[2] if len(args) > 2 else None)
    if weight is not None:
        return float(weight[counted_labels].sum())
    return float(counted_labels.numel())
