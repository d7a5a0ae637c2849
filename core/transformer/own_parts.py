"""Follows rows and columns in parts of a user's own, where each rank has some of them.

Under context and sequence parallelism a part in a layer gets [s/cp, b, h] or [s/tp, b, h]. What works on each token
by itself is right there; a convolution, a sum, a position counted from the first row are of this rank's rows. Between
a column and a row linear it has [s, b, h/tp]: a norm or a softmax is of this rank's columns. So in a model's first
forwards what such parts are given, and what their column linears give, is of a class that sees which functions are
called on it.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from core.parallel_state import ParallelState
from core.parallel_state.by_hand import split_axes
from core.parallel_state.by_hand.as_written import is_compiled
from core.parallel_state.by_hand.functions import program_level
from core.parallel_state.by_hand.part_sizes import sizes_of_parts
from core.parallel_state.by_hand.split_functions import Finding
from core.parallel_state.by_hand.split_rows import ACROSS, SlicedRows, first_row, pieces_of
from core.parallel_state.by_hand.split_tensor import Call, SplitTensor
from core.tensor_parallel.along_sequence import looks_along
from core.tensor_parallel.looked_at import LookedAt
from core.tensor_parallel.seen_parts import SeenParts
from core.tensor_parallel.split_activations import SplitActivations
from core.transformer.sample_factors import SampleFactors

_MADE_LIKE = ("new_", "empty_like", "zeros_like", "ones_like", "full_like", "rand")
_WHOLE_OF_CONTEXT = (
    "core.context_parallel.gather_from_context_region(x, ps) before it gives whole sequences, "
    "ContextRows.of_state(ps).of(y, 0) after it this rank's rows"
)
_WHOLE_OF_TENSOR = (
    "core.tensor_parallel.gather_from_sequence_region(x, group) before it gives all rows, y.chunk(place.tp, 0)"
    "[place.rank] after it this rank's, or build the model with sequence_parallel=False"
)
_REMEDIES = {
    "reduction": "; a sum may go through torch.distributed._functional_collectives.all_reduce(x, 'sum', group)",
    "size": "; take the length of all, `x.shape[0] * {ranks}`, or a number of the module's",
    "draw": "; or give each rank a generator of its own: seeded alike they draw the same for other rows",
    "factors": "; or make it for whole sequences and cut it as y",
}


class OwnParts:
    """Hooks on the parts of a model that are not ours, in some of its forwards with gradients."""

    def __init__(self, ps: ParallelState, *, splits_sequence: bool) -> None:
        self._ps = ps
        self._splits_sequence = splits_sequence
        self._looked_at = LookedAt()
        # found before the first forward: whose rows are followed, and whose columns
        self._parts: dict[str, nn.Module] | None = None
        self._with_columns: list[nn.Module] = []
        self._rows: _Rows | None = None
        group = ps.group("tp")
        self._columns = SeenParts(group) if group is not None else None
        self._handles: list[Any] = []
        self._is_begun = False
        self._turns = 0
        self._is_done = ps.group("cp") is None and group is None

    def __deepcopy__(self, memo: dict) -> "OwnParts":
        return OwnParts(self._ps, splits_sequence=self._splits_sequence)

    def attach(self, model: nn.Module, s: int, *, is_whole: bool) -> None:
        """Before a forward over `s` rows, which tensor ranks may split once more; until `detach`.

        is_whole: these are whole sequences, whatever the context ranks. Small all-gathers in forwards 2 and 3.
        """
        if self._is_done or not torch.is_grad_enabled():
            return
        self.detach()
        if self._parts is None:
            self._find(model)
            assert self._parts is not None
        rows = None if is_whole else self._rows
        if self._is_done or (rows is None and self._columns is None):
            return
        device = next(model.parameters()).device
        if rows is not None:
            rows.begin(s, device)
            rows.compare_samples(device)
        if self._columns is not None:
            self._columns.begin(device)
        self._is_begun = True
        if not self._looked_at.begin(model):
            return
        columns = self._columns
        # what is split by rows and by columns has one follower at a time
        if rows is not None and columns is not None and self._ps.group("cp") is not None:
            self._turns += 1
            rows, columns = (rows, None) if self._turns % 2 else (None, columns)
        if rows is not None:
            for name, part in self._parts.items():
                self._handles += rows.hooks(name, part)
        if columns is not None:
            for part in self._with_columns:
                columns.attach(part)

    def _find(self, model: nn.Module) -> None:
        self._parts = {}
        if not is_compiled(model):
            self._parts = dict(_outermost_own(model, "", _knows_context))
            self._with_columns = [part for _, part in _outermost_own(model, "", lambda part: False)]
        self._is_done = not self._with_columns
        if self._ps.group("cp") is not None or self._splits_sequence:
            self._rows = _Rows(self._ps, splits_sequence=self._splits_sequence)

    def detach(self) -> None:
        """After that forward."""
        if self._is_begun:
            self._looked_at.end()
            self._is_begun = False
        for handle in self._handles:
            handle.remove()
        if self._handles and self._rows is not None:
            self._rows.make_plain()
        self._handles = []
        if self._columns is not None:
            self._columns.detach()


def _outermost_own(
    module: nn.Module, name: str, is_passed: Callable[[nn.Module], bool]
) -> Iterator[tuple[str, nn.Module]]:
    """Modules that are not ours, without what they hold; of one that is passed by, those in it."""
    for child_name, child in module.named_children():
        full_name = f"{name}.{child_name}" if name else child_name
        if _is_ours(child) or is_passed(child):
            yield from _outermost_own(child, full_name, is_passed)
        else:
            yield full_name, child


def _knows_context(part: nn.Module) -> bool:
    """Whether its class says that it treats a rank's rows as such."""
    return bool(vars(type(part)).get("knows_context"))


