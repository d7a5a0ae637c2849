"""Follows gradients of a context rank's rows that a program's hooks, or torch.autograd.grad, are given.

A gradient that is clipped, normalised or centred by a norm or a mean of this rank's rows is another than one
process's, and so is one that is limited by a number, or by its own size at each token, where gradients are averaged
over the ranks: of a loss that is a mean of a rank's rows it is as many times one process's as there are ranks. Other
elementwise changes are right, and so are logs.
"""

import warnings
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from core.context_parallel.rows.reads import READS
from core.parallel_state.by_hand import is_foreign, split_axes
from core.parallel_state.by_hand.functions import JOINS, program_level
from core.parallel_state.by_hand.listened_tensor import unmark
from core.parallel_state.by_hand.split_axes import Axes
from core.parallel_state.by_hand.split_functions import Finding, outcome_of
from core.parallel_state.by_hand.split_names import LINEAR, PRODUCTS, kind_of
from core.parallel_state.by_hand.split_tensor import Call, Follower, SplitTensor

# the gradient of a parameter, of a rank's rows
_OF_PARAMETER = "grad"
_ADDED = ("add", "iadd", "sub", "isub", "rsub")
_NORMS = ("norm", "vector_norm", "get_total_norm", "dot", "sum")
_PARTS_REMEDY = (
    "Average it before: torch.distributed.all_reduce(g, group=parallel_state.get_data_parallel_group("
    "with_context_parallel=True)), over that group's size where the loss is a mean"
)
_READS_REMEDY = (
    "A loss that is a mean of a rank's own rows gives them as many times one process's gradient as there are ranks; "
    "gather_from_context_region(g, ps, dim) of core.context_parallel has those of all rows"
)
_SCALES = ("mul", "imul", "rmul", "div", "truediv", "idiv", "itruediv")
_REMEDY = (
    "Sum squares over the ranks before: n = g.pow(2).sum(); torch.distributed.all_reduce(n, "
    "group=parallel_state.get_context_parallel_group()); g / n.sqrt()"
)
_LIMITS = frozenset(
    ["clamp", "clip", "clamp_min", "clamp_max", "hardtanh", "sign", "sgn", "tanh", "normalize"]
)
# of columns, the size of a token's gradient
_SIZES = frozenset(["norm", "vector_norm", "std", "var", "amax", "max", "mean", "sum"])
_SCALE_REMEDY = (
    "A loss that is a mean of a rank's own rows gives as many times one process's gradient as there are ranks: with "
    "n = parallel_state.get_context_parallel_world_size() it is n * f(g / n)"
)
# nodes of autograd that are looked at behind a hook's result
_MOST_NODES = 200


