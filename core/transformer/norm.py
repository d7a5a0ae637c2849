"""LayerNorm and RMSNorm on whole or sequence-sharded activations."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.autograd.gradients import no_second_derivative
from core.parallel_state import Init, Layout
from core.parallel_state.spread import SpreadModule
from core.tensor_parallel import sum_gradient
from core.transformer.spec import Build


def _wide(x: Tensor) -> Tensor:
    """In float32 at least: one conversion is cheaper than operations on mixed dtypes."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


class _RMSNorm(torch.autograd.Function):
    """torch decomposes rms_norm on CPU into a dozen autograd nodes; this keeps x and one number per row.

    With n = x / rms:  y = w n,  dx = (w dy - n mean(w dy n)) / rms,  dw = sum over rows of dy n.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = _wide(x)
        square = torch.linalg.vecdot(wide, wide).unsqueeze(-1)
        inverse = square.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse).mul_(_wide(weight)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        if torch.is_grad_enabled():
            raise no_second_derivative("the fused RMSNorm")
        x, weight, inverse = ctx.saved_tensors
        size, wide = x.shape[-1], _wide(g)
        n, wg = _wide(x) * inverse, wide * _wide(weight)
        mean = torch.linalg.vecdot(wg, n).div_(size).unsqueeze(-1)
        dx = wg.addcmul_(n, mean, value=-1).mul_(inverse).to(x.dtype)
        dw = n.mul_(wide).reshape(-1, size).sum(0).to(weight.dtype)
        return dx, dw, None


class _Norm(SpreadModule):
    """Weight [h], whole on every rank; under sequence parallelism (or over heads) each rank sees a part of the rows,
    so its gradient is partial over tp, which the layout says."""

    def __init__(self, build: Build, size: int, *, over_heads: bool = False) -> None:
        super().__init__()
        place = build.place
        self.shape, self.eps = (size,), build.config.layernorm_epsilon
        partial = frozenset({"tp"}) if over_heads else place.sequence_partial
        self.group = place.group if partial else None
        self.weight = place.parameter(Layout((size,), partial=partial), Init(mean=1.0))
        self.partial, self.place = partial, place

    def extra_repr(self) -> str:
        return f"{self.shape[0]}, eps={self.eps}"


class RMSNorm(_Norm):
    """x / rms(x) * weight over the last dim (arXiv 1910.07467), statistics in float32; shape unchanged."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h]."""
        weight = self.weight if self.group is None else sum_gradient(self.weight, self.group)
        if x.device.type == "cpu":
            y: Tensor = _RMSNorm.apply(x, weight, self.eps)
            return y
        return F.rms_norm(x, self.shape, weight, self.eps)


class LayerNorm(_Norm):
    """(x - mean) / std * weight + bias over the last dim (arXiv 1607.06450); shape unchanged."""

    def __init__(self, build: Build, size: int, *, over_heads: bool = False) -> None:
        super().__init__(build, size, over_heads=over_heads)
        self.bias = self.place.parameter(Layout((size,), partial=self.partial), Init())

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h]."""
        if self.group is None:
            return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)
        weight, bias = sum_gradient(self.weight, self.group), sum_gradient(self.bias, self.group)
        return F.layer_norm(x, self.shape, weight, bias, self.eps)


def build_norm(build: Build, size: int, *, over_heads: bool = False) -> nn.Module:
    """The norm that the configuration names."""
    kind = RMSNorm if build.config.normalization == "RMSNorm" else LayerNorm
    return kind(build, size, over_heads=over_heads)
