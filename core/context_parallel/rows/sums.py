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
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from core.context_parallel.rows import draws, factors
from core.context_parallel.rows.hooks import HookedRows
from core.context_parallel.rows.reads import DECISIONS, LOG_REMEDY, READS, STATISTICS, SUM_REMEDY
from core.context_parallel.rows.selections import loss_outcome, selected
from core.context_parallel.rows.totals import (
    SCALED,
    TOTAL,
    Total,
    counts_of,
    summed_rows,
    told_of_totals,
)
from core.parallel_state.by_hand import split_axes
from core.parallel_state.by_hand.split_axes import Axes
from core.parallel_state.by_hand.split_functions import Finding, Followed, outcome_of
from core.parallel_state.by_hand.split_tensor import Follower, SplitTensor
from core.parallel_state.collectives import BACKWARD_TAG, Group, all_gather
from core.parallel_state.collectives.checks import fingerprint

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
        self._told_of_log = False
        # data ranks, over which gradients are averaged together with cp
        self.replicas = replicas
        self._forwards = 0
        self._forwards_inside = 0
        self._evaluations = 0
        # kept, since tensors hold who follows them weakly: of evaluations 1, 2, 4, 8 ...
        self._evaluated: list[_Sums] = []
        self._inside = HookedRows()
        self._latest: weakref.ref[_Sums] | None = None

    def __deepcopy__(self, memo: dict) -> "RowSums":
        return RowSums(self.group, self.replicas)

    def follow(self, output: Tensor, rows_dim: int = 1, *, sums_are_given: bool = False) -> None:
        """Of a forward whose rows are this rank's. In its backward: one all-gather of some numbers over cp.

        rows_dim: 1 of losses and logits [b, s/cp, ...], 0 of a model's hidden states without its head [s/cp, b, h].
        sums_are_given: an executor takes sums over rows and divides them itself.
        """
        if self.group is None:
            return
        if not output.requires_grad:
            if not sums_are_given:
                self._follow_reads(output, rows_dim)
            return
        self._forwards += 1
        if not self._forwards & (self._forwards - 1) and not self.told:
            sums = _Sums(self, output, judges_totals=not sums_are_given)
            output.register_hook(sums.compare)
            sums.mark(output, _axes_of_rows(output, rows_dim))
            self._latest = weakref.ref(sums)

    def _follow_reads(self, output: Tensor, rows_dim: int) -> None:
        """Of an evaluation: statistics of this rank's rows are told where they are read; nothing has a gradient."""
        self._evaluations += 1
        if not self._evaluations & (self._evaluations - 1) and not self._told_of_log:
            sums = _Sums(self, output)
            sums.mark(output, _axes_of_rows(output, rows_dim))
            self._evaluated.append(sums)

    def look_inside(
        self, model: nn.Module, shares: tuple[int, ...], *, sums_are_given: bool
    ) -> None:
        """Before a forward: follow hidden states that the program's hooks are given, until `end_look`.

        shares: how many rows they may have. sums_are_given: as of `follow`.
        """
        if self.group is None or self.told or not torch.is_grad_enabled():
            return
        self._forwards_inside += 1
        if self._forwards_inside & (self._forwards_inside - 1):
            return

        def follow(hidden: Tensor) -> None:
            sums = _Sums(self, hidden, judges_totals=not sums_are_given)
            hidden.register_hook(sums.compare)
            sums.mark(hidden, _axes_of_rows(hidden, 0))

        self._inside.attach(model, shares, follow)

    def end_look(self) -> None:
        """After that forward."""
        self._inside.detach()

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

    def tell_of_log(self, name: str, remedy: str = LOG_REMEDY) -> None:
        """Warn, once, of a statistic of this rank's rows that is read as if it were of all."""
        if not self._told_of_log:
            self._told_of_log = True
            what = f"{name} rows which are this context rank's is read: others hold the rest of each sequence"
            warnings.warn(f"context parallelism: {what}. {remedy}", stacklevel=6)


def _axes_of_rows(x: Tensor, rows_dim: int = 1) -> Axes:
    axes = split_axes.plain(x.shape)
    return (*axes[:rows_dim], ((x.shape[rows_dim], True),), *axes[rows_dim + 1 :])


