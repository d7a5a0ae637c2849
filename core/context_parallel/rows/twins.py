"""What a tensor of a context rank's rows is on a copy of them, and on whole sequences."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.parallel_state.by_hand.part_sizes import PartNumber, number_of_part
from core.parallel_state.by_hand.split_tensor import SplitTensor

# what twins were made of: the batch alone, hidden states of a training's hook, an evaluation's output, a training's
BATCH, OF_HOOK, EVALUATION, TRAINING = range(4)


@dataclass(slots=True)
class Twins:
    """What a tensor is of a copy of this rank's rows, and of whole sequences; dim: of rows, where it is known.

    unscaled: of whole sequences, without the numbers of ranks that multiply it. source: BATCH and so on. made_by: the
    name of the function.
    """

    own: Tensor
    whole: Tensor
    dim: int | None = None
    unscaled: Any = None
    source: int = TRAINING
    made_by: str = ""

    def __post_init__(self) -> None:
        if self.unscaled is None:
            self.unscaled = self.whole


def known_size(size: int, whole: int) -> int:
    """`size`, as a number that knows what it is of whole sequences."""
    if size == whole:
        return size
    known: Any = size if isinstance(size, PartNumber) else number_of_part(size, 0, set())
    known.whole = whole
    return known


def has_twins(x: Any) -> bool:
    """Whether its functions were repeated so far."""
    return isinstance(x, SplitTensor) and isinstance(getattr(x, "twins", None), Twins)


def misfit_of(x: Any) -> str:
    """The function by which it came to be of no whole sequences; "" where none did."""
    twins = getattr(x, "twins", None) if isinstance(x, SplitTensor) else None
    return twins if isinstance(twins, str) else ""


def index_of_all(x: Any, index: Any) -> Any:
    """An index as it is of whole sequences: `x[:, :n]`, where x has n rows here, takes all of them."""
    indices = index if isinstance(index, tuple) else (index,)
    if any(i is None or i is Ellipsis or isinstance(i, Tensor) for i in indices):
        return index
    sizes = zip(x.twins.own.shape, x.twins.whole.shape, strict=True)
    found = tuple(
        slice(i.start, None, i.step)
        if isinstance(i, slice) and own != whole and type(i.stop) is int and i.stop >= own
        else i
        for i, (own, whole) in zip(indices, sizes, strict=False)
    )
    return found if isinstance(index, tuple) else found[0]


def _tolerance(x: Tensor) -> float:
    """Of sums in another order."""
    return 1e-2 if x.dtype in (torch.float16, torch.bfloat16) else 1e-3


def differ(own: Tensor, rows: Tensor) -> bool:
    """Whether they do by more than sums in another order; what is not finite does not."""
    if not own.is_floating_point():
        return not torch.equal(own, rows)
    own, rows = own.double(), rows.double()
    off = torch.linalg.vector_norm(own - rows)
    return bool(off > _tolerance(own) * torch.linalg.vector_norm(rows)) and bool(off.isfinite())


def are_proportional(own: Tensor, rows: Tensor, factors: tuple[float, ...]) -> bool:
    """Whether one of them is the other, times one of `factors`; so are what is not finite."""
    tolerance = _tolerance(own)
    own, rows = own.double(), rows.double()
    size = torch.linalg.vector_norm(own)
    offs = torch.stack([torch.linalg.vector_norm(own - rows * factor) for factor in factors])
    larger = torch.maximum(size, torch.linalg.vector_norm(rows))
    return not bool((offs > tolerance * larger).all()) or not bool(offs.isfinite().all())
