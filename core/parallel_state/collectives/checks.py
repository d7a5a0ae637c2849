"""Comparing ranks: are all of a group making the same call (debug mode), do they hold the same bits (checksum)?"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
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


MIXED = 1 << 26  # bytes that are mixed at a time
# odd numbers of 64 bits, as int64: constants of splitmix64 and of MurmurHash3
_ODD = (
    (-7046029254386353131, -4658895280553007687, -7723592293110705685),
    (-4417276706812531889, -49064778989728563, -4265267296055464877),
)
_BLOCK = 1024  # words of 8 bytes that `block_sums` adds up

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


def mixed_words(tensor: Tensor) -> Tensor:
    """[2] int64 that stand for the bits of a tensor and their order, computed where it lies.

    Each 8 bytes and their number pass two rounds of multiply and shift (splitmix64), then all are added: a change of
    one word always shows, of several but for one case in 2^64, or 2^128 of both sums.
    """
    bits = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for first in range(0, bits.numel(), MIXED):
        part = bits[first : first + MIXED]
        # a multiple of 8 bytes, in memory of its own: the storage may begin anywhere
        words = F.pad(part, (0, -part.numel() % 8)).view(torch.int64)
        # of each word in the whole tensor: equal words in another order must not cancel
        number = torch.arange(first // 8, first // 8 + words.numel(), device=tensor.device)
        for which, (a, b, c) in enumerate(_ODD):
            mixed = (words ^ (number * a)) * b
            mixed = (mixed ^ (mixed >> 29)) * c
            sums[which] += (mixed ^ (mixed >> 32)).sum()
    return sums


def block_sums(tensor: Tensor) -> Tensor:
    """int64, 1-D: the sums of blocks of 8 KiB of its bits, and what is behind the last block as it is.

    To be mixed: a sum knows no order, so `mixed_words` of them sees what changes any block's sum. A thousandth of the
    tensor, at the speed of its memory.
    """
    bits = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if bits.storage_offset() % 8:
        # words begin at multiples of 8 only
        bits = bits.clone()
    in_blocks = bits.numel() - bits.numel() % (8 * _BLOCK)
    sums = bits[:in_blocks].view(torch.int64).view(-1, _BLOCK).sum(1)
    rest = F.pad(bits[in_blocks:], (0, -bits.numel() % 8)).view(torch.int64)
    return torch.cat((sums, rest))


def fingerprint(x: Tensor) -> Tensor:
    """float64 [2]: the norm, and a product with fixed numbers, which changes where rows are exchanged; no copy."""

    def fixed(n: int, dtype: torch.dtype) -> Tensor:
        # from 1: the sine of 0 would hide the only row of a vector
        numbers = torch.arange(1, n + 1, device=x.device, dtype=torch.float64)
        return numbers.mul(12.9898).sin().to(dtype)

    rows = x.reshape(-1, x.shape[-1] if x.dim() else 1)
    product = (rows @ fixed(rows.shape[1], x.dtype)).double() @ fixed(rows.shape[0], torch.float64)
    return torch.stack([torch.linalg.vector_norm(rows, dtype=torch.float64), product])
