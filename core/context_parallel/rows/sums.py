"""Notices a loss that goes on differently with what each context rank summed over its own rows.

Context ranks hold rows of the same sequences, so what a program sums over rows is a rank's part of a sum. One process
goes on with the whole sum: the gradient of every rank's part must be the same. It is where a sum is scaled by numbers
that all ranks share, or is summed over the ranks first. It is not where a rank divides by the tokens of its own rows,
squares its part, or gives it to a head. So in some forwards the model's output is of a class that is followed to
where its rows are summed; in backward these sums' gradients are compared.
"""

import warnings
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from core.autograd import has_main_grad
from core.context_parallel.rows.batches import BatchRows
from core.context_parallel.rows.gradients import GradientRows, axes_of_rows
from core.context_parallel.rows.hidden import HiddenSums
from core.context_parallel.rows.hooks import HookedRows
from core.context_parallel.rows.outputs import Sums
from core.context_parallel.rows.reads import LOG_REMEDY
from core.context_parallel.rows.synced import SyncedWeight
from core.parallel_state.by_hand.as_written import AsWritten
from core.parallel_state.by_hand.batches import HOOKED, follow_batches
from core.parallel_state.by_hand.split_tensor import is_turn
from core.parallel_state.collectives import Group

_REMEDY = (
    "A mean over tokens is divided by those of all ranks: n = mask.sum(); all_reduce(n, group=parallel_state."
    "get_data_parallel_group(with_context_parallel=True)), and under DataParallel, which averages over that group, "
    "times its size; executors take (sum, tokens). What a head, a norm or a square takes is summed first: "
    "torch.distributed.nn.functional.all_reduce(x, group=parallel_state.get_context_parallel_group())"
)


# forwards in which the weights of rows in a cross entropy are found
_WEIGHED = 2


