"""Comparing ranks: are all of a group making the same call (debug mode), do they hold the same bits (checksum)?"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from core.parallel_state.collectives.groups import Group

_HERE = str(Path(__file__).parent)
# of a description: all ranks send as many, longer ones are cut
_BYTES = 240


def _call_site() -> str:
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return f"{'/'.join(Path(frame.f_code.co_filename).parts[-3:])}:{frame.f_lineno}"


def compare_across_ranks(op: str, x: Tensor, group: Group) -> None:
    """Compare (op, shape, dtype, call site) over `group` before the collective itself.

    Raises RuntimeError on every rank, naming what each rank was about to do, where one differs;
    or on those that came, where one did not within the group's timeout.
    """
    description = f"{op} {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')} at {_call_site()}"
    text = torch.zeros(_BYTES, dtype=torch.uint8)
    encoded = description.encode()[:_BYTES]
    text[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
    text = text.to(x.device)
    encoded_descriptions = [torch.empty_like(text) for _ in range(group.size)]
    work = dist.all_gather(encoded_descriptions, text, group=group.process_group, async_op=True)
    try:
        work.wait(group.timeout)
    except RuntimeError as error:
        raise RuntimeError(
            f"group {group.name}: not every one of the ranks {group.ranks} came to {description}"
        ) from error
    descriptions = [
        bytes(t.tolist()).rstrip(b"\0").decode(errors="replace") for t in encoded_descriptions
    ]
    if len(set(descriptions)) > 1:
        lines = "\n".join(
            f"  rank {rank}: {line}" for rank, line in zip(group.ranks, descriptions, strict=True)
        )
        raise RuntimeError(
            f"the ranks of group {group.name} make different collective calls:\n{lines}"
        )


# A prime: of a power of two neither a sign that is turned nor 1024 numbers that are doubled leave a trace. Below
# 2^31, so that products with a small number are exact in float64.
MODULUS = (1 << 31) - 1
_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: Tensor) -> Tensor:
    """The sum of the bits, read as integers of the elements' size, modulo `MODULUS`: int64, shape [].

    Nothing waits for a device.
    """
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    integers = flat.detach().contiguous().view(-1).view(_INTEGER_OF_SIZE[flat.itemsize])
    return integers.sum(dtype=torch.int64) % MODULUS


def fingerprint(x: Tensor) -> Tensor:
    """float64 [2]: the norm, and a product with fixed numbers, which changes where rows are exchanged; no copy."""

    def fixed(n: int, dtype: torch.dtype) -> Tensor:
        # from 1: the sine of 0 would hide the only row of a vector
        numbers = torch.arange(1, n + 1, device=x.device, dtype=torch.float64)
        return numbers.mul(12.9898).sin().to(dtype)

    rows = x.reshape(-1, x.shape[-1] if x.dim() else 1)
    product = (rows @ fixed(rows.shape[1], x.dtype)).double() @ fixed(rows.shape[0], torch.float64)
    return torch.stack([torch.linalg.vector_norm(rows, dtype=torch.float64), product])
