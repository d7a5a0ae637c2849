"""Products of 8-bit floating-point factors, each factor scaled by the largest value that it holds now.

    y  = x W^T      x and W in e4m3 (4 bits of exponent, 3 of mantissa; largest value 448)
    dx = dy W       dy in e4m3, or in e5m2 (largest value 57344), which "hybrid" takes for its wider range
    dW = dy^T x     the same formats

Formats: "FP8 Formats for Deep Learning" (arXiv 2209.05433). Scaling with the present largest value is what
Transformer Engine calls current scaling and torchao dynamic scaling. Nothing is remembered between products, so that
a second run of a forward, a deferred dW and a resumed run see the numbers of the first. A scale is a power of two: it
moves exponents and rounds nothing, so that two layouts whose parts of a tensor have other largest values differ in
the smallest numbers only (docs/decisions/153-scales-are-powers-of-two.md).

Shapes: x [..., i], W [o, i], dy [..., o]. What autograd keeps is x as it was, not its 8-bit copy.
"""

import warnings
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2

# below this a tensor's largest value counts as this, so that neither a scale nor its inverse leaves float32
_SMALLEST_AMAX = 2.0**-110
_FLOAT32_EXPONENT = 0x7F800000
# inner and last dims of the devices' 8-bit products
_MULTIPLE = 16


@dataclass(frozen=True)
class Fp8:
    """How the three products of a linear are made in 8 bits.

    gradient_dtype: of dy; x and W are e4m3. rowwise: a scale for each row of a factor, along which the product sums,
    in the place of one for the whole tensor. wgrad: whether dW is an 8-bit product, too; else it is one of x and dy
    as they are.
    """

    gradient_dtype: torch.dtype = E4M3
    rowwise: bool = False
    wgrad: bool = True

    def forward(self, x: Tensor, matrix: Tensor) -> Tensor:
        """x [..., i], W [o, i] -> x W^T [..., o] in x's dtype."""
        y = self._product(x.reshape(-1, x.shape[-1]), E4M3, matrix, x.dtype)
        return y.view(*x.shape[:-1], matrix.shape[0])

    def input_gradient(self, gy: Tensor, matrix: Tensor) -> Tensor:
        """dy [..., o], W [o, i] -> dy W [..., i] in dy's dtype."""
        rows = gy.reshape(-1, gy.shape[-1])
        dx = self._product(rows, self.gradient_dtype, matrix.t(), gy.dtype)
        return dx.view(*gy.shape[:-1], matrix.shape[1])

    def weight_gradient(self, x: Tensor, gy: Tensor, dtype: torch.dtype) -> Tensor:
        """x [n, i], dy [n, o] -> dy^T x [o, i] in `dtype`, without being rounded to x's before."""
        return self._product(gy.t(), self.gradient_dtype, x.t(), dtype)

    def _product(self, a: Tensor, a_dtype: torch.dtype, b: Tensor, dtype: torch.dtype) -> Tensor:
        """a [m, k], b [n, k] -> a b^T [m, n]; b in e4m3."""
        if a.is_meta or 0 in (*a.shape, *b.shape):
            return a.new_zeros(a.shape[0], b.shape[0], dtype=dtype)
        left = quantize(a, a_dtype, rowwise=self.rowwise)
        right = quantize(b, E4M3, rowwise=self.rowwise)
        # 64 bits are those of a comparison; no device multiplies 8 bits into them
        if dtype != torch.float64:
            # some devices give 16 bits only where scales are of rows
            for made in (dtype, torch.bfloat16):
                if multiplies(a.device.type, a_dtype, made, self.rowwise):
                    return scaled_product(left, right, made).to(dtype)
            _tell_once(a.device.type, a_dtype, self.rowwise)
        return plain_product(left, right, dtype)


class Quantized(NamedTuple):
    """A tensor [r, k] as `values` of 8 bits times `inverse`, float32: one number [], or one of each row [r, 1]."""

    values: Tensor
    inverse: Tensor


