"""Notices what a program does to an activation between a column linear and a row linear as if it were whole.

Each tensor rank has its columns there. What is elementwise, or works on each head by itself, is right on them; a
norm, a softmax, a sum or a dropout mask over the width, and halves of a fused matrix that was not given as (2, f),
are of this rank's part. So in a module's first forwards the outputs of its column linears are of a class that sees
which functions are called on them, and follows which dims are split (`split_axes`).
"""

import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from core.parallel_state.by_hand import split_axes, split_functions, split_names
from core.parallel_state.by_hand.as_written import AsWritten
from core.parallel_state.by_hand.functions import program_level
from core.parallel_state.by_hand.listened_tensor import unmark
from core.parallel_state.by_hand.part_sizes import scales_by_a_part, sizes_of_parts
from core.parallel_state.by_hand.split_axes import Axes
from core.parallel_state.by_hand.split_flex import counts_from_zero
from core.parallel_state.by_hand.split_functions import Finding
from core.parallel_state.by_hand.split_tensor import Call, Follower, SplitTensor, is_turn
from core.parallel_state.collectives import Group
from core.tensor_parallel.column_factors import ColumnFactors, message_of, takes_summed
from core.tensor_parallel.head_counts import whole_heads

_REMEDIES = {
    "reduction": (
        "core.tensor_parallel.gather_from_tensor_region(x, group) before it, and scatter_to_tensor_region after it, "
        "give all columns; a sum may go through reduce_from_tensor_region(sum, group)"
    ),
    "cut": (
        "a rank's block of a fused matrix is not the same block of each part. Give ColumnParallelLinear the parts as "
        "dims: (2, f) with split_dim=1 for gate and up, (3, h) for q, k and v"
    ),
    "draw": (
        "ranks that are seeded alike draw the same mask for other columns. core.tensor_parallel."
        "dropout_in_tensor_region(x, p, group) draws the mask of all columns"
    ),
    "exit": "core.tensor_parallel.gather_from_tensor_region(x, group) gives all columns",
    "order": (
        "RowParallelLinear takes one block of the input's columns per rank, and is given a block of each of several "
        "parts (cat, or (2, f) as it is): its rows would belong to other columns than on one rank. Add the parts' "
        "outputs of a RowParallelLinear each"
    ),
    "size": (
        "the size of a rank's part is another number than on one rank. Take that of all, `y.shape[-1] * place.tp`, "
        "or a number of the module's"
    ),
    "summed": (
        "a parameter with an entry for each of this rank's columns is another one on each rank, and `sum_gradient` "
        "adds their gradients as if it were one. Leave that out, and say what it is: core.parallel_state.layout."
        'set_layout(parameter, Layout((n,), {"tp": 0})), n of all ranks'
    ),
    "again": "ColumnParallelLinear takes the whole x, the same on every rank: a RowParallelLinear comes first",
}


# of a rank's largest value, what may be done before the largest of all ranks is taken
_EXTREMES = ("max", "min", "amax", "amin")
# `y.max(-1).indices` are numbers of this rank's columns: right once their first is added
_INDICES = "max(dim).indices"
_OFFSET = ("add", "iadd", "radd", "sub", "isub")
_MONOTONE = ("clamp", "clamp_min", "clamp_max", "sqrt", "maximum")


