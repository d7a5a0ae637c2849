"""Point to point: one message to one neighbour, shape and dtype checked on both sides.

gloo accepts a message of another size or dtype silently, and loses one whose handle is dropped: keep what
`isend` returns until it is waited for, and do not write to a tensor under way.
"""

from typing import Any

import torch
from torch import Tensor

from core.parallel_state.collectives.groups import Group
from core.parallel_state.collectives.staged import host_memory, to_host

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

    def __init__(self, tensor: Tensor, work: Any, group: Group, into: Tensor | None = None) -> None:
        self._tensor = tensor
        self._work = work
        self._group = group
        self._into = into

    def wait(self) -> Tensor:
        """Wait until the message is here, at most the group's timeout; on an accelerator its stream waits for it.

        A staged message goes on to its device.
        """
        group = self._group
        _wait(self._work, self._tensor, group)
        if self._into is None:
            return self._tensor
        return self._into.copy_(self._tensor, non_blocking=True)


def _wait(work: Any, tensor: Tensor, group: Group) -> None:
    """Wait for a message. With a time, NCCL's `wait` would block the host until the message is here; without, the
    stream waits, and the group's own timeout ends it."""
    if tensor.device.type in group.gloo:
        work.wait(group.timeout)
    else:
        work.wait()


class Sent:
    """A message under way; holds its tensor until `wait()`."""

    def __init__(
        self, tensor: Tensor, works: list[Any], group: Group, header_tensor: Tensor | None = None
    ) -> None:
        self._tensors: tuple[Tensor | None, ...] = (tensor, header_tensor)
        self._works = works
        self._group = group
        # autograd's write counter: gloo reads the memory whenever it likes, so a write in between is an error
        self._version = version_of(tensor)

    def wait(self, *, arrived: bool = False) -> None:
        """Block until the receiver has it, then let the tensor go. `arrived`: it is known to have it.

        Raises RuntimeError: somebody wrote into the tensor meanwhile; what arrived is anyone's guess.
        """
        tensor = self._tensors[0] if self._tensors else None
        group = self._group
        # on an accelerator the stream waits, not the host
        if not arrived or (tensor is not None and tensor.device.type != "cpu"):
            for work in self._works:
                assert tensor is not None
                _wait(work, tensor, group)
        if tensor is not None and version_of(tensor) != self._version:
            raise RuntimeError(
                f"a tensor of shape {list(tensor.shape)} was written while it was being sent; clone what is "
                "changed in place before it is handed over"
            )
        self._tensors = ()


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written in place."""
    if tensor.is_inference():
        return 0
    return tensor._version


def _header(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if len(shape) > MAX_DIMS or dtype not in DTYPES:
        raise ValueError(
            f"cannot send shape {shape} of {dtype}: at most {MAX_DIMS} dims of {DTYPES}"
        )
    return torch.tensor([DTYPES.index(dtype), len(shape), *shape, *[0] * (MAX_DIMS - len(shape))])


def isend(tensor: Tensor, peer: int, group: Group, *, tag: int = 0, header: bool = True) -> Sent:
    """Start sending to the group's rank `peer`. With `header` the receiver checks shape and dtype first."""
    if tensor.device.type in group.staged:
        return isend(to_host(tensor), peer, group.on_host, tag=tag, header=header)
    # what is under way must not move; a strided tensor is copied here, and the copy kept by `Sent`
    tensor = tensor.contiguous()
    header_tensor = None
    works = []
    if header:
        header_tensor = _header(tuple(tensor.shape), tensor.dtype).to(tensor.device)
        works.append(group.process_group.send([header_tensor], peer, tag))
    works.append(group.process_group.send([tensor], peer, tag))
    group.traffic.add(tensor.nbytes, 0.0)
    return Sent(tensor, works, group, header_tensor)


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
    if (device.type if device is not None else "cpu") in group.staged:
        into = torch.empty(shape, dtype=dtype, device=device)
        host = host_memory(into)
        on_host = group.on_host
        if header:
            _expect_header(host, peer, on_host, tag)
        return Received(host, group.process_group.recv([host], peer, tag), on_host, into)
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if header:
        _expect_header(tensor, peer, group, tag)
    return Received(tensor, group.process_group.recv([tensor], peer, tag), group)


def _expect_header(tensor: Tensor, peer: int, group: Group, tag: int) -> None:
    """Wait for a header. Raises ValueError: it announces something else than goes into `tensor`."""
    expected = _header(tuple(tensor.shape), tensor.dtype)
    header_tensor = torch.empty_like(expected, device=tensor.device)
    _wait(group.process_group.recv([header_tensor], peer, tag), header_tensor, group)
    dtype_index, num_dims, *sent = header_tensor.tolist()
    if header_tensor.tolist() != expected.tolist():
        raise ValueError(
            f"rank {group.ranks[peer]} sends shape {tuple(sent[:num_dims])} of {DTYPES[dtype_index]}, rank "
            f"{group.ranks[group.rank]} expects {tuple(tensor.shape)} of {tensor.dtype}: both sides must agree"
        )


def greet(group: Group, sender: int, device: torch.device) -> None:
    """One message from the group's rank `sender` to the other one: connects them."""
    other = 1 - group.rank
    if group.rank == sender:
        isend(torch.zeros(1, dtype=torch.uint8, device=device), other, group, header=False).wait()
    else:
        irecv((1,), torch.uint8, other, group, device=device, header=False).wait()