def _is_ours(module: nn.Module) -> bool:
    return type(module).__module__.startswith(("core.", "torch.nn.modules.container"))


class _Rows(SplitActivations):
    """What parts do with rows, told once for each kind."""

    hears_modules = True

    def __init__(self, ps: ParallelState, *, splits_sequence: bool) -> None:
        cp, tp = ps.group("cp"), ps.group("tp")
        group = cp if cp is not None else tp
        assert group is not None
        super().__init__(group, compares_factors=True)
        self._groups = [g for g in (cp, tp if splits_sequence else None) if g is not None]
        self._collectives: list[int] = []
        self._cp = ps.size("cp")
        self._tp = ps.size("tp") if splits_sequence else 1
        # how many rows a tensor may have, and how many ranks have as many of the others
        self._ranks_of: dict[int, int] = {}
        self._ranks = group.size
        # rows in reverse are this rank's, too: an early chunk, and the late one that mirrors it
        self._is_mirrored = self._tp == 1 and ps.config.ulysses_ranks == 1
        self._name = ""
        self._is_lost = False
        self._slices = SlicedRows()
        self._samples: SampleFactors | None = None
        self._draws_for_rows = False

    def begin(self, s: int, device: torch.device) -> None:
        """Before a forward over `s` rows of this context rank."""
        self.compare_factors(device)
        self._ranks_of = {s: self._cp} if self._cp > 1 else {}
        if self._tp > 1:
            self._ranks_of[s // self._tp] = self._cp * self._tp

    def compare_samples(self, device: torch.device) -> None:
        """Before each forward: told, once, of numbers for samples that differ between ranks of the same sequences."""
        if self._samples is None:
            self._samples = SampleFactors(device)
        if not self._samples.is_done and (found := self._samples.compare(self._groups)):
            warnings.warn(found, stacklevel=program_level())

    def hooks(self, name: str, part: nn.Module) -> list[Any]:
        """On a part of the user's own, and on parts of ours in it, whose outputs nobody followed."""

        def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            self._name = f"{name} ({type(part).__name__})"
            self._is_lost = self._draws_for_rows = False
            if self._samples is not None and not self._samples.is_done:
                self._samples.begin()
            self._slices = SlicedRows(self._ranks_of)
            self._collectives = self._count_collectives()
            if self._factors is not None:
                self._factors.where = f"{self._name}: "
            self._mark_rows((args, kwargs))

        def inside(module: nn.Module, args: tuple, output: Any) -> None:
            self._mark_rows(output)

        def after(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            self._finish(module, args, kwargs, output)

        ours = [child for child in part.modules() if child is not part and _is_ours(child)]
        return [
            part.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            *(child.register_forward_hook(inside, prepend=True) for child in ours),
            part.register_forward_hook(after, prepend=True, with_kwargs=True),
        ]

    def _mark_rows(self, values: Any) -> None:
        for x in pytree.tree_leaves(values):
            if type(x) is not Tensor or not x.is_floating_point():
                continue
            # heads, as norms of queries and keys get them, have rows in dim 2
            dim = 2 if x.dim() == 4 else 0
            if x.dim() in (3, 4) and x.shape[dim] in self._ranks_of:
                self._ranks = self._ranks_of[x.shape[dim]]
                self.mark(x, split_axes.of_dims(x.shape, {dim}))

    def _finish(self, part: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        shifted = [x for x in pytree.tree_leaves(output) if isinstance(x, SplitTensor)]
        for x in shifted:
            if x.partial:
                self._tell(Finding("reduction", x.partial, tuple(x.shape), deferred=True))
            elif first_row(x):
                self._tell(Finding("cut", "a slice", tuple(x.shape)))
        if not self._slices.are_chunks():
            self._tell(Finding("cut", "a slice", tuple(shifted[0].shape) if shifted else ()))
        if self._samples is not None and not self._samples.is_done:
            self._samples.end(draws_for_rows=self._draws_for_rows or self._is_lost)
        is_lost = self._is_lost or not shifted
        self.make_plain()
        if is_lost and not self._told and not self._may_know(part):
            if looks_along(part, args, kwargs, output):
                self._tell(Finding("reduction", "it", tuple(output.shape)))
            # our hooks on parts of ours in it
            self.make_plain()

    def _may_know(self, part: nn.Module) -> bool:
        """Whether rows met in it on purpose: in attention of ours, or in messages that are none of our linears'."""
        inner = [child for child in part.modules() if child is not part]
        if any(map(_knows_context, inner)):
            return True
        return not any(map(_is_ours, inner)) and self._collectives != self._count_collectives()

    def _count_collectives(self) -> list[int]:
        groups: list[Any] = [group.process_group for group in self._groups]
        return [group._get_sequence_number_for_group() for group in groups]

    def sizes(self, args: tuple, kwargs: dict[str, Any], result: Any) -> Any:
        if "size" in self._told:
            return result
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        return sizes_of_parts(result, args[0].axes, dim, self._ranks, self._as_floats)

    def check(self, name: str, args: tuple, kwargs: dict[str, Any]) -> None:
        """Labels of rows are in bounds."""

    def follow(self, call: Call) -> None:
        name, inputs, result = call.name, call.inputs, call.result
        if name.startswith(_MADE_LIKE) or name in ("register_hook", "requires_grad", "backward"):
            return
        rows = [x for x in inputs if not x.partial]
        if rows and self._samples is not None and not self._samples.is_done:
            self._samples.note(self._name, name, rows, (call.args, call.kwargs))
        if rows == inputs:
            pieces = None
            try:
                pieces = pieces_of(name, call.args, call.kwargs, result, self._slices)
            except Exception:
                # who looks on must not end a right program: a call of a form unknown here is not followed
                self._is_lost = True
            if pieces == ACROSS or (pieces is None and len({first_row(x) for x in rows}) > 1):
                self._tell(Finding("cut", name, tuple(rows[0].shape)))
            if pieces == ACROSS:
                return
            if isinstance(pieces, list):
                for piece, axes, first in pieces:
                    self._mark_piece(piece, axes, first)
                return
            if name == "flip" and self._is_mirrored:
                self._mark_piece(result, rows[0].axes, first_row(rows[0]))
                return
            if "dropout" in name and isinstance(result, Tensor):
                self._note_draw(name, rows[0], result)
                return
        # parameters by position are compared, too
        args, kwargs = pytree.tree_map(_detached, (call.args, call.kwargs))
        super().follow(replace(call, args=args, kwargs=kwargs))
        found = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        for x in found:
            if isinstance(x, SplitTensor):
                x.first_row = first_row(rows[0]) if rows else 0  # type: ignore[attr-defined]
            elif x.is_floating_point() and rows == inputs:
                self._is_lost = True

    def _mark_piece(self, piece: Tensor, axes: split_axes.Axes, first: int) -> None:
        self.mark(piece, axes)
        if isinstance(piece, SplitTensor):
            piece.first_row = first  # type: ignore[attr-defined]

    def _note_draw(self, name: str, rows: SplitTensor, result: Tensor) -> None:
        """Which elements are dropped: other ones than another rank's are as good as one process's."""
        self._draws_for_rows = True
        if self._factors is not None and result is not rows:
            self._factors.note_draw(f"{name} of {list(rows.shape)}", result == 0)
        self._mark_piece(result, rows.axes, first_row(rows))

    def _tell_of_heads(self, name: str, args: tuple, result: Any) -> None:
        """Counts of heads are right on rows."""

    def _tell_of_factors(self, found: str) -> None:
        self._name, found = found.split(": ", 1)
        self._say(
            f"{found} takes numbers that differ from row to row and are the same on all {self._group.size} ranks, "
            "which hold other rows: made of a size of this rank's they count from its first row, and one seed draws "
            "them alike",
            "factors",
        )

    def _tell(self, finding: Finding) -> None:
        if finding.kind in self._told:
            return
        self._told.add(finding.kind)
        where = "its result, " if finding.deferred else ""
        self._say(f"{finding.name} of ({where}{list(finding.shape)})", finding.kind)

    def _say(self, what: str, kind: str) -> None:
        remedies = [_WHOLE_OF_TENSOR] if self._tp > 1 else []
        remedies += [_WHOLE_OF_CONTEXT] if self._cp > 1 else []
        also = _REMEDIES.get(kind, "").format(ranks=self._ranks)
        kinds = [text for text, n in (("context", self._cp), ("tensor", self._tp)) if n > 1]
        warnings.warn(
            f"{self._name} looks along the sequence, of which this {' and '.join(kinds)} rank has 1/{self._ranks}: "
            f"{what}. {'; then '.join(remedies)}{also}. If it is right on rows, knows_context = True on its class "
            "says so",
            stacklevel=program_level(),
        )


def _detached(x: Any) -> Any:
    if isinstance(x, Tensor) and not isinstance(x, SplitTensor) and x.requires_grad:
        return x.detach().as_subclass(Tensor)
    return x
