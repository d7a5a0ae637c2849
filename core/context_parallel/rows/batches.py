"""Follows what a program makes of its batch's tokens, labels and masks, of which each context rank has its rows.

Elementwise it is right. A shift, a running sum or a count of tokens is of this rank's rows: told where it meets
losses or logits, or is given to the model. Sums that all ranks share (a mask of ones) are right where rows are
divided by them: their numbers are compared with the losses' gradients.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from core.context_parallel.rows.counts import RowCounts
from core.context_parallel.rows.factors import RowFactors
from core.context_parallel.rows.follower import FollowsRows
from core.context_parallel.rows.places import joins_rows
from core.context_parallel.rows.reads import MEAN, NUMPY_REMEDY, READS, is_moved
from core.context_parallel.rows.selections import selected
from core.context_parallel.rows.sequences import NUM_SEQUENCES, keep_sequences
from core.context_parallel.rows.wholes import Wholes
from core.parallel_state.by_hand import split_axes
from core.parallel_state.by_hand.listened_tensor import unmark
from core.parallel_state.by_hand.part_sizes import counted, number_of_part
from core.parallel_state.by_hand.split_axes import Axes
from core.parallel_state.by_hand.split_functions import Finding, outcome_of
from core.parallel_state.by_hand.split_names import LINEAR
from core.parallel_state.by_hand.split_tensor import Call, SplitTensor
from core.parallel_state.collectives.checks import fingerprint

# batches that are cut ahead of a forward, at most: more are no training's
_AHEAD = 4
_SUMS = ("sum", "mean", "nansum", "nanmean", "count_nonzero", "einsum", "dot", "matmul", "trace")
# of equal sums equal numbers, by which rows may be divided
_KEPT = LINEAR | {"clamp", "clip", "clamp_min", "reciprocal", "stack", "cat", "unbind"}
_KEPT |= {"maximum", "max", "rdiv", "rtruediv", "rmul", "radd", "int", "long", "nan_to_num"}
# what makes rows of rows that were divided already
_ROW_WISE_NAMES = """
    gt lt ge le eq ne where pow exp log sqrt abs logical_and logical_or logical_not and or invert bool masked_fill
    clamp_max minimum sigmoid tanh relu
