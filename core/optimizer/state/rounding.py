"""Stochastic rounding to bfloat16, with bits that depend on what an element is and not on who holds it.

An element's 16 random bits are a hash of (seed, step, name of the parameter, index in the full tensor). So every
layout and every rank rounds it alike, nothing is drawn from a generator, and a restart repeats it. Unbiased rounding
lets 16-bit weights train without float32 main weights: updates below half a unit in the last place are not lost, they
happen with a probability.
"""

from collections.abc import Mapping
from hashlib import blake2b
from math import prod

import torch
from torch import Tensor

from core.parallel_state.layout import Layout

# lowbias32's, as int32
_MULTIPLIERS = (0x7FEB352D, 0x846CA68B - (1 << 32))


def round_key(seed: int, step: int, name: str) -> tuple[int, int]:
    """64 bits of (seed, step, name), as two int32."""
    digest = blake2b(f"{seed} {step} {name}".encode(), digest_size=8).digest()
    first = int.from_bytes(digest[:4], "little", signed=True)
    second = int.from_bytes(digest[4:], "little", signed=True)
    return first, second


def random_bits(key: tuple[int, int], index: Tensor) -> Tensor:
    """int64 [n] element indices -> int32 [n] in 0..65535, each value equally likely over elements and keys."""
    # `to` wraps
    low = index.to(torch.int32)
    high = (index >> 32).to(torch.int32)
    return _hash(key, low, high)


def random_bits_from(key: tuple[int, int], first: int, count: int, device: torch.device) -> Tensor:
    """`random_bits` of the indices first ... first + count - 1, without a tensor of int64 indices."""
    high = first >> 32
    # the high word changes within them: once in 4 Gi elements
    if (first + count - 1) >> 32 != high:
        return random_bits(key, torch.arange(first, first + count, device=device))
    low = torch.arange(count, dtype=torch.int32, device=device).add_(_signed(first & 0xFFFFFFFF))
    return _hash(key, low, high)


def _signed(word: int) -> int:
    if word >> 31:
        return word - (1 << 32)
    return word


def _hash(key: tuple[int, int], x: Tensor, high: Tensor | int) -> Tensor:
    """The hash lowbias32 of the low words, in place: a bijection of int32 in which every bit depends on every other.

    It is keyed before and in the middle, so that the numbers of two keys are not the same in another order.
    """
    x.bitwise_xor_(key[0])
    _fold(x, 16).mul_(_MULTIPLIERS[0])
    _fold(x, 15).bitwise_xor_(high).bitwise_xor_(key[1])
    x.mul_(_MULTIPLIERS[1])
    return _fold(x, 16).bitwise_and_(0xFFFF)


def _fold(x: Tensor, shift: int) -> Tensor:
    """x ^= x >> shift, the shift a logical one."""
    return x.bitwise_xor_((x >> shift).bitwise_and_((1 << (32 - shift)) - 1))


def stochastic_bfloat16(x: Tensor, bits: Tensor) -> Tensor:
    """float32 [n], random 16 bits [n] -> bfloat16 [n]: up with the probability of the remainder, so unbiased.

    Numbers that a bfloat16 holds exactly stay as they are; NaN and infinities too.
    """
    # A bfloat16 is the upper half of a float32. Adding random lower bits carries into the upper half, one step up,
    # with the probability (lower bits / 2**16); then the lower half is cut off.
    rounded = (x.view(torch.int32) + bits).bitwise_and_(-0x10000).view(torch.float32)
    # NaN could carry into the sign; infinities do not
    return torch.where(x == x, rounded, x).to(torch.bfloat16)


def global_index(layout: Layout, start: list[int], shape: tuple[int, ...], index: Tensor) -> Tensor:
    """int64 elements of a local tensor's flat form -> indices in the full tensor, in row-major order.

    shape: local, padded rows included; start: where it begins in the full tensor. Padded rows get some index.
    """
    global_indices = torch.zeros_like(index)
    stride = 1
    dims = zip(layout.shape, start, shape, strict=True)
    # from the innermost dim
    for full_size, offset, local_size in reversed(list(dims)):
        global_indices += (index % local_size + offset) * stride
        index = index // local_size
        stride = stride * full_size
    return global_indices


class Rounding:
    """Rounds shards of this rank's parameters; coordinate and sizes of the mesh say where a shard lies."""

    def __init__(self, seed: int, coordinate: Mapping[str, int], sizes: Mapping[str, int]) -> None:
        self._seed = seed
        self._coordinate = coordinate
        self._sizes = sizes

    def round(self, x: Tensor, name: str, layout: Layout, first: int, step: int) -> Tensor:
        """float32 [n], elements of the local flat form from `first` on -> bfloat16 [n]."""
        shape = layout.local_shape(self._sizes)
        key = round_key(self._seed, step, name)
        start = [s.start for s in layout.box(self._coordinate, self._sizes)]
        # only rows are cut: indices are consecutive
        if not shape or shape[1:] == layout.shape[1:]:
            if shape:
                offset = start[0] * prod(shape[1:])
            else:
                offset = 0
            return stochastic_bfloat16(
                x, random_bits_from(key, first + offset, x.numel(), x.device)
            )
        local_index = torch.arange(first, first + x.numel(), device=x.device)
        index = global_index(layout, start, shape, local_index)
        return stochastic_bfloat16(x, random_bits(key, index))
