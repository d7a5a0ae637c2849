"""Weights, masks and numbers of columns which a program made of each tensor rank's columns or heads alike.

`logits + prior[: logits.shape[-1]]` and ALiBi's slopes of `q.shape[1]` heads count from 0 on every rank, though each
holds other columns. Numbers that differ from column to column are the same on all ranks for this reason, and hardly
ever for another: those that a program cut out of numbers for all columns differ.
"""

from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from core.parallel_state.by_hand import split_axes, split_functions
from core.parallel_state.by_hand.split_axes import Atom, Axes
from core.parallel_state.by_hand.split_tensor import SplitTensor
from core.parallel_state.collectives import Group, all_gather
from core.parallel_state.collectives.checks import fingerprint

# of one forward: how many are compared, each by two numbers
MAX_FACTORS = 8
# signs that alternate, gates that lie beside each other: such numbers are right on every rank
_PERIODS = (1, 2, 4)
# elements of a larger one, evenly spaced, of which its two numbers are made
_LOOKED_AT = 1 << 20
# forwards before which those of the forward before are compared
_COMPARED = (2, 3)
_ELEMENTWISE = """
    add iadd sub isub rsub mul imul multiply div idiv divide truediv itruediv true_divide floor_divide pow ipow where
    masked_fill masked_select maximum minimum fmax fmin max min addcmul addcdiv lerp clamp clamp_min clamp_max copy
    eq ne lt le gt ge and or xor logical_and logical_or logical_xor baddbmm fmod remainder atan2 copysign
    expand_as
"""
ELEMENTWISE = frozenset(_ELEMENTWISE.split())
# the dim, and the numbers of columns after it
_NUMBERED = ("index_fill", "index_copy", "index_add", "scatter", "scatter_add", "scatter_reduce")
_REMEDY = (
    "made of a size of this rank's (`torch.arange(x.shape[-1])`, slopes of `q.shape[1]` heads) they count from the "
    "first of each rank, and one seed draws them alike. Make them for all and cut this rank's: "
    "whole.chunk(place.tp, dim)[place.rank]; place.rank * n + torch.arange(n) are the true numbers of its n (place: "
    "Placement.of(ps), or model.place)"
)

# numbers of this rank, and whether they are other ones for other columns: bool []
_Found = tuple[Tensor, Tensor]