class SplitActivations(Follower):
    """Marks what column linears over `group` return, and tells, once for each kind, what is wrong on a part.

    message: instead of what is said of columns between linears. compares_factors: what columns are multiplied by
        is noted, and whoever owns this calls `compare_factors` before each forward, on all ranks.
    """

    def __init__(self, group: Group, *, message: str = "", compares_factors: bool = False) -> None:
        super().__init__()
        self._group = group
        self._message = message
        self._compares_factors = compares_factors
        self._factors = ColumnFactors() if compares_factors else None
        self._told: set[str] = set()
        self._calls = 0
        self._as_written = AsWritten()
        # sizes of parts that C functions took
        self._as_floats: set[int] = set()
        self._hooks: list[Any] = []
        # of parts that have backward hooks, by id: of each input its axes and shape, where it is followed
        self._axes_between: dict[int, list[tuple[Axes, torch.Size] | None]] = {}

    def __deepcopy__(self, memo: dict) -> "SplitActivations":
        return SplitActivations(
            self._group, message=self._message, compares_factors=self._compares_factors
        )

    def mark_columns(self, output: Tensor, *, at_once: bool) -> bool:
        """Follow a tensor whose last dim is split, in some calls, or tell now; whether another is wanted.

        Three on every rank, whatever it was told: the second and third compare.
        """
        if at_once:
            self._tell(Finding("exit", "compiled code", tuple(output.shape)))
            return False
        self._calls += 1
        self.compare_factors(output.device)
        self._as_written.end()
        if is_turn(self._calls) and not self._told:
            self._as_written.begin(self._calls, output.device)
            self.forget_dead()
            if output.requires_grad:
                output.register_hook(lambda gradient: self._as_written.end())
            self.mark(output, split_axes.axes_of_columns(output.shape, output.shape[-1:], 0))
        return self._calls < 3 or not self._told

    def compare_factors(self, device: torch.device) -> None:
        """Before each forward, on all ranks: tell, once, of numbers that are the same on ranks with other columns.

        Two of them make one small all-gather each.
        """
        if self._factors is None:
            return
        found = self._factors.compare(self._group, device)
        if self._factors.is_done:
            self._factors = None
        if found and "factors" not in self._told and not (self._told and self._message):
            self._told.add("factors")
            self._tell_of_factors(found)

    def _tell_of_factors(self, found: str) -> None:
        text = message_of(found, self._group.size)
        warnings.warn(f"{text}. {self._message}".removesuffix(". "), stacklevel=program_level())

    @property
    def num_hooks(self) -> int:
        """How many of its own are on modules now, in registries of torch's."""
        return len(self._hooks)

    def attach(self, module: nn.Module) -> None:
        """Look at the linears in `module`."""
        for part in module.modules():
            if getattr(part, "split_output", None) is not None:
                self._hooks.append(part.register_forward_pre_hook(self._before_column))
                # before the program's
                self._hooks.append(part.register_forward_hook(self._after_column, prepend=True))
            elif getattr(part, "input_is_split", False):
                self._hooks.append(part.register_forward_pre_hook(self._before_row))
            # only where the program has some: torch puts a view around what such a module returns
            if part._is_full_backward_hook is False:
                continue
            before, after = self._before_backward_hooks, self._after_backward_hooks
            if part._backward_hooks or part._backward_pre_hooks:
                self._hooks.append(part.register_forward_pre_hook(self._note_axes))
            if part._backward_hooks:
                self._hooks.append(part.register_full_backward_hook(before, prepend=True))
                self._hooks.append(part.register_full_backward_hook(after))
            if part._backward_pre_hooks:
                before_pre = self._before_backward_pre_hooks
                self._hooks.append(part.register_full_backward_pre_hook(before_pre, prepend=True))
                self._hooks.append(part.register_full_backward_pre_hook(after))

    def detach(self) -> None:
        """Take the hooks out, and make what was marked plain again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.make_plain()

    def _before_column(self, module: nn.Module, args: tuple) -> None:
        x = args[0] if args else None
        # rows, under sequence parallelism, it gathers
        if isinstance(x, SplitTensor) and split_axes.is_split(x.axes, [len(x.axes) - 1]):
            self._tell(Finding("again", "a linear", tuple(x.shape)))

    def _after_column(self, module: nn.Module, args: tuple, output: Any) -> None:
        if (
            torch.compiler.is_compiling()
            or torch.jit.is_tracing()
            or torch._C._are_functorch_transforms_active()
        ):
            return
        self.mark_output(module, output)

    def mark_output(self, module: nn.Module, output: Any) -> None:
        """Follow what a column linear returns."""
        weight = module.weight
        split_dim = module.split_output
        if isinstance(output, Tensor) and isinstance(weight, Tensor) and isinstance(split_dim, int):
            self.mark(
                output, split_axes.axes_of_columns(output.shape, weight.shape[:-1], split_dim)
            )

    def _before_row(self, module: nn.Module, args: tuple) -> None:
        x = args[0] if args else None
        if isinstance(x, SplitTensor) and not x.partial and not split_axes.are_blocks(x.axes):
            self._tell(Finding("order", "a linear", tuple(x.shape)))

    def attends(self, query: SplitTensor, functions: Mapping[str, Callable[..., Any]]) -> None:
        """Told where scores differ by the number of a head, which is counted on each rank from 0."""
        if (
            len(query.axes) != 4
            or "heads" in self._told
            or not split_axes.is_split(query.axes[1:2])
        ):
            return
        for name, function in functions.items():
            if counts_from_zero(name, function, query, self._group):
                self._told.add("heads")
                warnings.warn(
                    f"flex_attention's {name} is given the numbers 0 to {query.shape[1] - 1} of this tensor rank's "
                    "heads and makes other scores of other heads: count those of the ranks before as well, "
                    f"h + parallel_state.get_tensor_model_parallel_rank() * {query.shape[1]}",
                    stacklevel=program_level(),
                )

    def listening(self, hook: Any, axes: Axes) -> Any:
        """`hook` on the gradient of what is split as `axes` says: it is given a gradient that is followed."""

        def hear(gradient: Any) -> Any:
            self.mark(gradient, axes)
            try:
                return hook(gradient)
            finally:
                self.make_plain()

        return hear

    def _note_axes(self, module: nn.Module, args: tuple) -> None:
        """How a part between linears is given what is followed: so are its gradients."""
        followed = [(x.axes, x.shape) if isinstance(x, SplitTensor) else None for x in args]
        if any(followed):
            self._axes_between[id(module)] = followed

    def _before_backward_hooks(self, module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        if getattr(module, "input_is_split", False):
            gradient = grad_input[0]
            if isinstance(gradient, Tensor):
                self.mark(
                    gradient, split_axes.axes_of_columns(gradient.shape, gradient.shape[-1:], 0)
                )
            return
        followed = self._axes_between.get(id(module), [])
        for gradient, known in zip(grad_input, followed, strict=False):
            if known is not None and isinstance(gradient, Tensor):
                self.mark(gradient, known[0])
        self._before_backward_pre_hooks(module, grad_output)

    def _before_backward_pre_hooks(self, module: nn.Module, grad_output: Any) -> None:
        if getattr(module, "split_output", None) is not None:
            self._after_column(module, (), grad_output[0])
            return
        for gradient in grad_output:
            # of what returns another shape nothing is known
            for known in filter(None, self._axes_between.get(id(module), [])):
                if isinstance(gradient, Tensor) and gradient.shape == known[1]:
                    self.mark(gradient, known[0])

    def _after_backward_hooks(self, module: nn.Module, *gradients: Any) -> None:
        self.make_plain()

    def check(self, name: str, args: tuple, kwargs: dict[str, Any]) -> None:
        """Raise ValueError: a loss over classes of which this rank has a part, whose labels are "out of bounds"."""
        if name not in ("cross_entropy", "nll_loss"):
            return
        x = args[0] if args else kwargs.get("input")
        if not isinstance(x, SplitTensor) or x.partial:
            return
        dim = 1 if x.dim() > 1 else 0
        if split_axes.is_split(x.axes, [dim]):
            raise ValueError(
                f"{name} of {list(x.shape)}, whose dim {dim} is this tensor rank's {x.shape[dim]} of "
                f"{x.shape[dim] * self._group.size} classes: use core.tensor_parallel.vocab_parallel_cross_entropy("
                "logits, labels, group), ColumnParallelLinear(..., gather_output=True), or gather_from_tensor_region("
                "logits, group) before it (GPTModel: gather_logits)"
            )

    def sizes(self, args: tuple, kwargs: dict[str, Any], result: Any) -> Any:
        """The same; those of split dims are numbers that are known again."""
        if self._message or "size" in self._told:
            return result
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        return sizes_of_parts(result, args[0].axes, dim, self._group.size, self._as_floats)

    def follow(self, call: Call) -> None:
        """After `func`: tell what it did wrong, mark what it returned."""
        if any(x.partial for x in call.inputs):
            self._follow_sum(call)
            return
        name, inputs, result = call.name, call.inputs, call.result
        args, kwargs = call.args, call.kwargs
        if self._factors is not None:
            # who looks on must not end a right program: a call of a form unknown here is not noted
            with suppress(Exception):
                self._factors.note(name, inputs, args, kwargs, result)
        if scales_by_a_part(name, (args, kwargs), self._as_floats):
            self._tell(Finding("size", name, tuple(inputs[0].shape)))
        if not self._message and takes_summed(name, inputs[0], (args, kwargs)):
            self._tell(Finding("summed", name, tuple(inputs[0].shape)))
        try:
            outcome = split_functions.outcome_of(call.func, name, args, kwargs, result)
        except Exception:
            # nor followed
            return
        if isinstance(outcome, Finding):
            self._tell(outcome)
        elif isinstance(outcome, str):
            self.mark(result if isinstance(result, Tensor) else result[0], None, outcome)
            if outcome in _EXTREMES and isinstance(result, tuple):
                self.mark(result[1], None, _INDICES)
        elif outcome is not None:
            for tensor, axes in outcome:
                self.mark(tensor, axes)
            self._tell_of_heads(name, args, result)

    def _tell_of_heads(self, name: str, args: tuple, result: Any) -> None:
        size = self._group.size
        found = whole_heads(name, args, result, size)
        if found is None or "heads" in self._told or self._message:
            return
        self._told.add("heads")
        count, label = found
        what = "groups" if name == "group_norm" else "heads"
        if label:
            told = f"{count} {what} ({label})"
            view = "" if name == "group_norm" else "view(..., -1, head_size), or "
            remedy = (
                f"Write {view}{label} // {size}; if {count} is this rank's count, say so in "
                f"its name (local_{label})"
            )
        else:
            told = f"{count} {what}, a number in the program's text,"
            remedy = f"Write {count} // place.tp; if {count} is this rank's count, give it a name"
        warnings.warn(
            f"{name} of {list(args[0].shape)}, this tensor rank's columns, as {list(result.shape)}: {told} on each "
            f"of {size} ranks are {count * size} in all, each 1/{size} as wide as on one rank. {remedy}",
            stacklevel=program_level(),
        )

    def _follow_sum(self, call: Call) -> None:
        """A rank's part of a sum: right if it is summed over the ranks next, scaled or added to another before."""
        name, result = call.name, call.result
        first = next(x for x in call.inputs if x.partial)
        if (
            "reduce" in name
            or "gather" in name
            or name in ("broadcast", "wait", "grad", "requires_grad", "shape")
        ):
            if name == "all_reduce":
                unmark(first)  # it is whole now
            return
        if first.partial == _INDICES and name in _OFFSET:
            unmark(first)
            return
        is_guard = first.partial in ("any", "all")
        if is_guard and name in ("bool", "invert", "logical_not", "or", "and"):
            self.mark(result, None, first.partial)
            return
        if not isinstance(result, Tensor):
            is_read = name in (
                "item",
                "tolist",
                "numpy",
                "array",
                "float",
                "backward",
                "format",
                "repr",
                "bool",
            )
            if is_read:
                self._tell(Finding("reduction", first.partial, tuple(first.shape), deferred=True))
            return
        # a sum of parts plus something whole would count the whole once per rank; columns by it are not yet right
        sum_ids = {id(x) for x in call.inputs if x.partial}
        tensors = [x for x in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(x, Tensor)]
        others = [x for x in tensors if id(x) not in sum_ids]
        # parts of two sums
        is_product = name in split_names.PRODUCTS and len(tensors) > 1
        is_bounded = first.partial in _EXTREMES and name in _MONOTONE and not others
        if not is_bounded and (others or is_product or name not in split_names.LINEAR):
            self._tell(Finding("reduction", first.partial, tuple(first.shape), deferred=True))
        else:
            self.mark(result, None, first.partial)

    def _tell(self, finding: Finding) -> None:
        if finding.kind in self._told:
            return
        # once per kind: an activation goes through the same lines in every layer
        self._told.add(finding.kind)
        if self._message:
            if len(self._told) == 1:
                warnings.warn(self._message, stacklevel=program_level())
            return
        where = "its result, " if finding.deferred else ""
        warnings.warn(
            f"{finding.name} between ColumnParallelLinear and RowParallelLinear sees ({where}{list(finding.shape)}) "
            f"this tensor rank's columns, 1/{self._group.size} of them: {_REMEDIES[finding.kind]}",
            stacklevel=program_level(),
        )
