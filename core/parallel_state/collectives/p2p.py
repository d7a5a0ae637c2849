"""Point to point: one message to one neighbour, shape and dtype checked on both sides.

gloo accepts a message of another size or dtype silently, and loses one whose handle is dropped: keep what
`isend` returns until it is waited for, and do not write to a tensor under way.
"""

from typing import Any

import torch
from torch import Tensor

from core.parallel_state.collectives.groups import Group

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
MAX_DIMS = 8


class Received:
    """A message on its way; `wait()` returns its tensor."""

    def __init__(self, tensor: Tensor, work: Any, group: Group) -> None:
        self._tensor, self._work, self._group = tensor, work, group

    def wait(self) -> Tensor:
        """Block until the message is here (bounded by the group's timeout)."""
        group = self._group
        self._work.wait(group.timeout)
        return self._tensor


class Sent:
    """A message under way; holds its tensor until `wait()`."""

    def __init__(self, tensor: Tensor, works: list[Any], group: Group, extra: Tensor | None = None) -> None:
        self._held: tuple[Tensor | None, ...] = (tensor, extra)
        self._works, self._group, self._version = works, group, version_of(tensor)

    def wait(self, *, arrived: bool = False) -> None:
        """Block until the receiver has it, then let the tensor go. `arrived`: it is known to have it.

        Raises RuntimeError: somebody wrote into the tensor meanwhile; what arrived is anyone's guess.
        """
        held, group = self._held[0] if self._held else None, self._group
        if not arrived or (held is not None and held.device.type != "cpu"):  # elsewhere a stream waits, not we
            for work in self._works:
                work.wait(group.timeout)
        if held is not None and version_of(held) != self._version:
            raise RuntimeError(
                f"a tensor of shape {list(held.shape)} was written while it was being sent; clone what is "
                "changed in place before it is handed over"
            )
        self._held = ()


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written in place."""
    return 0 if tensor.is_inference() else tensor._version


def _header(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if len(shape) > MAX_DIMS or dtype not in DTYPES:
        raise ValueError(f"cannot send shape {shape} of {dtype}: at most {MAX_DIMS} dims of {DTYPES}")
    return torch.tensor([DTYPES.index(dtype), len(shape), *shape, *[0] * (MAX_DIMS - len(shape))])


def isend(tensor: Tensor, peer: int, group: Group, *, tag: int = 0, header: bool = True) -> Sent:
    """Start sending to the group's rank `peer`. With `header` the receiver checks shape and dtype first."""
    tensor = tensor.contiguous()
    head = _header(tuple(tensor.shape), tensor.dtype).to(tensor.device) if header else None
    works = [group.process_group.send([t], peer, tag) for t in (head, tensor) if t is not None]
    group.traffic.add(tensor.nbytes, 0.0)
    return Sent(tensor, works, group, head)


def irecv(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    peer: int,
    group: Group,
    *,
    device: torch.device | None = None,
    tag: int = 0,
    header: bool = True,
) -> Received:
    """Start receiving what the group's rank `peer` sends; with `header`, waits for the header first.

    Raises ValueError: the sender announces another shape or dtype (both are named).
    """
    if header:
        expected = _header(tuple(shape), dtype)
        head = torch.empty_like(expected, device=device)
        group.process_group.recv([head], peer, tag).wait(group.timeout)
        kind, dims, *sent = head.tolist()
        if head.tolist() != expected.tolist():
            raise ValueError(
                f"rank {group.ranks[peer]} sends shape {tuple(sent[:dims])} of {DTYPES[kind]}, rank "
                f"{group.ranks[group.rank]} expects {tuple(shape)} of {dtype}: both sides must agree"
            )
    tensor = torch.empty(shape, dtype=dtype, device=device)
    return Received(tensor, group.process_group.recv([tensor], peer, tag), group)


def greet(group: Group, sender: int, device: torch.device) -> None:
    """One message from the group's rank `sender` to the other one: connects them."""
    word, other = torch.zeros(1, device=device), 1 - group.rank
    pg = group.process_group
    work = pg.send([word], other, 0) if group.rank == sender else pg.recv([word], other, 0)
    work.wait(group.timeout)
