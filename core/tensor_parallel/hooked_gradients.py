"""What a program's backward hooks on modules of a model are given: gradients of columns, or of rows, of this rank."""

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from core.parallel_state.by_hand import is_foreign, split_axes
from core.parallel_state.by_hand.as_written import is_compiled
from core.parallel_state.by_hand.functions import program_level
from core.parallel_state.by_hand.split_functions import Finding
from core.parallel_state.collectives import Group
from core.parallel_state.layout import layout_of
from core.tensor_parallel.split_activations import SplitActivations

# of gradients of a module's input, and of its output: the dims that tensor ranks split, by how many dims there are
_Dims = dict[int, int]
_COLUMNS: _Dims = {3: 2, 4: 1}  # [s, b, h/tp], or heads [b, n/tp, s, d]
_ROWS: _Dims = {2: 0, 3: 0, 4: 0}
_WHOLE: _Dims = {}


class _Rows(SplitActivations):
    """Follows gradients of rows, and tells once of each kind."""

    def _tell(self, finding: Finding) -> None:
        if finding.kind in self._told:
            return
        self._told.add(finding.kind)
        where = "its result, " if finding.deferred else ""
        warnings.warn(
            f"{finding.name} in a backward hook sees ({where}{list(finding.shape)}) gradients of this rank's rows, "
            f"[s/tp, b, h], under sequence parallelism, 1/{self._group.size} of them: sums, means and norms are of "
            "them. core.tensor_parallel.gather_from_sequence_region(x, group, to_tensor_region=False): all rows",
            stacklevel=program_level(),
        )


class HookedGradients:
    """Follows what backward hooks on modules of a model are given, for one forward at a time.

    tell: called with the name of a module of whose gradients nobody knows which dims are split.
    """

    def __init__(self, group: Group, tell: Callable[[str], None]) -> None:
        self._columns = SplitActivations(group)
        self._rows = _Rows(group)
        self._tell = tell
        self._handles: list[Any] = []

    def attach(self, model: nn.Module, names: set[str], *, has_rows: bool) -> None:
        """Look at backward hooks in `model` until `detach`; of the next forward until its backward.

        names: modules with split parameters, or between two. has_rows: outside of them ranks have rows.
        """
        self.detach()
        hooked = [
            (name, part)
            for name, part in model.named_modules()
            if name and any(map(is_foreign, _hooks_of(part)))
        ]
        for name, part in hooked:
            dims = _dims_of(part, name in names, _ROWS if has_rows else _WHOLE)
            if dims == (_WHOLE, _WHOLE):
                continue
            if dims is None or is_compiled(model) or part._is_full_backward_hook is False:
                self._tell(name)
                continue
            into, out = dims
            before, after = partial(self._before, into, out), self._after
            self._handles += [
                part.register_full_backward_pre_hook(partial(self._before_pre, out), prepend=True),
                part.register_full_backward_pre_hook(self._after),
                part.register_full_backward_hook(before, prepend=True),
                part.register_full_backward_hook(after),
            ]

    def detach(self) -> None:
        """Take our hooks out; those of the last forward, which torch holds, stay until its backward."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before_pre(self, out: _Dims, part: nn.Module, gradients: Any) -> None:
        self._mark(gradients, out)

    def _before(self, into: _Dims, out: _Dims, part: nn.Module, inputs: Any, outputs: Any) -> None:
        self._mark(inputs, into)
        self._mark(outputs, out)

    def _after(self, part: nn.Module, *gradients: Any) -> None:
        self._columns.make_plain()
        self._rows.make_plain()

    def _mark(self, gradients: Any, dims: _Dims) -> None:
        follower = self._rows if dims is _ROWS else self._columns
        for x in gradients if isinstance(gradients, tuple) else (gradients,):
            if isinstance(x, Tensor) and x.dim() in dims:
                follower.mark(x, split_axes.of_dims(x.shape, {dims[x.dim()]}))


def _hooks_of(part: nn.Module) -> Iterator[Any]:
    yield from part._backward_hooks.values()
    yield from part._backward_pre_hooks.values()


def _dims_of(part: nn.Module, is_inside: bool, outside: _Dims) -> tuple[_Dims, _Dims] | None:
    """Of gradients of its input and of its output; None of a part with split weights that is no linear of ours."""
    if getattr(part, "split_output", None) is not None:
        return outside, _COLUMNS
    if getattr(part, "input_is_split", False):
        return _COLUMNS, outside
    if not is_inside or getattr(part, "is_whole_outside", False):
        return outside, outside
    if any("tp" in layout_of(p).split for p in part.parameters()):
        return None
    return _COLUMNS, _COLUMNS
