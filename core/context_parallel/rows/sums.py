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

from core.autograd import StageContext, has_main_grad
from core.context_parallel.rows.batches import BatchRows
from core.context_parallel.rows.gradients import GradientRows, axes_of_rows
from core.context_parallel.rows.hidden import SIZE_REMEDY, HiddenSums
from core.context_parallel.rows.hooks import HookedRows
from core.context_parallel.rows.outputs import Sums
from core.context_parallel.rows.parameter_hooks import ParameterHooks
from core.context_parallel.rows.reads import LOG_REMEDY
from core.context_parallel.rows.synced import SyncedWeight
from core.context_parallel.rows.twins import OF_HOOK, has_twins
from core.context_parallel.rows.wholes import REMEDY as WHOLES_REMEDY
from core.context_parallel.rows.wholes import Wholes, is_repeated
from core.parallel_state.by_hand.as_written import AsWritten
from core.parallel_state.by_hand.batches import HOOKED, follow_batches
from core.parallel_state.by_hand.functions import program_level
from core.parallel_state.by_hand.split_tensor import SplitTensor, is_turn
from core.parallel_state.collectives import Group, all_gather
from core.parallel_state.state import ParallelState

_REMEDY = (
    "A mean over tokens is divided by those of all ranks: n = mask.sum(); all_reduce(n, group=parallel_state."
    "get_data_parallel_group(with_context_parallel=True)), and under DataParallel, which averages over that group, "
    "times its size; executors take (sum, tokens). What a head, a norm or a square takes is summed first: "
    "torch.distributed._functional_collectives.all_reduce(x, 'sum', parallel_state.get_context_parallel_group())"
)


# forwards in which the weights of rows in a cross entropy are found
_WEIGHED = 2


