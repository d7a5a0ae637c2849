"""What a program makes of one output of a model, [b, s/cp, ...] of a context rank's rows, until its backward."""

from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from core.context_parallel.rows import draws, factors, means, reads, selections
from core.context_parallel.rows.batches import is_changed, is_of_batch, with_rows_alone
from core.context_parallel.rows.divisors import Divisors
from core.context_parallel.rows.follower import FollowsRows
from core.context_parallel.rows.frozen import BackwardOfHead
from core.context_parallel.rows.owner import Owner
from core.context_parallel.rows.reads import (
    BRANCHES,
    MEAN,
    READS,
    STATISTICS,
    is_statistic,
)
from core.context_parallel.rows.totals import (
    ADDED,
    SCALED,
    TOTAL,
    SharedCounts,
    Total,
    counts_of,
    is_constant_count,
    summed_rows,
    weight_of_count,
    weight_of_totals,
)
from core.context_parallel.rows.uses import is_compared
from core.context_parallel.rows.verdicts import verdicts
from core.parallel_state.by_hand.listened_tensor import unmark
from core.parallel_state.by_hand.part_sizes import PartNumber
from core.parallel_state.by_hand.split_axes import Axes
from core.parallel_state.by_hand.split_functions import Finding, Followed, outcome_of
from core.parallel_state.by_hand.split_names import kind_of
from core.parallel_state.by_hand.split_tensor import Call, SplitTensor
from core.parallel_state.collectives import BACKWARD_TAG, all_gather
from core.parallel_state.collectives.checks import fingerprint

_LARGEST = ("max", "min", "amax", "amin")  # of the rows: no sums
# from one output, in which ranks compare: sequences may have one each before that of the step
_BACKWARDS = 16
_OF_A_RANK = "which are this context rank's, not all of a sequence"