class GradientRows(Follower):
    """Of one model; tells once."""

    def __init__(self) -> None:
        super().__init__()
        self._told = False
        # whether the hook that runs has read a number of the rows
        self._has_read = False
        # whether what is made of them goes on as a gradient: in a hook
        self._goes_on = False
        # over how many ranks gradients of a mean over rows are averaged afterwards
        self.averaged_over = 1
        # after a backward a number of them is what a program wants to know
        self._tells_reads = False

    def listening(self, hook: Any, axes: Axes) -> Any:
        """The hook, whose gradient is followed while it runs."""

        def heard(gradient: Tensor) -> Any:
            self.begin((gradient,), axes)
            result = hook(gradient)
            self.end()
            return result

        return heard

    def begin(self, gradients: Any, axes: Axes) -> None:
        """A program's code is about to get them."""
        self._has_read = self._tells_reads = False
        self._goes_on = True
        for gradient in pytree.tree_leaves(gradients):
            if isinstance(gradient, Tensor) and gradient.dim() == len(axes) and not self._told:
                self.mark(gradient, axes)

    def end(self) -> None:
        """It has returned: what it made goes on as a gradient."""
        self._goes_on = False
        self.make_plain()

    def looked_at(self, gradient: Any, axes: Axes) -> None:
        """`hidden.grad` after a backward: saliency of its rows."""
        self.begin((gradient,), axes)
        self._tells_reads, self._goes_on = True, False

    def given_by_grad(self, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        """`torch.autograd.grad(loss, rows)` returned gradients, which stay followed."""
        inputs = args[1] if len(args) > 1 else kwargs.get("inputs")
        inputs = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
        for x, gradient in zip(inputs, result, strict=False):
            if isinstance(x, SplitTensor) and not x.partial:
                self.looked_at(gradient, x.axes)
            elif isinstance(x, nn.Parameter) and not self._told:
                self.mark(gradient, None, _OF_PARAMETER)

    def follow(self, call: Call) -> None:
        name, inputs, result = call.name, call.inputs, call.result
        if name == "all_reduce":
            unmark(inputs[0])  # it is of all rows now
            return
        if any(x.partial == _OF_PARAMETER for x in inputs):
            self._follow_parts(call)
            return
        if self._tells_reads and name in READS and not isinstance(result, Tensor):
            self._warn(
                f"{name} of gradients of rows which are this context rank's. {_READS_REMEDY}"
            )
            return
        sums = [x for x in inputs if x.partial]
        rows = [x for x in inputs if not x.partial]
        if sums and rows:
            self._tell(sums[0].partial, name)
        elif sums:
            self._has_read |= name in READS and not isinstance(result, Tensor)
            self._mark_all(result, sums[0].partial)
        elif (
            self._has_read
            and name in _SCALES
            and not any(_is_tensor_beside(x, rows) for x in call.args)
        ):
            self._tell("a number", name)
        else:
            self._look_at_scale(call, rows)
            self._follow_rows(call)

    def _look_at_scale(self, call: Call, rows: list[SplitTensor]) -> None:
        """Tell of limits, and of what is divided by its own size at each token, unless it was scaled."""
        results = [x for x in pytree.tree_leaves(call.result) if isinstance(x, Tensor)]
        numbers = [x for x in call.args if type(x) in (int, float)]
        is_averaged = call.name in _SCALES and self.averaged_over in numbers
        if is_averaged or any(hasattr(x, "is_averaged") for x in rows):
            for x in results:
                x.is_averaged = True  # type: ignore[attr-defined]
            return
        sizes = [x for x in rows if getattr(x, "is_size", False)]
        is_by_size = call.name in _SCALES and sizes and len(sizes) < len(rows)
        if self._goes_on and (call.name.strip("_") in _LIMITS or is_by_size):
            self.tell_of_scale(f"{call.name} of")
        for x in results if call.name in _SIZES or len(sizes) == len(rows) else ():
            x.is_size = True  # type: ignore[attr-defined]

    def tell_of_scale(self, what: str) -> None:
        """`what` is done to gradients of rows by their size."""
        if self.averaged_over > 1:
            self._warn(f"{what} gradients of rows which are this context rank's. {_SCALE_REMEDY}")

    def look_at_functions(self, x: Tensor) -> None:
        """Tell of a program's `torch.autograd.Function` behind `x` whose backward has limits or norms."""
        level: list[Any] = [x.grad_fn] if self.averaged_over > 1 else []
        seen: set[Any] = set()
        while level and len(seen) < _MOST_NODES:
            node = level.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            level += [following for following, _ in node.next_functions]
            own = getattr(node, "_forward_cls", None)
            code = getattr(getattr(own, "backward", None), "__code__", None)
            if own is not None and code is not None and is_foreign(own):
                for name in (_LIMITS | _SIZES - {"sum", "mean"}).intersection(code.co_names):
                    self.tell_of_scale(f"{name} in {own.__name__}.backward is taken of")

    def _follow_rows(self, call: Call) -> None:
        try:
            outcome = outcome_of(call.func, call.name, call.args, call.kwargs, call.result)
        except Exception:
            # who looks on must not end a right program: a call of a form unknown here is not followed
            return
        if isinstance(outcome, list):
            for tensor, axes in outcome:
                self.mark(tensor, axes)
        elif isinstance(outcome, (str, float)) or (
            isinstance(outcome, Finding) and outcome.kind == "reduction"
        ):
            self._mark_all(call.result, call.name)

    def _follow_parts(self, call: Call) -> None:
        """Gradients of parameters, of this rank's rows: told where they are more than scaled, or added."""
        name = call.name.removeprefix("foreach_").strip("_")
        parts = {id(x) for x in call.inputs}
        others = [
            x
            for x in pytree.tree_leaves((call.args, call.kwargs))
            if isinstance(x, Tensor) and id(x) not in parts
        ]
        is_squared = name in PRODUCTS and not others and len(call.inputs) > 1
        is_linear = name in LINEAR and not is_squared and name not in ("data", "sum")
        if name in _ADDED and others:
            self._tell_of_parts(name)
        elif is_linear or name in JOINS:
            self._mark_all(call.result, _OF_PARAMETER)
        elif kind_of(name) in ("element", "reduction", "vectors") or name in _NORMS or is_squared:
            self._tell_of_parts(name)

    def _tell_of_parts(self, name: str) -> None:
        self._warn(
            f"{name} of a parameter's gradient, which torch.autograd.grad made of this context rank's rows alone. "
            f"{_PARTS_REMEDY}"
        )

    def _warn(self, text: str) -> None:
        if not self._told:
            self._told = True
            warnings.warn(f"context parallelism: {text}", stacklevel=program_level())

    def _mark_all(self, result: Any, partial: str) -> None:
        for tensor in pytree.tree_leaves(result):
            self.mark(tensor, None, partial)

    def _tell(self, made: str, name: str) -> None:
        self._warn(
            f"{made} of a gradient's rows which are this context rank's changes them by {name}, not that of all "
            f"rows. {_REMEDY}"
        )


def _is_tensor_beside(x: Any, rows: list[SplitTensor]) -> bool:
    return isinstance(x, Tensor) and not any(x is row for row in rows)


def axes_of_rows(x: Tensor, rows_dim: int = 1) -> Axes:
    """Of a tensor whose dim `rows_dim` holds a context rank's rows."""
    axes = split_axes.plain(x.shape)
    return (*axes[:rows_dim], ((x.shape[rows_dim], True),), *axes[rows_dim + 1 :])