class _Sums(Follower):
    """What is summed over the rows of one output."""

    def __init__(self, owner: RowSums, output: Tensor, *, judges_totals: bool = True) -> None:
        super().__init__()
        self._owner = owner
        self._judges_totals = judges_totals
        self._count = 0
        self._compared = False
        # norm and mean of the sums' gradients; what all rows together weigh in the loss, if sums alone say so
        self._numbers = torch.zeros(3, dtype=torch.float64, device=output.device)
        # [b, s/cp]: else the rows' losses are the program's
        self._is_loss = output.dim() == 2
        self._is_evaluation = not output.requires_grad
        self._totals: list[Total] = []
        self._factors = factors.RowFactors(output.device)

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
        inputs = self._hear_draws(name, inputs, result)
        if not inputs:
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
            outcome: Finding | Followed | str | float | None = selected(name, args, result)
            outcome = (
                outcome
                or loss_outcome(name, args, kwargs, result)
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
            self._hear_draw(name, inputs[0])
            self._tell_if_used(outcome, result)
        elif isinstance(outcome, str):
            self._compare_sum(name, inputs[0], result)
        elif isinstance(outcome, (int, float)):
            rows = summed_rows(name, args, kwargs)
            self._compare_later(result, outcome, rows=rows)
        elif outcome is not None:
            for tensor, axes in outcome:
                self.mark(tensor, axes)

    def _hear_draws(self, name: str, inputs: list[SplitTensor], result: Any) -> list[SplitTensor]:
        """Noise that is drawn for rows is told; the inputs that are to be followed."""
        # a tensor made like rows has values of its own
        if name.endswith("_like") or name.startswith("new_"):
            if isinstance(result, Tensor) and any(x.requires_grad for x in inputs):
                self.mark(result, None, draws.MADE_LIKE)
                self._hear_draw(name, inputs[0])
            return []
        # the first function that is called on it draws, or nothing does
        for x in inputs:
            if x.partial == draws.MADE_LIKE:
                self._hear_draw(name, x)
                x.__class__ = Tensor  # type: ignore[assignment]
                del x.axes
        return [x for x in inputs if isinstance(x, SplitTensor)]

    def _hear_draw(self, name: str, rows: Tensor) -> None:
        if name.rstrip("_") in draws.DRAWS:
            self._owner.tell(draws.message(name, rows), draws.REMEDY)

    def _mark_statistic(self, result: Any, name: str) -> None:
        """Numbers of this rank's rows that have no gradient, and what was made of them: a baseline, a selection."""
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            is_place = name in STATISTICS  # of the largest, as a number of a row
            if isinstance(tensor, Tensor) and (
                tensor.is_floating_point() or tensor.dtype is torch.bool or is_place
            ):
                self.mark(tensor, None, name)
            if isinstance(tensor, SplitTensor):
                tensor.counted = tensor.detach().as_subclass(Tensor).clone()  # type: ignore[attr-defined]

    def _follow_statistic(
        self, name: str, inputs: list[SplitTensor], args: tuple, kwargs: dict[str, Any], result: Any
    ) -> None:
        """Told where it meets what has a gradient, unless somebody has summed it over the ranks meanwhile."""
        numbers = [x for x in inputs if x.partial and torch.equal(x, x.counted)]  # type: ignore[attr-defined]
        if name == "all_reduce":
            inputs[0].__class__ = Tensor  # type: ignore[assignment]  # it is of all rows now
            return
        if not numbers or name in ("backward", "grad", "register_hook"):
            return
        first = numbers[0]
        decides = self._is_evaluation and name in DECISIONS
        if first.dim() and first.partial not in STATISTICS and decides:
            # of each sequence a number that no rank has
            self._owner.tell_of_log(f"{first.partial} over", SUM_REMEDY)
        elif not isinstance(result, Tensor) and name in READS:
            self.read(name, first)
        # where it has a gradient itself, a hook waits for that
        elif not first.requires_grad and any(
            isinstance(x, Tensor) and x.requires_grad for x in pytree.tree_leaves((args, kwargs))
        ):
            self._owner.tell(
                f"{first.partial} of rows which are this context rank's comes to the loss by {name}"
            )
        else:
            self._mark_statistic(result, first.partial)

    def read(self, name: str, tensor: SplitTensor) -> None:
        """Told of a largest loss and its like; what is a mean's part is left alone, as over data ranks."""
        if tensor.partial in STATISTICS and torch.equal(tensor, tensor.counted):  # type: ignore[attr-defined]
            self._owner.tell_of_log(f"{tensor.partial} of")

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
        if finding.name in STATISTICS:
            self._mark_statistic(result, finding.name)

    def _compare_sum(self, name: str, rows: Tensor, result: Any) -> None:
        if name == "nanmean":
            numbers = rows.isnan().logical_not().sum().item()
        else:
            numbers = rows.numel()
        if name in _MEANS and isinstance(result, Tensor):
            self._compare_later(result, numbers / max(result.numel(), 1))
        else:
            self._compare_later(result, 1.0, rows=rows.numel(), of=rows)

    def _compare_later(
        self, result: Any, divisor: float, rows: float = 0, of: Tensor | None = None
    ) -> None:
        """Note a rank's part of a sum, which was divided by `divisor`, and its gradient once there is one.

        rows: how many rows' losses it is the sum of, over what torch divided it by; 0 where it is a mean.
        of: the rows.
        """
        if not isinstance(result, Tensor) or not result.requires_grad:
            return
        self._count += 1
        place = self._count
        total = Total(rows, counts_of(of, result) if of is not None else frozenset())
        if rows and self._judges_totals and (self._is_loss or result.dim() == 0):
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
        gathered = all_gather(numbers[None], group, tag=BACKWARD_TAG).cpu()
        message, remedy = factors.told_of_factors(gathered[:, 3:])
        if message:
            self._owner.tell(message, remedy)
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
