"""Stochastic rounding to bfloat16, with bits that depend on what an element is and not on who holds it.

An element's 16 random bits are a hash of (seed, step, name of the parameter, index in the whole tensor), so every
layout and every rank rounds it alike, nothing is drawn from a generator, and a restart repeats it.
"""

from collections.abc import Mapping
from hashlib import blake2b
from math import prod

import torch
from torch import Tensor

from core.parallel_state.layout import Layout

_ONES = (0x7FEB352D, 0x846CA68B - (1 << 32))  # lowbias32's multipliers, as int32


def round_key(seed: int, step: int, name: str) -> tuple[int, int]:
    """64 bits of (seed, step, name), as two int32."""
    found = blake2b(f"{seed} {step} {name}".encode(), digest_size=8).digest()
    first, second = (int.from_bytes(found[i : i + 4], "little", signed=True) for i in (0, 4))
    return first, second


def random_bits(key: tuple[int, int], index: Tensor) -> Tensor:
    """int64 [n] element indices -> int32 [n] in 0..65535, each value equally likely over elements and keys."""
    low, high = index.to(torch.int32), (index >> 32).to(torch.int32)  # `to` wraps
    return _hash(key, low, high)


def random_bits_from(key: tuple[int, int], first: int, n: int, device: torch.device) -> Tensor:
    """`random_bits` of the indices first ... first + n - 1, without making them."""
    high = first >> 32
    if (first + n - 1) >> 32 != high:  # once in 4 Gi elements
        return random_bits(key, torch.arange(first, first + n, device=device))
    low = torch.arange(n, dtype=torch.int32, device=device).add_(_signed(first & 0xFFFFFFFF))
    return _hash(key, low, high)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def _hash(key: tuple[int, int], x: Tensor, high: Tensor | int) -> Tensor:
    """lowbias32, a bijection of int32 in which every bit depends on every other, keyed before and in the middle, so
    that the numbers of two keys are not the same in another order. In place."""
    x.bitwise_xor_(key[0])
    _fold(x, 16).mul_(_ONES[0])
    _fold(x, 15).bitwise_xor_(high).bitwise_xor_(key[1])
    x.mul_(_ONES[1])
    return _fold(x, 16).bitwise_and_(0xFFFF)


def _fold(x: Tensor, shift: int) -> Tensor:
    """x ^= x >> shift, the shift a logical one."""
    return x.bitwise_xor_((x >> shift).bitwise_and_((1 << (32 - shift)) - 1))


def stochastic_bfloat16(x: Tensor, bits: Tensor) -> Tensor:
    """float32 [n], random 16 bits [n] -> bfloat16 [n]: up with the probability of the remainder, so unbiased.

    What is a bfloat16 stays as it is; NaN and infinities too.
    """
    rounded = (x.view(torch.int32) + bits).bitwise_and_(-0x10000).view(torch.float32)  # a carry is the step up
    return torch.where(x == x, rounded, x).to(torch.bfloat16)  # NaN could carry into the sign; infinities do not


def global_index(layout: Layout, start: list[int], shape: tuple[int, ...], index: Tensor) -> Tensor:
    """int64 elements of a local tensor's flat form -> indices in the whole tensor, in row-major order.

    shape: local, padded rows included; start: where it begins in the whole. Padded rows get some index.
    """
    found, stride = torch.zeros_like(index), 1
    for n, at, size in zip(reversed(layout.shape), reversed(start), reversed(shape), strict=True):
        found += (index % size + at) * stride
        index, stride = index // size, stride * n
    return found


class Rounding:
    """Rounds pieces of this rank's parameters; `seed` of the run, the mesh for where a piece lies."""

    def __init__(self, seed: int, at: Mapping[str, int], sizes: Mapping[str, int]) -> None:
        self._seed, self._at, self._sizes = seed, at, sizes

    def round(self, x: Tensor, name: str, layout: Layout, first: int, step: int) -> Tensor:
        """float32 [n], elements of the local flat form from `first` on -> bfloat16 [n]."""
        shape, key = layout.local_shape(self._sizes), round_key(self._seed, step, name)
        start = [s.start for s in layout.box(self._at, self._sizes)]
        if not shape or shape[1:] == layout.shape[1:]:  # only rows are cut
            offset = start[0] * prod(shape[1:]) if shape else 0
            return stochastic_bfloat16(x, random_bits_from(key, first + offset, x.numel(), x.device))
        index = torch.arange(first, first + x.numel(), device=x.device)
        return stochastic_bfloat16(x, random_bits(key, global_index(layout, start, shape, index)))