def quantize(tensor: Tensor, dtype: torch.dtype, *, rowwise: bool) -> Quantized:
    """[r, k] -> its nearest 8-bit values after a scale that brings the largest to at most the format's largest.

    The scale is the largest such power of two. A largest value that is not finite makes everything NaN, so that a
    loss or a gradient norm shows it as it does without 8 bits (the conversion itself would saturate).
    """
    # the largest absolute value without a tensor of absolute values; NaN wins
    if rowwise:
        amax = torch.linalg.vector_norm(tensor, torch.inf, dim=1, keepdim=True)
    else:
        amax = torch.linalg.vector_norm(tensor, torch.inf)
    amax = amax.to(torch.float32)
    ratio = torch.finfo(dtype).max / amax.clamp(min=_SMALLEST_AMAX)
    # without its mantissa: the power of two below
    scale = (ratio.view(torch.int32) & _FLOAT32_EXPONENT).view(torch.float32)
    scale = scale.where(amax.isfinite(), torch.nan)
    # float16 has no room for a scale; in bfloat16 times a power of two is exact
    wide = tensor.float() if tensor.dtype == torch.float16 else tensor
    values = (wide * scale.to(wide.dtype)).to(dtype).contiguous()
    return Quantized(values, 1 / scale)


def plain_product(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """a [m, k], b [n, k] -> a b^T [m, n] of the values that 8 bits stand for: the twin of `scaled_product`.

    bfloat16 holds every 8-bit value times a power of two, so its product is that of the 8-bit factors.
    """
    wide = torch.float32 if dtype == torch.float16 else dtype
    left, right = (q.values.to(wide) * q.inverse.to(wide) for q in (a, b))
    return F.linear(left, right).to(dtype)


def scaled_product(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """The same by one product of 8-bit factors, summed in float32; k and n are filled up with zeros to 16s."""
    rows = b.values.shape[0]
    left = _padded(a.values, rows=0)
    right = _padded(b.values, rows=-rows % _MULTIPLE)
    scale_b = b.inverse
    if scale_b.dim():
        scale_b = F.pad(scale_b, (0, 0, 0, -rows % _MULTIPLE), value=1.0).t()
    y = torch._scaled_mm(left, right.t(), scale_a=a.inverse, scale_b=scale_b, out_dtype=dtype)
    if y.shape[1] == rows:
        return y
    return y[:, :rows].contiguous()


def _padded(values: Tensor, *, rows: int) -> Tensor:
    """[r, k] -> [r + rows, k filled up], zeros added; as bytes, since 8-bit floats know few operations."""
    columns = -values.shape[1] % _MULTIPLE
    if not rows and not columns:
        return values
    filled = F.pad(values.view(torch.uint8), (0, columns, 0, rows))
    return filled.view(values.dtype)


@cache
def multiplies(
    device_type: str, left_dtype: torch.dtype, dtype: torch.dtype, rowwise: bool
) -> bool:
    """Whether this device multiplies e4m3 by `left_dtype` into `dtype` with such scales; tried once."""
    try:
        factor = torch.ones(32, 16, device=device_type)
        # rows of 1, 2, 4 ...: scales that a backend drops or takes for another row's are seen
        factor *= 2.0 ** (torch.arange(32, device=device_type) % 4)[:, None]
        left = quantize(factor, left_dtype, rowwise=rowwise)
        right = quantize(factor[:16], E4M3, rowwise=rowwise)
        expected = factor @ factor[:16].t()
        return torch.equal(scaled_product(left, right, dtype).float(), expected)
    except (RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError):
        return False


@cache
def _tell_once(device_type: str, left_dtype: torch.dtype, rowwise: bool) -> None:
    recipe = "rowwise" if rowwise else "tensorwise"
    warnings.warn(
        f"fp8: torch {torch.__version__} has no product of {left_dtype} and {E4M3} with {recipe} scales on "
        f"{device_type}; factors are rounded to 8 bits and multiplied in 16 or 32, which is right and slower than "
        "model.fp8 left out",
        stacklevel=2,
    )