class ColumnFactors:
    """Notes the plain tensors by which followed columns or heads are multiplied, masked or chosen."""

    def __init__(self) -> None:
        self._forwards = 0
        self._noted: list[tuple[Tensor, str]] = []
        # begins what is said of what is noted now
        self.where = ""

    @torch.no_grad()
    def note(
        self,
        name: str,
        inputs: Sequence[SplitTensor],
        args: tuple,
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        """A function of followed columns has returned `result`."""
        name = name.rstrip("_")
        for values, varies in _found(name, inputs, args, kwargs, result):
            if len(self._noted) == MAX_FACTORS:
                return
            # infinities of a mask would make all products nan
            finite = values.double().nan_to_num(nan=0.0, posinf=1e3, neginf=-1e3)
            text = f"{self.where}{name} of {list(inputs[0].shape)}"
            self._noted.append((fingerprint(finite) * varies.to(finite.device), text))

    @torch.no_grad()
    def note_draw(self, name: str, mask: Tensor) -> None:
        """A mask that was drawn for a part."""
        if len(self._noted) < MAX_FACTORS:
            self._noted.append((fingerprint(_sampled(mask, None).double()), self.where + name))

    def compare(self, group: Group, device: torch.device) -> str:
        """Before a forward: the function whose numbers in the last one are the same on all ranks; else "".

        One all-gather of fixed size over `group` in the second and third call, whatever was noted; then nothing.
        """
        self._forwards += 1
        if self._forwards not in _COMPARED:
            return ""
        numbers = torch.zeros(MAX_FACTORS, 2, dtype=torch.float64, device=device)
        for place, (pair, _) in enumerate(self._noted):
            numbers[place] = pair
        gathered = all_gather(numbers[None], group).cpu()
        noted, self._noted = self._noted, []
        is_same = (gathered == gathered[:1]).all(2).all(0) & (gathered[0, :, 0] != 0)
        if not is_same.any():
            return ""
        return noted[int(is_same.nonzero()[0])][1]

    @property
    def is_done(self) -> bool:
        """Whether nothing is compared any more."""
        return self._forwards >= _COMPARED[-1]


def message_of(found: str, ranks: int) -> str:
    """What is said of a function that `ColumnFactors.compare` found."""
    return (
        f"{found}, this tensor rank's columns or heads, takes numbers that differ from one to the next and are the "
        f"same on all {ranks} ranks, which hold other columns and heads: {_REMEDY}"
    )


def takes_summed(name: str, x: SplitTensor, values: tuple) -> bool:
    """Whether columns are combined with a parameter that has an entry for each, and went through `sum_gradient`."""
    if name.rstrip("_") not in ELEMENTWISE | {"prelu"}:
        return False
    return any(
        isinstance(operand, Tensor)
        and type(operand.grad_fn).__name__ == "_SumGradientBackward"
        and any(True for _ in _along(operand.detach(), x.axes))
        for operand in pytree.tree_leaves(values)
    )


def _found(
    name: str, inputs: Sequence[SplitTensor], args: tuple, kwargs: dict[str, Any], result: Any
) -> Iterator[_Found]:
    x = args[0] if args else kwargs.get("input")
    if name == "scaled_dot_product_attention":
        query = args[0] if args else kwargs["query"]
        mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
        if isinstance(query, SplitTensor) and _is_plain(mask):
            # scores have keys where queries have their width
            yield from _along(mask, (*query.axes[:-1], ()))
    elif name in ("getitem", "setitem", "index_put") and isinstance(x, SplitTensor):
        index = args[1] if isinstance(args[1], tuple) or name != "index_put" else tuple(args[1])
        yield from _of_index(x, index)
        if name == "setitem" and _is_plain(args[2]):
            region = split_functions.indexed(x.axes, x.shape, index)
            if isinstance(region, tuple):
                yield from _along(args[2], region)
    elif name in _NUMBERED and isinstance(x, SplitTensor):
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        numbers = kwargs.get("index", args[2] if len(args) > 2 else None)
        if isinstance(dim, int) and _is_plain(numbers):
            yield from _of_numbers(numbers, x.axes, dim)
    elif kwargs.get("generator") is not None and isinstance(result, Tensor):
        yield result, torch.ones((), dtype=torch.bool)
    elif name in ELEMENTWISE:
        for operand in pytree.tree_leaves((args, kwargs)):
            # what an in-place function wrote is no longer its operand
            if _is_plain(operand) and operand is not result:
                found = next((f for x in inputs for f in _along(operand, x.axes)), None)
                if found is not None:
                    yield found


def _is_plain(x: Any) -> TypeGuard[Tensor]:
    # what has a gradient is a parameter's: those are compared after an update
    return type(x) is Tensor and not x.requires_grad and x.layout == torch.strided


def _along(operand: Tensor, axes: Axes) -> Iterator[_Found]:
    """`operand`, broadcast to a tensor of `axes`, where it has an entry for each of a split dim."""
    for dim in range(-1, -1 - min(operand.dim(), len(axes)), -1):
        found = _varies(operand, dim, axes[dim])
        if found is not None:
            yield found


def _varies(x: Tensor, dim: int, atoms: tuple[Atom, ...]) -> _Found | None:
    """`x`, and whether it differs from one to the next of what is split in `dim`; None: no entry for each."""
    split = [place for place, (_, is_split) in enumerate(atoms) if is_split]
    sizes = [size for size, _ in atoms]
    if len(split) != 1 or x.shape[dim] != torch.Size(sizes).numel():
        return None
    size = sizes[split[0]]
    if size == 1:
        return None
    # from the left: unflatten makes more dims
    dim %= x.dim()
    x = _sampled(x, dim)
    parts = x.unflatten(dim, sizes)
    dim += split[0]
    varies = torch.ones((), dtype=torch.bool, device=x.device)
    for period in _PERIODS:
        if period < size and size % period == 0:
            left = parts.narrow(dim, 0, size - period)
            varies &= (parts.narrow(dim, period, size - period) != left).any()
    return x, varies


def _sampled(x: Tensor, kept: int | None) -> Tensor:
    """Every n-th of other dims than `kept`: a mask of batches, heads, queries and keys may be the largest tensor."""
    while x.numel() > _LOOKED_AT:
        sizes = [0 if dim == kept else size for dim, size in enumerate(x.shape)]
        dim = sizes.index(max(sizes))
        if sizes[dim] < 2:
            break
        step = min(-(-x.numel() // _LOOKED_AT), sizes[dim])
        x = x[(slice(None),) * dim + (slice(None, None, step),)]
    return x


def _of_index(x: SplitTensor, index: Any) -> Iterator[_Found]:
    """Numbers of columns, or masks of them, in `x[index]`."""
    parts = [_as_tensor(part) for part in (index if isinstance(index, tuple) else (index,))]
    counts = [_dims_taken(part) for part in parts]
    dim = 0
    for part, count in zip(parts, counts, strict=True):
        if part is Ellipsis:
            count = x.dim() - sum(counts)
        elif _is_plain(part):
            if part.dtype in (torch.bool, torch.uint8):
                for place in range(part.dim()):
                    found = _varies(part, place, x.axes[dim + place])
                    if found is not None:
                        yield found
            else:
                yield from _of_numbers(part, x.axes, dim)
        dim += count


def _as_tensor(part: Any) -> Any:
    if isinstance(part, (list, tuple, range)) or hasattr(part, "__array_interface__"):
        return torch.as_tensor(list(part) if isinstance(part, range) else part)
    return part


def _dims_taken(part: Any) -> int:
    """How many dims of the indexed tensor one part of an index stands for; 0 of an ellipsis."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8):
        return part.dim()
    return 1


def _of_numbers(numbers: Tensor, axes: Axes, dim: int) -> Iterator[_Found]:
    """Numbers of columns of `dim`, from 1; not where all columns stay inside what is split, as halves of a head."""
    if numbers.numel() == 0 or not split_axes.is_split(axes, [dim]):
        return
    atoms = axes[dim]
    last = max(place for place, (_, is_split) in enumerate(atoms) if is_split)
    inner = torch.Size([size for size, _ in atoms[last + 1 :]]).numel()
    total = torch.Size([size for size, _ in atoms]).numel()
    chosen = torch.ones((), dtype=torch.bool, device=numbers.device)
    if numbers.shape == (total,):
        here = torch.arange(total, device=numbers.device)
        chosen = (numbers // inner != here // inner).any()
    yield _sampled(numbers, None) + 1, chosen
