"""What a program's own forward and its hooks are shown of weights and activations that tensor ranks split: parts.

Between forwards weights are listened to (`by_hand`). In a forward our layers read them all the time, and only what a
program itself computes of them is judged: a norm of `self.fc1.weight`, `weight.abs().max()` as a quantiser's scale.
Linears by hand, elementwise functions and what goes along whole rows or columns are right.
"""

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from core.parallel_state.by_hand import is_foreign, replaced_forward, split_axes
from core.parallel_state.by_hand.as_written import is_compiled
from core.parallel_state.by_hand.functions import program_level
from core.parallel_state.by_hand.split_functions import Finding
from core.parallel_state.by_hand.split_tensor import SplitParameter
from core.parallel_state.collectives import Group
from core.parallel_state.layout import layout_of
from core.tensor_parallel.split_activations import SplitActivations

_REMEDIES = {
    "cut": "rows and columns by number are this rank's",
    "draw": "ranks that are seeded alike draw the same for their parts: give each a generator of its own",
}
_NUMBERS = (
    "drawn or counted for this rank's sizes (`torch.randn(weight.shape)`) they are not the whole's. Make them for "
    "the whole, of layout_of(weight).shape, and cut this rank's: whole.chunk(place.tp, dim)[place.rank] (place: "
    "Placement.of(ps)); or draw from a generator of its own on each rank"
)
_WHOLE = (
    "core.tensor_parallel.full_tensor(weight) is the whole, with a gradient; a sum may go through "
    "reduce_from_tensor_region(sum, group), a largest value through all_reduce(x, op=MAX)"
)


def axes_of_parameter(parameter: Parameter) -> split_axes.Axes:
    """Which of its dims tensor ranks split."""
    return split_axes.of_dims(parameter.shape, {layout_of(parameter).split["tp"]})


class SplitWeights(SplitActivations):
    """Follows the split weights of modules during a forward, and tells once of each kind."""

    def __deepcopy__(self, memo: dict) -> "SplitWeights":
        return SplitWeights(self._group, compares_factors=self._compares_factors)

    def mark_in(self, *parts: nn.Module) -> None:
        """Until `release`; what the program computed of them is followed to where it is used, until `make_plain`."""
        for part in parts:
            for parameter in part.parameters():
                layout = layout_of(parameter)
                if "tp" in layout.split and tuple(parameter.shape) != layout.padded_shape():
                    self.mark_parameter(parameter, axes_of_parameter(parameter))

    def release(self) -> None:
        """After a forward weights are plain: they are listened to otherwise."""
        kept = []
        for reference in self._marked:
            tensor = reference()
            if type(tensor) is SplitParameter:
                tensor.__class__ = Parameter  # type: ignore[assignment]
            elif tensor is not None:
                kept.append(reference)
        self._marked = kept

    def _tell_of_factors(self, found: str) -> None:
        # the draw itself was told
        if "draw" in self._told:
            return
        warnings.warn(
            f"{found}, this tensor rank's part of a weight, takes numbers that differ from row to row or column to "
            f"column and are the same on all {self._group.size} ranks, which hold other parts: {_NUMBERS}",
            stacklevel=program_level(),
        )

    def _tell(self, finding: Finding) -> None:
        if finding.kind in self._told:
            return
        self._told.add(finding.kind)
        where = "its result, " if finding.deferred else ""
        warnings.warn(
            f"{finding.name} in a forward sees ({where}{list(finding.shape)}) this tensor rank's part of a weight, "
            f"1/{self._group.size} of it: {_REMEDIES.get(finding.kind, _WHOLE)}",
            stacklevel=program_level(),
        )