"""
_ROW_WISE = frozenset(_ROW_WISE_NAMES.split())
_COMPARISONS = ("gt", "lt", "ge", "le", "eq", "ne")
_TABLES = ("getitem", "index_select", "take")
# a token at a time; an array of all rows is a copy
_LISTS = ("tolist", "item", "int", "index", "numpy", "array")
# an exact match: of each sequence, all rows
_MATCHES = "a count of sequences that match in all"
MATCH_REMEDY = (
    "Take it over the ranks before it is counted: torch.distributed.all_reduce(is_match.int(), "
    "op=torch.distributed.ReduceOp.MIN, group=parallel_state.get_context_parallel_group())"
)
COUNT_REMEDY = (
    "Tokens seen, a batch's size or steps of an epoch are of all ranks: times "
    "parallel_state.get_data_parallel_world_size(with_context_parallel=True), which a rate per rank is not"
)
_COUNTS = ("bincount", "histc", "histogram", "searchsorted", "bucketize")
REMEDY = (
    "Make weights, masks and shifted labels of whole sequences, before context_batch cuts the batch: it cuts tokens, "
    "labels and loss_mask, ContextRows.of_state(ps).of(weights, 1) anything else [b, s]. Counts of tokens are summed "
    "before they divide: all_reduce(n, group=parallel_state.get_context_parallel_group())"
)


class _Teller(Protocol):
    wholes: Wholes
    # whether what is called on this forward's rows is repeated on whole sequences
    repeats: bool
    rank_counts: tuple[int, ...]

    def tell(self, what: str, remedy: str) -> None: ...

    def tell_of_log(self, name: str, remedy: str, does: str = ...) -> None: ...


def is_of_batch(x: SplitTensor) -> bool:
    """Whether it was made of a batch alone."""
    return isinstance(x.seen_by(), BatchRows)


class BatchRows(FollowsRows):
    """Of one model's batches, each until a forward that nobody follows."""

    def __init__(self, owner: _Teller) -> None:
        super().__init__()
        self._owner = owner
        self.wholes = owner.wholes
        # batches that were cut since the last forward
        self.ahead = 0
        # plain tensors by which rows are multiplied or chosen, since the batch was cut
        self.factors = RowFactors(torch.device("cpu"))
        # counts that the program has read, as Python numbers
        self.read_numbers: set[float] = set()
        # a fingerprint of the sequences of which the last forward had rows; 0: unknown
        self._of_sequences = torch.zeros(NUM_SEQUENCES, dtype=torch.float64)

    @property
    def compared(self) -> Tensor:
        """What is compared over the ranks in a backward."""
        of_rows = self.factors.batch_numbers
        return torch.cat((of_rows, self._of_sequences.to(of_rows.device)))

    def begin(self, batch: Mapping[str, Any], whole: Mapping[str, Any]) -> None:
        """Follow the entries [b, s/cp] of a batch that was just cut of `whole` sequences, [b, s]."""
        self.ahead += 1
        if self.ahead > _AHEAD:
            return
        if self.ahead == 1:
            self.factors = RowFactors(next(iter(batch.values())).device)
            self.wholes.begin()
        for name, x in batch.items():
            self.add(x, whole.get(name))
        # with the rows: which batch a forward is given is known by them
        name = "tokens" if "tokens" in batch else "input_ids"
        batch[name].of_sequences = fingerprint(whole[name].double())

    def add(self, x: Any, whole: Tensor | None) -> None:
        """Follow [b, s/cp] that was cut for a batch, of `whole`; None: of the places in sequences."""
        if type(x) is not Tensor or x.dim() != 2 or x.requires_grad or self.ahead > _AHEAD:
            return
        self.mark(x, (*split_axes.plain(x.shape[:1]), ((x.shape[1], True),)))
        if self._owner.repeats:
            places = torch.arange(x.shape[1] * self.wholes.ranks, device=x.device)
            whole = places.expand(len(x), -1) if whole is None else whole
            # into which the program may write
            self.wholes.add(x, whole.clone(), None)

    def forward_begins(self, inputs: tuple[Any, ...]) -> None:
        """Of a model that is followed: what is made across rows must not be its input."""
        self.ahead = 0
        unknown = torch.zeros(NUM_SEQUENCES, dtype=torch.float64)
        self._of_sequences = getattr(inputs[0], "of_sequences", unknown)
        for x in inputs:
            # or what an evaluation has made: the model's own tokens
            if isinstance(x, SplitTensor) and (is_changed if is_of_batch(x) else is_moved)(x):
                self.tell(x, "is given to the model")

    def tell(self, x: SplitTensor, does: str) -> None:
        """Of what a function across rows made."""
        self._owner.tell(
            f"{x.partial} of a batch's rows which are this context rank's, not all of a sequence, {does}",
            REMEDY,
        )

    def follow(self, call: Call) -> None:
        name, inputs, args, result = call.name, call.inputs, call.args, call.result
        keep_sequences(call)
        # of outputs another is in charge
        other: Any = next((x.seen_by() for x in inputs if not is_of_batch(x)), None)
        if other is not None:
            # `tokens[:, 1:] = own[:, :-1]`
            if name == "setitem" and isinstance(args[0], SplitTensor) and is_of_batch(args[0]):
                self._write(args, [x for x in inputs if is_of_batch(x) and is_changed(x)])
            other.follow(call)
            return
        if name == "all_reduce":
            unmark(inputs[0])  # it is of all rows now
            return
        if name in (*READS, "index") and not isinstance(result, Tensor):
            self._note_read(result)
            if inputs[0].partial == _MATCHES:
                self._owner.tell_of_log(f"{_MATCHES} of the", MATCH_REMEDY)
            elif name in _LISTS and inputs[0].partial in ("", "unbind", *_TABLES):
                self._owner.tell_of_log(f"{name} of a batch's", NUMPY_REMEDY)
            return
        # what is made like it has values of its own
        if name.endswith("_like") or name.startswith("new_"):
            return
        changed = [x for x in inputs if is_changed(x)]
        leaves = pytree.tree_leaves((args, call.kwargs))
        if any(type(x) is Tensor and x.requires_grad for x in leaves):
            # sums of losses are compared in backward
            for x in changed:
                if x.numbers is None and split_axes.is_split(x.axes):
                    self.tell(x, f"comes to the loss by {name}")
        elif not changed and joins_rows(name, args, call.kwargs):
            written = args[0] if name == "setitem" else result
            self._change(written, name, _axes_like(inputs[0], written))
        elif call.writes and self._is_part_of_rows(args[0]):
            self._tell_of_places(name, args[0])
        elif name == "setitem":
            self._write(args, changed)
        elif changed:
            self.inherit(call, changed)
            if call.writes and isinstance(args[0], Tensor) and args[0]._base is not None:
                # `mask[:, i].scatter_(...)`
                self._set(args[0]._base, changed[0].partial, (), None)
        else:
            self._follow_rows(call)

    def _follow_rows(self, call: Call) -> None:
        name, args, kwargs, result = call.name, call.args, call.kwargs, call.result
        x = call.inputs[0]
        self.factors.note(name, call.inputs, args, kwargs)
        # `weights[labels]`
        of_plain = type(args[0]) is Tensor
        if of_plain and name in (*_TABLES, "gather") and x.dtype is not torch.bool:
            self.factors.note_table(args[0])
        if name in ("one_hot", "embedding") or (of_plain and name in _TABLES):
            self._look_up(x, result)
            return
        if name in _COUNTS:
            self._change(result, name, ())
            return
        if name == "pad":
            self._change(result, name, tuple(split_axes.plain(result.shape)))
            return
        try:
            outcome = selected(name, args, result) or outcome_of(
                call.func, name, args, kwargs, result
            )
        except Exception:
            # who looks on must not end a right program: a call of a form unknown here is not followed
            return
        if isinstance(outcome, list):
            for tensor, axes in outcome:
                self.mark(tensor, axes)
        elif isinstance(outcome, Finding):
            if outcome.kind == "draw" or outcome.kind == "exit":
                return
            if name in _SUMS:
                self._sum(result, name)
            for tensor in pytree.tree_leaves(result):
                self._change(tensor, name, _axes_like(x, tensor))
        elif isinstance(outcome, str):
            if outcome in _SUMS:
                self._sum(result, name)
            else:
                for tensor in pytree.tree_leaves(result):
                    self._change(tensor, name, ())

    def sizes(self, args: tuple, kwargs: dict[str, Any], result: Any) -> Any:
        """The same; of those of rows something may be decided."""
        known = super().sizes(args, kwargs, result)
        if known is result:
            return result
        counts = RowCounts(self._tell_of_count, self._owner.rank_counts[1])
        if isinstance(known, int):
            of_all_dims = len(args) == 1 and not kwargs
            return counted(known, replace(counts, is_total=of_all_dims))
        return torch.Size([counted(size, counts) for size in known])

    def _tell_of_count(self) -> None:
        self._owner.tell_of_log("the size of", COUNT_REMEDY, "makes a count or a rate")

    def _look_up(self, rows: SplitTensor, result: Any) -> None:
        if isinstance(result, Tensor):
            count = rows.dim()
            if result.shape[:count] == rows.shape:
                self.mark(result, (*rows.axes, *split_axes.plain(result.shape[count:])))

    def _sum(self, result: Any, name: str) -> None:
        if isinstance(result, Tensor):
            self._change(result, name, (), (result.detach().as_subclass(Tensor).clone(),))

    def _is_part_of_rows(self, x: Any) -> bool:
        """Whether it is a view of followed rows that was cut by number, `labels[:, n:]`."""
        if not isinstance(x, SplitTensor) or not x.partial:
            return False
        storage = x.untyped_storage().data_ptr()
        marked = [reference() for reference in self._marked]
        return any(
            isinstance(rows, SplitTensor)
            and not rows.partial
            and rows.untyped_storage().data_ptr() == storage
            for rows in marked
        )

    def _tell_of_places(self, name: str, x: SplitTensor) -> None:
        self._owner.tell(
            f"{name} of {list(x.shape)} takes rows of a batch by number, which are this context rank's, not all of a "
            "sequence",
            REMEDY,
        )

    def _write(self, args: tuple, changed: list[SplitTensor]) -> None:
        """`x[index] = value`: rows by number, or values that were made across rows."""
        x, index, value = args
        if not isinstance(x, SplitTensor):
            if changed:
                self._change(x, changed[0].partial, ())
            return
        if x.partial:
            # who writes rows of other ranks has thought of them; a number is written into a shift's end by habit
            is_own = not isinstance(value, Tensor) and any(x is c for c in changed)
            if is_own or any(value is c for c in changed):
                x.counted = x.detach().as_subclass(Tensor).clone()
            return
        self.factors.note("setitem", [x], (index, value), {})
        try:
            outcome = outcome_of(Tensor.__setitem__, "setitem", (x, index), {}, None)
        except Exception:
            return
        if isinstance(outcome, Finding):
            self._tell_of_places("setitem", x)
        elif changed:
            self._set(x, changed[0].partial, x.axes, changed[0].numbers)

    def inherit(self, call: Call, changed: list[SplitTensor]) -> None:
        """What is made of sums or shifts is one, too; sums that rows are divided by are kept, to be compared."""
        name, args = call.name, call.args
        first = changed[0]
        numbers: tuple[Tensor, ...] | None = ()
        for x in changed:
            if numbers is not None and x.numbers is not None:
                numbers += x.numbers
            else:
                numbers = None
        # whether a sequence has tokens
        against_zero = (
            numbers is not None
            and name in _COMPARISONS
            and len(args) > 1
            and isinstance(args[1], (int, float))
            and args[1] == 0
        )
        if name not in _KEPT and not against_zero:
            spans_rows = any(split_axes.is_split(x.axes) for x in changed)
            # of rows that were divided already, as of rows
            if numbers is not None and not (spans_rows and name in _ROW_WISE):
                numbers = None
        partial = _MATCHES if first.partial == "all" and name in ("sum", "mean") else first.partial
        for tensor in pytree.tree_leaves(call.result):
            if isinstance(tensor, Tensor):
                axes = next((a for x in call.inputs if (a := _axes_like(x, tensor))), ())
                kept = numbers
                if against_zero:
                    kept = (tensor.detach().as_subclass(Tensor).double(),)
                self._set(tensor, partial, axes, kept)

    def _change(
        self, tensor: Any, name: str, axes: Axes, numbers: tuple[Tensor, ...] | None = None
    ) -> None:
        if type(tensor) is Tensor:
            self._set(tensor, name, axes, numbers)

    def _set(
        self, tensor: Tensor, name: str, axes: Axes, numbers: tuple[Tensor, ...] | None
    ) -> None:
        if type(tensor) is Tensor:
            self.mark(tensor, axes, name)
        if isinstance(tensor, SplitTensor):
            tensor.partial = name
            tensor.axes = axes
            tensor.numbers = numbers
            tensor.counted = tensor.detach().as_subclass(Tensor).clone()

    def numbers(self, tensor: SplitTensor, result: Any) -> Any:
        """Sums of this rank's rows as numbers that are known again where they divide rows."""
        if not tensor.partial:
            return result
        return pytree.tree_map(_known_again, result)

    def _note_read(self, result: Any) -> None:
        for number in pytree.tree_leaves(result):
            if isinstance(number, (int, float)) and len(self.read_numbers) < 100:
                self.read_numbers.add(float(number))


def with_rows_alone(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """As if nobody followed the batch, or a loss."""

    def plain(x: Any) -> Any:
        is_plain = isinstance(x, SplitTensor) and (x.partial == MEAN or is_of_batch(x))
        return x.as_subclass(Tensor) if is_plain else x

    found: tuple[tuple, dict[str, Any]] = pytree.tree_map(plain, (args, kwargs))
    return found


def is_changed(x: SplitTensor) -> bool:
    """Whether a function across rows made it, and nobody has written the ranks' sum into it since."""
    return bool(x.partial) and torch.equal(x, x.counted)


def _known_again(number: Any) -> Any:
    # only whether it is one is asked, not of how many ranks
    return number_of_part(number, 0, set()) if type(number) in (int, float) else number


def _axes_like(x: SplitTensor, tensor: Any) -> Axes:
    if isinstance(tensor, Tensor) and tensor.shape == x.shape:
        return x.axes
    return ()