class RowSums:
    """Follows the outputs of a model's first forwards with gradients, and of each 17th; tells once."""

    def __init__(self, ps: ParallelState, *, splits_vocabulary: bool = False) -> None:
        # None: one rank has all rows
        self.group = ps.group("cp")
        self._ps = ps
        # of logits [b, s/cp, v/tp], gathered ones are repeated
        self._splits_vocabulary = splits_vocabulary and ps.size("tp") > 1
        # logits whose vocabulary is split, and all ranks' rows of this part of it
        self._parts: tuple[weakref.ref[Tensor], Tensor] | None = None
        self.told = False
        # once all ranks know that one of them has told
        self.ended = False
        # by a `DataParallel`, over data and context ranks: the model's gradients
        self.is_averaged = False
        self._told_of_log = False
        self.rank_counts = _rank_counts(ps)
        self._forwards = 0
        self._forwards_inside = 0
        self._forwards_without = 0
        self._are_whole = False
        self._evaluations = 0
        self._hooked_evaluations = 0
        # kept, since tensors hold who follows them weakly
        self._evaluated: deque[Sums] = deque(maxlen=4)
        self._hooked: deque[Sums] = deque(maxlen=64)
        self.gradients = GradientRows()
        self.synced = SyncedWeight()
        self._as_written = AsWritten()
        self._inside = HookedRows(self.gradients)
        self._parameter_hooks = ParameterHooks(self)
        self._latest: weakref.ref[Sums] | None = None
        self.wholes = Wholes(ps, self)
        self.repeats = False
        self.batch = BatchRows(self)
        if self.group is not None:
            follow_batches(self.group, self)

    def __deepcopy__(self, memo: dict) -> "RowSums":
        return RowSums(self._ps, splits_vocabulary=self._splits_vocabulary)

    def follow(self, output: Tensor, rows_dim: int = 1, *, sums_are_given: bool = False) -> None:
        """Of a forward whose rows are this rank's. In its backward: one all-gather of some numbers over cp.

        rows_dim: 1 of losses and logits [b, s/cp, ...], 0 of a model's hidden states without its head [s/cp, b, h].
        sums_are_given: an executor takes sums over rows and divides them itself.
        """
        if self.group is None or self._are_whole:
            return
        if not output.requires_grad:
            if not sums_are_given:
                self._follow_reads(output, rows_dim)
            return
        self._forwards += 1
        whole = None
        if is_repeated(self._forwards):
            whole = self.wholes.gathered(output, rows_dim)
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
        self._repeat(output, whole, rows_dim)

    def _weigh(self, sums: Sums, logits: Tensor) -> None:
        # it keeps the logits until backward: in few forwards
        if self._forwards <= _WEIGHED:
            sums.weigh(logits)

    def _follow_reads(self, output: Tensor, rows_dim: int) -> None:
        """Of an evaluation: statistics of this rank's rows are told where they are read; nothing has a gradient."""
        self._evaluations += 1
        whole = self.wholes.gathered(output, rows_dim) if is_repeated(self._evaluations) else None
        if is_turn(self._evaluations) and not self._told_of_log:
            as_written = AsWritten()
            as_written.begin(self._evaluations, output.device)
            # no backward says when its rows were read, and another evaluation may never come
            weakref.finalize(output, as_written.end).atexit = False
            sums = Sums(self, output)
            sums.mark(output, axes_of_rows(output, rows_dim))
            self._evaluated.append(sums)
            self._latest = weakref.ref(sums)
        self._repeat(output, whole, rows_dim)

    def _repeat(self, output: Tensor, whole: Tensor | None, rows_dim: int) -> None:
        """What is called on it is repeated; on logits of a part of the vocabulary once they are gathered."""
        if whole is not None and self._splits_vocabulary and rows_dim and output.dim() == 3:
            self._parts = weakref.ref(output), whole
        elif whole is not None:
            self.wholes.add(output, whole, rows_dim)

    def follow_batch(self, batch: Mapping[str, Any], whole: Mapping[str, Any]) -> None:
        """Of a batch that was cut for the next forward, if that is one of those which are followed."""
        count = self._forwards_inside + 1
        device = next(
            (x.device for x in batch.values() if isinstance(x, Tensor)), torch.device("cpu")
        )
        if not self.told and is_turn(count):
            self._as_written.begin(count, device)
            self.repeats = is_repeated(count)
            self.batch.begin(batch, whole)

    def follow_rows(self, rows: Tensor, whole: Tensor) -> None:
        """Of rows that were cut for that batch, or for the losses of the forward before."""
        if not self.told and is_turn(max(self._forwards_inside, 1)):
            self.batch.add(rows, whole)

    def backward_ended(self) -> None:
        """Of a followed output: if the next forward is none of those, its batch costs nothing."""
        self._as_written.end()
        if not is_turn(self._forwards_inside + 1):
            self.batch.make_plain()
            self.wholes.end()

    def compared(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """What ranks compare in a backward beside what is known of the output: of the batch, of a weight."""
        return self.batch.compared.to(device), self.synced.numbers().to(device)

    def look_inside(
        self, model: nn.Module, shares: tuple[int, ...], inputs: tuple, stage: StageContext
    ) -> None:
        """Before a forward: follow hidden states that the program's hooks are given, until `end_look`.

        shares: how many rows they may have. inputs: tokens, labels.
        """
        # in a generation each rank has whole sequences, or one rank alone runs
        self._are_whole = stage.whole_sequences
        if self.group is None or self._are_whole:
            return
        self._inside.detach()
        if self._parameter_hooks.listens:
            self._parameter_hooks.detach()
        if not torch.is_grad_enabled():
            self._look_at_evaluation(model, shares)
            return
        self._forwards_inside += 1
        self.repeats = is_repeated(self._forwards_inside)
        # a teacher may have been made after the model that is trained
        follow_batches(self.group, self)
        if self.ended or not is_turn(self._forwards_inside):
            self._as_written.end()
            self.batch.make_plain()
            self.wholes.end()
            return
        if not self.batch.ahead:
            self.wholes.begin()
        device = inputs[0].device if isinstance(inputs[0], Tensor) else torch.device("cpu")
        self._as_written.begin(self._forwards_inside, device)
        self.is_averaged = self.is_averaged or has_main_grad(next(model.parameters()))
        are_averaged = self.is_averaged and not stage.driven
        self.gradients.averaged_over = self.group.size if are_averaged else 1
        self.batch.forward_begins(inputs)
        self.synced.choose(model)
        if not stage.driven:
            self._parameter_hooks.attach(model)

        def follow(hidden: Tensor) -> None:
            whole = self._whole_of_hidden(hidden, shares)
            # frozen: its rows are known by what is made of them alone
            if hidden.requires_grad:
                followed = HiddenSums(self, hidden, judges_totals=not stage.driven)
                hidden.register_hook(followed.compare)
                if not self.told:
                    followed.mark(hidden, axes_of_rows(hidden, 0))
            if whole is not None:
                self.wholes.add(hidden, whole, 0, OF_HOOK)

        if self._inside.are_hooks_alike(model, self.group, looks_again=self.repeats):
            width = self._width(model) if is_repeated(self._forwards_inside) else None
            self._inside.attach(
                model, shares, follow, self._check_hook, self._tell_of_forward, width
            )

    def _width(self, model: nn.Module) -> int | None:
        """Of hidden states, in forwards after the first in which columns that tensor ranks split have their turn."""
        is_split = self._ps.size("tp") > 1 and self._forwards_inside > 1
        return getattr(getattr(model, "config", None), "hidden_size", None) if is_split else None

    def _check_hook(self, x: Tensor, name: str, changed: Tensor | None) -> None:
        """Hooks on the part `name` returned `x`; changed: what they were given, if that is not what they return."""
        self.wholes.check_returned(x, name, is_training=torch.is_grad_enabled())
        sums = changed.seen_by() if isinstance(changed, SplitTensor) else None
        # a view of it is the same
        with torch._C.DisableTorchFunctionSubclass():
            is_same = x is not changed and changed is not None and torch.equal(x, changed)
        if isinstance(sums, HiddenSums) and sums.makes_rates and not is_same:
            what = (
                f"a hook on {name} makes a number of the length of the rows which are this context rank's, and "
                "changes hidden states"
            )
            self.tell(what, SIZE_REMEDY)

    def _tell_of_forward(self, name: str, mixes: str) -> None:
        """The forward that a program put in the place of that of the part `name` mixes rows of its result."""
        self.tell(
            f"{mixes}, in a forward that replaces that of {name}, is along rows which are this context rank's",
            WHOLES_REMEDY,
        )

    def _whole_of_hidden(self, hidden: Tensor, shares: tuple[int, ...]) -> Tensor | None:
        """All-gather over cp, of what sequence parallelism has not cut once more."""
        if not self.repeats or len(hidden) != shares[0]:
            return None
        return self.wholes.gathered(hidden, 0)

    def _look_at_evaluation(self, model: nn.Module, shares: tuple[int, ...]) -> None:
        """Follow what hooks are given without gradients: steering vectors, calibration."""
        self._forwards_without += 1
        has_hooks = self._inside.has_hooks(model)
        self.repeats = is_repeated(self._forwards_without)
        if self.repeats:
            assert self.group is not None
            self.repeats = self._inside.are_hooks_alike(model, self.group, looks_again=True)
            self.wholes.begin()
        if not has_hooks:
            return
        # what calibration makes of them `DataParallel` finds in the weights
        setattr(model, HOOKED, True)
        self._hooked_evaluations += 1
        is_followed = is_turn(self._hooked_evaluations) and not self._told_of_log
        if not is_followed and not self.repeats:
            return

        def follow(hidden: Tensor) -> None:
            whole = self._whole_of_hidden(hidden, shares)
            if is_followed:
                followed = HiddenSums(self, hidden)
                followed.mark(hidden, axes_of_rows(hidden, 0))
                self._hooked.append(followed)
            if whole is not None:
                self.wholes.add(hidden, whole, 0)

        self._inside.attach(model, shares, follow, self._check_hook, self._tell_of_forward)

    def end_look(self, model: nn.Module) -> None:
        """After that forward."""
        self._inside.detach()
        if self.repeats and self.group is not None and self._inside.has_hooks(model):
            are_split = self._ps.size("tp") > 1
            seen = self.wholes.called, self.wholes.returned_by
            self._inside.listen_to_parts(model, *seen, are_split=are_split)

    def mark_gathered(self, gathered: Tensor, logits: Tensor, group: Group | None) -> None:
        """[b, s/cp, v], of the parts `logits` of tensor ranks, is followed as the output of that forward."""
        if self.group is None:
            return
        whole = None
        if group is not None and self._parts is not None and self._parts[0]() is logits:
            of_ranks = all_gather(self._parts[1][None].contiguous(), group)
            whole = torch.cat(of_ranks.unbind(0), -1)[..., : gathered.shape[-1]]
        sums = self._latest() if self._latest is not None else None
        # of another model, a teacher
        follower = logits.seen_by() if isinstance(logits, SplitTensor) else None
        sums = follower if isinstance(follower, Sums) else sums
        if sums is not None and gathered.requires_grad != sums.is_evaluation:
            sums.mark(gathered, axes_of_rows(gathered))
            if gathered.requires_grad:
                self._weigh(sums, gathered)
        if whole is not None:
            self.wholes.add(gathered, whole, 1)
        elif has_twins(logits):
            self.wholes.keep(gathered, logits.twins)  # type: ignore[attr-defined]

    def tell(self, what: str, remedy: str = _REMEDY) -> None:
        """Warn of `what` with the remedy, once for this model."""
        if not self.told:
            self.told = True
            warnings.warn(f"context parallelism: {what}. {remedy}", stacklevel=program_level())

    def tell_of_others(self, told: Tensor) -> None:
        """`told`, [cp]: which ranks have; what is wrong on one rank's rows may be right on another's."""
        assert self.group is not None
        ranks = [rank for rank, has in zip(self.group.ranks, told.tolist(), strict=True) if has]
        what = f"rank {ranks[0]} has told what is not right on its rows; on this one's it shows nothing"
        self.tell(what, "See its message")

    def tell_of_log(self, name: str, remedy: str = LOG_REMEDY, does: str = "is read") -> None:
        """Warn, once, of a statistic of this rank's rows that is read as if it were of all."""
        if not self._told_of_log:
            self._told_of_log = True
            what = f"{name} rows which are this context rank's {does}: others hold the rest of each sequence"
            warnings.warn(f"context parallelism: {what}. {remedy}", stacklevel=program_level())


def _rank_counts(ps: ParallelState) -> tuple[int, ...]:
    context, data = ps.size("cp"), ps.size("dp")
    return context, context * data, ps.world.size if ps.world is not None else 1