class RowSums:
    """Follows the outputs of a model's first forwards with gradients, and of each 17th; tells once."""

    def __init__(self, group: Group | None, replicas: int = 1) -> None:
        # None: one rank has all rows
        self.group = group
        self.told = False
        # once all ranks know that one of them has told
        self.ended = False
        # by a `DataParallel`, over data and context ranks: the model's gradients
        self.is_averaged = False
        self._told_of_log = False
        # data ranks, over which gradients are averaged together with cp
        self.replicas = replicas
        self._forwards = 0
        self._forwards_inside = 0
        self._evaluations = 0
        self._hooked_evaluations = 0
        # kept, since tensors hold who follows them weakly
        self._evaluated: deque[Sums] = deque(maxlen=4)
        self._hooked: deque[Sums] = deque(maxlen=64)
        self.gradients = GradientRows()
        self._synced = SyncedWeight()
        self._as_written = AsWritten()
        self._inside = HookedRows(self.gradients)
        self._latest: weakref.ref[Sums] | None = None
        self.batch = BatchRows(self)
        if group is not None:
            follow_batches(group, self)

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
        if is_turn(self._forwards) and not self.ended:
            sums = Sums(self, output, judges_totals=not sums_are_given)
            # its hook comes first: what it finds is compared
            if rows_dim == 1 and output.dim() == 3:
                self._weigh(sums, output)
            output.register_hook(sums.compare)
            if not self.told:
                self._as_written.begin(self._forwards, output.device)
                sums.mark(output, axes_of_rows(output, rows_dim))
            self._latest = weakref.ref(sums)

    def _weigh(self, sums: Sums, logits: Tensor) -> None:
        # it keeps the logits until backward: in few forwards
        if self._forwards <= _WEIGHED:
            sums.weigh(logits)

    def _follow_reads(self, output: Tensor, rows_dim: int) -> None:
        """Of an evaluation: statistics of this rank's rows are told where they are read; nothing has a gradient."""
        self._evaluations += 1
        if is_turn(self._evaluations) and not self._told_of_log:
            as_written = AsWritten()
            as_written.begin(self._evaluations, output.device)
            # no backward says when its rows were read, and another evaluation may never come
            weakref.finalize(output, as_written.end).atexit = False
            sums = Sums(self, output)
            sums.mark(output, axes_of_rows(output, rows_dim))
            self._evaluated.append(sums)
            self._latest = weakref.ref(sums)

    def follow_batch(self, batch: Mapping[str, Any], tokens: Tensor) -> None:
        """Of a batch that was cut for the next forward, if that is one of those which are followed."""
        count = self._forwards_inside + 1
        device = next(
            (x.device for x in batch.values() if isinstance(x, Tensor)), torch.device("cpu")
        )
        if not self.told and is_turn(count):
            self._as_written.begin(count, device)
            self.batch.begin(batch, tokens)

    def follow_rows(self, rows: Tensor) -> None:
        """Of rows that were cut for that batch, or for the losses of the forward before."""
        if not self.told and is_turn(max(self._forwards_inside, 1)):
            self.batch.add(rows)

    def backward_ended(self) -> None:
        """Of a followed output: if the next forward is none of those, its batch costs nothing."""
        self._as_written.end()
        if not is_turn(self._forwards_inside + 1):
            self.batch.make_plain()

    def compared(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """What ranks compare in a backward beside what is known of the output: of the batch, of a weight."""
        return self.batch.compared.to(device), self._synced.numbers().to(device)

    def look_inside(
        self, model: nn.Module, shares: tuple[int, ...], inputs: tuple, *, sums: bool
    ) -> None:
        """Before a forward: follow hidden states that the program's hooks are given, until `end_look`.

        shares: how many rows they may have. inputs: tokens, labels. sums: are given, as of `follow`.
        """
        if self.group is None:
            return
        if not torch.is_grad_enabled():
            self._look_at_evaluation(model, shares)
            return
        self._forwards_inside += 1
        # a teacher may have been made after the model that is trained
        follow_batches(self.group, self)
        if self.ended or not is_turn(self._forwards_inside):
            self._as_written.end()
            self.batch.make_plain()
            return
        device = inputs[0].device if isinstance(inputs[0], Tensor) else torch.device("cpu")
        self._as_written.begin(self._forwards_inside, device)
        self.is_averaged = self.is_averaged or has_main_grad(next(model.parameters()))
        self.batch.forward_begins(inputs)
        self._synced.choose(model)

        def follow(hidden: Tensor) -> None:
            followed = HiddenSums(self, hidden, judges_totals=not sums)
            hidden.register_hook(followed.compare)
            if not self.told:
                followed.mark(hidden, axes_of_rows(hidden, 0))

        self._inside.attach(model, shares, follow)

    def _look_at_evaluation(self, model: nn.Module, shares: tuple[int, ...]) -> None:
        """Follow what hooks are given without gradients: steering vectors, calibration."""
        if not self._inside.has_hooks(model):
            return
        # what calibration makes of them `DataParallel` finds in the weights
        setattr(model, HOOKED, True)
        self._hooked_evaluations += 1
        if self._told_of_log or not is_turn(self._hooked_evaluations):
            return

        def follow(hidden: Tensor) -> None:
            followed = HiddenSums(self, hidden)
            followed.mark(hidden, axes_of_rows(hidden, 0))
            self._hooked.append(followed)

        self._inside.attach(model, shares, follow)

    def end_look(self) -> None:
        """After that forward."""
        self._inside.detach()

    def mark_gathered(self, gathered: Tensor) -> None:
        """Follow [b, s/cp, v] that was gathered from tensor ranks' parts, as the output of that forward."""
        sums = self._latest() if self._latest is not None else None
        if sums is not None and gathered.requires_grad != sums.is_evaluation:
            sums.mark(gathered, axes_of_rows(gathered))
            if gathered.requires_grad:
                self._weigh(sums, gathered)

    def tell(self, what: str, remedy: str = _REMEDY) -> None:
        """Warn of `what` with the remedy, once for this model."""
        if not self.told:
            self.told = True
            warnings.warn(f"context parallelism: {what}. {remedy}", stacklevel=6)

    def tell_of_log(self, name: str, remedy: str = LOG_REMEDY, does: str = "is read") -> None:
        """Warn, once, of a statistic of this rank's rows that is read as if it were of all."""
        if not self._told_of_log:
            self._told_of_log = True
            what = f"{name} rows which are this context rank's {does}: others hold the rest of each sequence"
            warnings.warn(f"context parallelism: {what}. {remedy}", stacklevel=6)
