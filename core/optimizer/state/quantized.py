"""Moments in 8 bits: codes of a dynamic map, and one scale for each block of 64 elements (arXiv 2110.02861).

Blocks are of `PART_ALIGN` elements because ranks' parts, an offload's cut and scratch chunks begin at its multiples:
no cut goes through a block, so the numbers of an update do not depend on the ZeRO stage or the number of data ranks.
"""

from collections.abc import Callable, Iterable
from functools import cache

import torch
from torch import Tensor

from core.optimizer.state.flat_shard import ParameterShard, Span
from core.parallel_state.flat import PART_ALIGN
from core.parallel_state.layout import Layout

BLOCK = PART_ALIGN
# bitsandbytes and torchao: smaller parameters keep moments of 32 bits
LEAST_NUMEL = 4096
# kind -> whether its values have signs
QUANTIZED_KINDS = {"exp_avg": True, "exp_avg_sq": False}
Quantizes = Callable[[str, Layout], bool]


@cache
def dynamic_map(*, signed: bool) -> tuple[float, ...]:
    """The 256 values of a code, ascending, of which the last is 1: the dynamic tree of arXiv 2110.02861, section 2.1.

    Seven decades from 1e-7 to 1, each with twice as many values as the one below; unsigned ones have twice as many.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        count = 2**decade if signed else 2 ** (decade + 1)
        width = 0.9 / count
        for number in range(count):
            # the middle of one of `count` equal parts of [0.1, 1]
            middle = 10.0 ** (decade - 6) * (0.1 + width * (number + 0.5))
            values.append(middle)
            if signed:
                values.append(-middle)
    return tuple(sorted(values))


@cache
def _table(signed: bool, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """(values [256], boundaries between codes [255]), once per dtype and device."""
    values = torch.tensor(dynamic_map(signed=signed), dtype=dtype, device=device)
    boundaries = (values[:-1] + values[1:]) / 2
    if not signed:
        # What is above 0 stays above 0, because Adam divides by its root (arXiv 2309.01507, section 4.1).
        boundaries[0] = 0.0
    return values, boundaries


def quantize(x: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """x [n * 64] -> codes [n * 64] uint8 of the nearest values, scales [n] of x's dtype.

    A block's scale is its element of the largest magnitude, with its sign: so this one is always exact, and
    quantizing what `dequantize` gave changes nothing.
    """
    blocks = x.view(-1, BLOCK)
    scales = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    ratios = blocks / torch.where(scales == 0, 1.0, scales)
    _, boundaries = _table(signed, x.dtype, x.device)
    codes = torch.bucketize(ratios, boundaries, out_int32=True)
    return codes.to(torch.uint8).flatten(), scales.flatten()


def dequantize(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """codes [n * 64], scales [n] -> [n * 64] of the scales' dtype."""
    values, _ = _table(signed, scales.dtype, scales.device)
    return (values[codes.int()].view(-1, BLOCK) * scales.unsqueeze(1)).flatten()


class QuantizedState:
    """One state of all elements of a state buffer: codes and scales, and the elements that stay as they are.

    quantized_spans: ascending, whole blocks. codes: [size] uint8. scales: [size / 64], of the main weights' dtype.
    plain: [others], small parameters, and what a parameter has of a block that is not all its own.
    new(size, dtype, name): allocates zeros.
    """

    def __init__(
        self,
        size: int,
        quantized_spans: Iterable[Span],
        dtype: torch.dtype,
        kind: str,
        new: Callable[[int, torch.dtype, str], Tensor],
    ) -> None:
        self._signed = QUANTIZED_KINDS[kind]
        self._plain_spans = gaps(quantized_spans, size)
        self.codes = new(size, torch.uint8, f"{kind}-codes")
        self.scales = new(size // BLOCK, dtype, f"{kind}-scales")
        self.plain = new(sum(last - first for first, last in self._plain_spans), dtype, kind)
        # zero has a code of its own, in the middle of a map with signs
        self.codes.fill_(dynamic_map(signed=self._signed).index(0.0))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that it holds."""
        return self.codes, self.scales, self.plain

    def read(self, span: Span) -> Tensor:
        """Elements [first, last), a copy; both are multiples of 64."""
        first, last = span
        scales = self.scales[first // BLOCK : last // BLOCK]
        values = dequantize(self.codes[first:last], scales, signed=self._signed)
        for elements, held in self._plain_in(span):
            values[elements] = self.plain[held]
        return values

    def write(self, span: Span, values: Tensor) -> None:
        """The inverse of `read`; `values` may lie on another device."""
        first, last = span
        values = values.to(self.codes.device)
        if plain := list(self._plain_in(span)):
            values = values.clone()
        for elements, held in plain:
            self.plain[held] = values[elements]
            # they have no code: a block of theirs is one of zeros
            values[elements] = 0.0
        codes, scales = quantize(values, signed=self._signed)
        self.codes[first:last] = codes
        self.scales[first // BLOCK : last // BLOCK] = scales

    def _plain_in(self, span: Span) -> Iterable[tuple[slice, slice]]:
        """What of [first, last) is plain: counted from `first`, and where `plain` has it."""
        held = 0
        for start, stop in self._plain_spans:
            first, last = max(start, span[0]), min(stop, span[1])
            if first < last:
                yield (
                    slice(first - span[0], last - span[0]),
                    slice(held + first - start, held + last - start),
                )
            held += stop - start


def quantized_spans(shards: Iterable[ParameterShard], quantizes: Quantizes) -> list[Span]:
    """Elements of a state buffer that are quantized: whole blocks of one parameter; ascending."""
    spans = []
    for shard in shards:
        first = -(-shard.span[0] // BLOCK) * BLOCK
        last = shard.span[1] // BLOCK * BLOCK
        if first < last and quantizes(shard.name, shard.layout):
            spans.append((first, last))
    return spans


def gaps(spans: Iterable[Span], size: int) -> list[Span]:
    """What ascending spans leave of [0, size)."""
    found = []
    start = 0
    for first, last in (*spans, (size, size)):
        if start < first:
            found.append((start, first))
        start = last
    return found