class SeenParts:
    """Follows columns between the linears of parts, and their split weights, in forwards that its owner chooses."""

    def __init__(self, group: Group) -> None:
        self._columns = SplitActivations(group, compares_factors=True)
        self._weights = SplitWeights(group, compares_factors=True)

    def begin(self, device: torch.device) -> None:
        """Before each forward, on all ranks: two small all-gathers in the second and in the third."""
        self._columns.compare_factors(device)
        self._weights.compare_factors(device)

    def attach(self, part: nn.Module) -> None:
        """Follow what is of this part in the coming forward."""
        self._columns.attach(part)
        self._weights.mark_in(part)

    def detach(self) -> None:
        """After that forward."""
        self._columns.detach()
        self._weights.make_plain()


class HookedParts:
    """Follows what a program's forward hooks are given in a model, for one forward at a time.

    tell: called with the name of a module of whose tensors nobody knows which dims are split.
    """

    def __init__(self, group: Group, tell: Callable[[str], None]) -> None:
        self._activations = SplitActivations(group, compares_factors=True)
        self._weights = SplitWeights(group)
        self._tell = tell
        self._handles: list[Any] = []

    def compare_factors(self, device: torch.device) -> None:
        """Before each forward in which hooks are looked at, on all ranks; two of them make a small all-gather."""
        self._activations.compare_factors(device)

    def attach(self, model: nn.Module, names: set[str]) -> None:
        """Look at hooks on the modules `names`, until `detach`."""
        self.detach()
        hooked = {
            name: part for name, part in model.named_modules() if name in names and of_program(part)
        }
        for name, part in hooked.items():
            before, after = self._marks(part)
            # what a forward in the place of its own makes of its own's output is not seen
            is_inside = replaced_forward(part) and after is not _nothing
            if before is None or is_inside or is_compiled(model):
                self._tell(name)
                continue
            self._weights.mark_in(part)
            self._handles.append(part.register_forward_pre_hook(before, prepend=True))
            self._handles.append(part.register_forward_hook(after, prepend=True))

    def detach(self) -> None:
        """Take our hooks out, and make weights plain again; activations belong to the program."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._weights.release()

    def _marks(self, part: nn.Module) -> tuple[Any, Any]:
        """Hooks that mark its input and its output; None of a part with split weights that is no linear of ours."""
        if getattr(part, "split_output", None) is not None:
            return _nothing, self._mark_output
        if getattr(part, "input_is_split", False):
            return self._mark_inputs, _nothing
        if getattr(part, "is_whole_outside", False):
            return _nothing, _nothing
        if any("tp" in layout_of(p).split for p in part.parameters()):
            return None, None
        return self._mark_inputs, self._mark_output

    def _mark_inputs(self, part: nn.Module, args: tuple) -> None:
        self._mark(args)

    def _mark_output(self, part: nn.Module, args: tuple, output: Any) -> None:
        if isinstance(getattr(part, "split_output", None), int) and part.weight is not None:
            self._activations.mark_output(part, output)
        else:
            self._mark(output)

    def _mark(self, values: Any) -> None:
        """[s, b, h/tp], or heads [b, n/tp, s, d]."""
        for x in values if isinstance(values, tuple) else (values,):
            if isinstance(x, Tensor) and x.dim() in (3, 4) and x.is_floating_point():
                self._activations.mark(x, split_axes.of_dims(x.shape, {1 if x.dim() == 4 else 2}))


def _nothing(part: nn.Module, *values: Any) -> None:
    """Whole on every rank."""


def of_program(part: nn.Module) -> str:
    """What of a program's is given its activations; "": nothing."""
    if any(map(is_foreign, (*part._forward_hooks.values(), *part._forward_pre_hooks.values()))):
        return "a forward hook"
    return "a forward in the place of its own" if replaced_forward(part) else ""


def modules_between_split(module: nn.Module) -> set[str]:
    """Names of modules that hold split parameters, and of those that stand beside two such, as an activation does."""
    named = [name for name, _ in module.named_modules()]
    holds = {
        name.rpartition(".")[0]
        for name, p in module.named_parameters()
        if "tp" in layout_of(p).split
    }
    beside = Counter(name.rpartition(".")[0] for name in holds)
    return holds | {name for name in named if beside[name.rpartition(".")[0]] > 1}