class Sums(FollowsRows):
    """What is summed over the rows of one output."""

    def __init__(self, owner: Owner, output: Tensor, *, judges_totals: bool = True) -> None:
        super().__init__()
        self._owner = owner
        self.wholes = owner.wholes
        self._judges_totals = judges_totals
        self._count = 0
        self._backwards = 0
        # norm and mean of the sums' gradients; what all rows together weigh in the loss, if sums alone say so
        self._numbers = torch.zeros(3, dtype=torch.float64, device=output.device)
        # [b, s/cp]: else the rows' losses are the program's
        self._is_loss = output.dim() == 2
        self._shape = tuple(output.shape[:2])
        self._weights = means.no_weights(output)
        self.is_evaluation = not output.requires_grad
        self._totals: list[Total] = []
        # what `loss_fn` returned with a count that is no rows'
        self._counted: Total | None = None
        self._shared = SharedCounts(output.device)
        self._divisors = Divisors(owner.batch, output.device)
        self._factors = factors.RowFactors(output.device, of_losses=self._is_loss)
        self._backward_of_head = BackwardOfHead(owner.synced)

    def weigh(self, logits: Tensor) -> None:
        """Of [b, s/cp, v]: in their backward, before it comes to the output, what rows weigh in a cross entropy."""
        values = logits.detach().as_subclass(Tensor)

        def note(gradient: Tensor) -> None:
            # a tensor rank's part of logits is none, the gathered ones were before it; a hidden layer's are others
            if (found := means.weights_in_cross_entropy(gradient, values)).shape == self._shape:
                self._weights = means.known_weights(found, self._weights)

        logits.register_hook(note)

    def mark(self, tensor: Any, axes: Axes | None, partial: str = "") -> None:
        # tokens that may be the next forward's; of an evaluation comparisons, too: which rank a label has
        if isinstance(tensor, Tensor) and (
            tensor.is_floating_point() or partial or self.is_evaluation or reads.are_tokens(tensor)
        ):
            super().mark(tensor, axes, partial)
            if not tensor.requires_grad:  # the output may be gone by then
                tensor.follower = self  # type: ignore[attr-defined]

    def follow(self, call: Call) -> None:
        name, args, result = call.name, call.args, call.result
        if call.func is torch.autograd.grad:
            self._owner.gradients.given_by_grad(args, call.kwargs, result)
            return
        if name == "grad":
            self._owner.gradients.looked_at(result, call.inputs[0].axes)
            return
        of_batch = [x for x in call.inputs if is_of_batch(x)]
        inputs = [x for x in call.inputs if not is_of_batch(x)]
        inputs = self._hear_draws(name, self._hear_writes(call, inputs), result)
        if name in factors.COMPARISONS or any(x.requires_grad for x in inputs):
            self._factors.note_scalars(name, args)
        inputs = self._hear_loss(name, inputs, result)
        if not inputs:
            return
        self._hear_batch(name, [x for x in of_batch if is_changed(x)], inputs, args)
        of_outputs = replace(call, inputs=inputs)
        if any(x.partial == TOTAL for x in inputs):
            self._follow_totals(of_outputs)
        elif any(x.partial for x in inputs):
            self._follow_statistic(of_outputs)
        else:
            self._follow_rows(of_outputs)

    def _follow_rows(self, call: Call) -> None:
        name, inputs, args = call.name, call.inputs, call.args
        kwargs, result = call.kwargs, call.result
        needs_gradient = any(x.requires_grad for x in inputs)
        if name in ("numpy", "array") or (name == "tolist" and self.is_evaluation):
            self._owner.tell_of_log("values of", reads.NUMPY_REMEDY, "go to numpy")
        try:
            if needs_gradient or not inputs[0].is_floating_point():  # tokens: of the next batch
                own = self._factors if needs_gradient else self._owner.batch.factors
                own.note(name, inputs, args, kwargs)
            # as if nobody followed the batch, or a loss
            args, kwargs = with_rows_alone(args, kwargs)
            outcome: Finding | Followed | str | float | None = (
                selections.selected(name, args, result)
                or selections.loss_outcome(name, args, kwargs, result)
                or outcome_of(call.func, name, args, kwargs, result)
            )
        except Exception:
            # who looks on must not end a right program: a call of a form unknown here is not followed
            return
        if outcome in _LARGEST:
            outcome = Finding("reduction", name, tuple(inputs[0].shape))
        if isinstance(outcome, list):
            for tensor, axes in outcome:
                self.mark(tensor, axes)
                if not needs_gradient:
                    self._backward_of_head.listen(tensor, self.compare)
        elif not needs_gradient:
            if name == "setitem" and isinstance(outcome, Finding):
                self._tell_if_used(outcome, result)
            elif isinstance(outcome, (str, float)) or (
                isinstance(outcome, Finding) and outcome.kind in ("reduction", "cut")
            ):
                self._mark_statistic(result, name)
        elif isinstance(outcome, Finding):
            self._hear_draw(name, inputs[0])
            self._tell_if_used(outcome, result)
        elif isinstance(outcome, str):
            self._compare_sum(name, inputs[0], result)
        elif isinstance(outcome, (int, float)):
            self._compare_later(result, outcome, rows=summed_rows(name, args, kwargs))

    def _hear_batch(
        self, name: str, changed: list[SplitTensor], inputs: list[SplitTensor], args: tuple
    ) -> None:
        """Sums over rows, or shifts, of the batch meet rows: sums by which these are divided are compared."""
        if not any(x.requires_grad and not x.partial for x in inputs):
            return
        for x in changed:
            self._divisors.meet(name, x)
        for number in args:
            if isinstance(number, PartNumber) and isinstance(number, (int, float)):
                self._divisors.note(torch.tensor(float(number)), "a sum")

    def listening(self, hook: Any, axes: Axes) -> Any:
        """A hook on the gradient of rows."""
        return self._owner.gradients.listening(hook, axes)

    def check(self, name: str, args: tuple, kwargs: dict[str, Any]) -> None:
        # `losses.backward(weights)`: before the backward in which numbers are compared
        if name == "backward" and isinstance(args[0], SplitTensor) and not args[0].partial:
            for x in pytree.tree_leaves((args[1:], kwargs)):
                if isinstance(x, SplitTensor) and is_of_batch(x) and is_changed(x):
                    self._divisors.meet(name, x)

    def _hear_draws(self, name: str, inputs: list[SplitTensor], result: Any) -> list[SplitTensor]:
        """Noise that is drawn for rows is told; the inputs that are to be followed."""
        # a tensor made like rows has values of its own
        if name.endswith("_like") or name.startswith("new_"):
            if draws.has_rows(result, inputs) and any(x.requires_grad for x in inputs):
                self.mark(result, None, draws.MADE_LIKE)
                self._hear_draw(name, inputs[0])
            return []
        # the first function that is called on it draws, or nothing does
        for x in inputs:
            if x.partial == draws.MADE_LIKE:
                self._hear_draw(name, x)
                unmark(x)
        return [x for x in inputs if isinstance(x, SplitTensor)]

    def _hear_writes(self, call: Call, inputs: list[SplitTensor]) -> list[SplitTensor]:
        """Told where rows that were taken by number are written: `x[3].zero_()`; the inputs that are no such."""
        for x in (x for x in inputs if x.partial == selections.BY_NUMBER):
            if call.result is x:
                what = f"{call.name} writes rows by number, {_OF_A_RANK}"
                self._owner.tell(what, factors.POSITIONS_REMEDY)
            elif isinstance(call.result, Tensor) and call.result._base is not None:
                self.mark(call.result, None, selections.BY_NUMBER)
        return [x for x in inputs if x.partial != selections.BY_NUMBER]

    def _hear_draw(self, name: str, rows: Tensor) -> None:
        if kind_of(name) == "draw":
            self._owner.tell(draws.message(name, rows), draws.REMEDY)

    def _hear_loss(self, name: str, inputs: list[SplitTensor], result: Any) -> list[SplitTensor]:
        """A branch by a loss of this rank's rows is told; the inputs without means of rows."""
        if name in BRANCHES and any(x.partial in (MEAN, TOTAL) for x in inputs):
            self._tell_of_branch()
        rest = [x for x in inputs if x.partial != MEAN]
        if inputs and not rest:
            if name == "all_reduce":
                unmark(inputs[0])  # it is of all rows now
            elif name in SCALED or name == "detach":
                self.mark(result, None, MEAN)
        return rest

    def _tell_of_branch(self) -> None:
        self._owner.tell_of_log("a loss of", reads.BRANCH_REMEDY, "is compared")

    def numbers(self, tensor: SplitTensor, result: Any) -> Any:
        of_sequences = type(result) is list and is_statistic(tensor)
        is_loss = tensor.partial in (MEAN, TOTAL) and type(result) is float
        if (of_sequences or is_loss) and is_compared():
            self._tell_of_branch()
        return result

    def _mark_statistic(self, result: Any, name: str, *, is_place: bool = False) -> None:
        """Numbers of this rank's rows that have no gradient, and what was made of them: a baseline, a selection."""
        # of the largest, as a number of a row; of an evaluation counts, too
        is_place |= name in STATISTICS or self.is_evaluation
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and (is_place or reads.may_count(tensor)):
                self.mark(tensor, None, name)
            if isinstance(tensor, SplitTensor):
                tensor.counted = tensor.detach().as_subclass(Tensor).clone()

    def _follow_statistic(self, call: Call) -> None:
        """Told where it meets what has a gradient, unless somebody has summed it over the ranks meanwhile."""
        name, inputs, result = call.name, call.inputs, call.result
        numbers = [x for x in inputs if is_statistic(x)]
        if name == "all_reduce":
            unmark(inputs[0])  # it is of all rows now
            return
        if not numbers or name in ("backward", "grad", "register_hook"):
            return
        first = numbers[0]
        is_read = name in READS and not isinstance(result, Tensor)
        if reads.decides(name, first, is_read, self.is_evaluation):
            self._owner.tell_of_log(*reads.log_of(first))
        elif is_read:
            self.read(name, first)
        # where it has a gradient itself, a hook waits for that
        elif not first.requires_grad and reads.meets_rows(call, self.is_evaluation):
            text = f"{first.partial} of rows {_OF_A_RANK}, comes to the loss by {name}"
            of_places = kind_of(first.partial) == "cut"
            self._owner.tell(text, *([factors.POSITIONS_REMEDY] if of_places else []))
        else:
            # of a sequence: `means.topk(2).indices[1:]`
            is_place = name in STATISTICS or first.dtype is torch.int64
            self._mark_statistic(result, first.partial, is_place=is_place)

    def read(self, name: str, tensor: SplitTensor) -> None:
        """Told of a largest loss and its like; what is a mean's part is left alone, as over data ranks."""
        if is_statistic(tensor) and (tensor.partial in STATISTICS or self.is_evaluation):
            self._owner.tell_of_log(*reads.log_of(tensor))

    def _tell_if_used(self, finding: Finding, result: Any) -> None:
        """Where a gradient comes back through it: nothing is said of what is only looked at."""
        if finding.kind not in ("reduction", "cut"):
            return
        does = "takes rows by number" if finding.kind == "cut" else "works across rows"
        what = f"{finding.name} of {list(finding.shape)} {does}, {_OF_A_RANK}"
        tell = partial(self._owner.tell, what)
        if finding.name in selections.WRITES:
            tell = partial(tell, factors.POSITIONS_REMEDY)
        if finding.name == "setitem":
            tell()
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda gradient: tell())
                if finding.kind == "cut" and tensor._base is not None:
                    self.mark(tensor, None, selections.BY_NUMBER)
        if finding.name in STATISTICS:
            self._mark_statistic(result, finding.name)

    def _compare_sum(self, name: str, rows: Tensor, result: Any) -> None:
        numbers = rows.numel() if name != "nanmean" else rows.isnan().logical_not().sum().item()
        is_mean = name in ("mean", "nanmean") and isinstance(result, Tensor)
        divisor, count = (numbers / max(result.numel(), 1), 0) if is_mean else (1.0, rows.numel())
        self._compare_later(result, divisor, rows=count, of=None if is_mean else rows)

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
        total = Total(rows, counts_of(of, result, {rows, prod(self._shape)}))
        total.kept = rows if of is None else of.detach().count_nonzero()
        total.may_be_pooled = not self._is_loss and result.shape == self._shape[:1]
        if rows and (self._is_loss or result.dim() == 0 or total.may_be_pooled):
            if self._judges_totals:
                self._totals.append(total)
            self._mark_totals(result, (total,))
        elif not rows and result.dim() == 0:
            self.mark(result, None, MEAN)

        def note(gradient: Tensor) -> None:
            if self._backwards < _BACKWARDS and not torch._C._are_functorch_transforms_active():
                self._numbers[:2] += fingerprint(gradient.detach()) * (place / (divisor or 1))
                total.weight = gradient.detach().sum().double() * rows
                self._shared.note(total, gradient)

        result.register_hook(note)

    def _mark_totals(self, result: Tensor, totals: tuple[Total, ...]) -> None:
        self.mark(result, None, TOTAL)
        if isinstance(result, SplitTensor):
            result.totals = totals  # type: ignore[attr-defined]

    def _follow_totals(self, call: Call) -> None:
        """Until a tensor divides them, or a number of ranks multiplies them: the program knows the ranks then."""
        totals: tuple[Total, ...] = sum((x.totals for x in call.inputs if x.partial == TOTAL), ())  # type: ignore[attr-defined]
        for total in totals:
            total.follow(call.name, call.args, self._owner.rank_counts)
        if call.name in (*SCALED, *ADDED) and isinstance(call.result, Tensor):
            self._mark_totals(call.result, totals)

    def returned(self, loss: SplitTensor, count: Any) -> None:
        """Executors sum the counts of all context ranks: told if rows weigh otherwise than those of a mean."""
        self.wholes.loss = loss
        if loss.partial != TOTAL or self._judges_totals or len(loss.totals) > 1:  # type: ignore[attr-defined]
            return
        total: Total = loss.totals[0]  # type: ignore[attr-defined]
        is_constant = is_constant_count(count, self._shape)
        if total.knows_ranks or not is_constant or count in self._owner.batch.read_numbers:
            return

        def note(gradient: Tensor) -> None:
            total.unit = gradient.detach().double() * count
            self._counted = total

        loss.register_hook(note)

    def compare(self, gradient: Tensor) -> None:
        """A backward has come back to the output: all its sums have their gradients. Warns on every rank."""
        if self._backwards == _BACKWARDS or torch._C._are_functorch_transforms_active():
            return
        self._backwards += 1
        group = self._owner.group
        assert group is not None
        of_losses = gradient.detach() if self._is_loss else None
        if self._judges_totals:
            self._numbers[2] = weight_of_totals(self._totals, of_losses)
        else:
            self._numbers[2] = weight_of_count(self._counted, of_losses)
        self._owner.backward_ended()
        told = self._numbers.new_tensor([float(self._owner.told)])
        shared = self._shared.numbers * self._owner.is_averaged
        if self._is_loss:
            self._weights = means.numbers_of_weights(gradient)
        of_outputs = (self._numbers, shared, self._divisors.numbers, self._factors.numbers)
        of_model = self._owner.compared(told.device)
        numbers = torch.cat((*of_outputs, *of_model, self._weights, told))
        gathered = all_gather(numbers[None], group, tag=BACKWARD_TAG).cpu()
        self._numbers.zero_()
        self._shared.numbers.zero_()
        # as many comparisons on all ranks, though only one of them may have told
        self._owner.ended |= bool(gathered[:, -1].any())
        if self._owner.ended:
            self._owner.tell_of_others(gathered[:, -1])
            return
        how = (self._judges_totals, prod(self._shape) * self._owner.is_averaged)
        for found in verdicts(gathered[:, :-1], group, self._divisors, gradient.dtype, *how):
            self._owner.tell(*filter(None, found))  # without a remedy of its own: that of sums
        # once the backward has ended, and hidden states that a hook gave have been compared as well
        torch.autograd.Variable._execution_engine.queue_callback(self.wholes.judge_returned)
