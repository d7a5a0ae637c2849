"""LayerNorm and RMSNorm on whole or sequence-sharded activations."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.autograd.gradients import no_second_derivative
from core.parallel_state import Init, Layout
from core.parallel_state.collectives import Group, all_reduce
from core.parallel_state.spread import SpreadModule
from core.tensor_parallel import sum_gradient
from core.tensor_parallel.mappings import outside_graphs
from core.transformer.spec import Build


def _to_float32(x: Tensor) -> Tensor:
    """Float32 at least: one conversion is cheaper than operations on mixed dtypes."""
    if x.dtype in (torch.float32, torch.float64):
        return x
    return x.float()


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The normalised x, and 1 / rms of each row."""
    # Statistics in float32 at least: a mean of squares of 16-bit values would lose its last digits.
    # Nothing is converted where that is so already: of a single new token conversions count.
    alike = x.dtype == weight.dtype and x.dtype in (torch.float32, torch.float64)
    if alike:
        wide = x.dtype
    else:
        wide = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    x32, weight32 = (x, weight) if alike else (x.to(wide), weight.to(wide))
    mean_square = torch.linalg.vecdot(x32, x32).unsqueeze(-1)
    inverse_rms = mean_square.div_(x.shape[-1]).add_(eps).rsqrt_()
    y = (x32 * inverse_rms).mul_(weight32)
    return y if alike else y.to(x.dtype), inverse_rms


class _RMSNorm(torch.autograd.Function):
    """torch decomposes rms_norm on CPU into a dozen autograd nodes; this keeps x and one number per row.

    With n = x / rms:  y = w n,  dx = (w dy - n mean(w dy n)) / rms,  dw = sum over rows of dy n.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, inverse_rms = _rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse_rms)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        if torch.is_grad_enabled():
            raise no_second_derivative("the fused RMSNorm")
        x, weight, inverse_rms = ctx.saved_tensors
        size = x.shape[-1]
        wide = inverse_rms.dtype
        grad32 = grad.to(wide)
        # x / rms is computed again: keeping it would cost as much memory as the activation itself.
        normalized = x.to(wide) * inverse_rms
        weighted = grad32 * weight.to(wide)
        mean = torch.linalg.vecdot(weighted, normalized).div_(size).unsqueeze(-1)
        dx = weighted.addcmul_(normalized, mean, value=-1).mul_(inverse_rms).to(x.dtype)
        dw = normalized.mul_(grad32).reshape(-1, size).sum(0).to(weight.dtype)
        return dx, dw, None


class _Norm(SpreadModule):
    """Weight [h], in full on every rank; with `layernorm_zero_centered_gamma` it is what 1 is exceeded by.

    Under sequence parallelism (or over heads) each rank sees some of the rows only, so its gradient is a partial sum
    over tp, which the layout states.
    """

    def __init__(self, build: Build, size: int, *, over_heads: bool = False) -> None:
        super().__init__()
        place = build.place
        self.shape = (size,)
        self.eps = build.config.layernorm_epsilon
        # a norm of heads sees this rank's heads, one of activations all rows or this rank's
        partial = frozenset({"tp"}) if over_heads else place.sequence_partial
        self.group = place.group if partial else None
        self.zero_centered = build.config.layernorm_zero_centered_gamma
        init = Init(mean=0.0 if self.zero_centered else 1.0)
        self.weight = place.parameter(Layout((size,), partial=partial), init)
        self.partial = partial
        self.place = place

    def scale(self) -> Tensor:
        """What normalised values are multiplied by: the weight, or 1 + weight in float32 at least."""
        weight = self.weight if self.group is None else sum_gradient(self.weight, self.group)
        if self.zero_centered:
            return 1 + _to_float32(weight)
        return weight

    def extra_repr(self) -> str:
        return f"{self.shape[0]}, eps={self.eps}"


class RMSNorm(_Norm):
    """x / rms(x) * weight over the last dim (arXiv 1910.07467), statistics in float32; shape unchanged."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h]."""
        scale = self.scale()
        # Accelerators have one fused kernel for it.
        if x.device.type == "cpu":
            if not torch.is_grad_enabled():
                return _rms_norm(x, scale, self.eps)[0]
            y: Tensor = _RMSNorm.apply(x, scale, self.eps)
            return y
        return F.rms_norm(x.to(scale.dtype), self.shape, scale, self.eps).to(x.dtype)


class LayerNorm(_Norm):
    """(x - mean) / std * weight + bias over the last dim (arXiv 1607.06450); shape unchanged."""

    def __init__(self, build: Build, size: int, *, over_heads: bool = False) -> None:
        super().__init__(build, size, over_heads=over_heads)
        self.bias = self.place.parameter(Layout((size,), partial=self.partial), Init())

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h]."""
        scale = self.scale()
        bias = self.bias if self.group is None else sum_gradient(self.bias, self.group)
        return F.layer_norm(
            x.to(scale.dtype), self.shape, scale, bias.to(scale.dtype), self.eps
        ).to(x.dtype)


class _AllHeadsRMSNorm(torch.autograd.Function):
    """`_RMSNorm` over dims 1 and 3 of x [b, a/tp, s, d]: mean squares are summed over the ranks, each way."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group | None, scale: Tensor, size: int, eps: float
    ) -> Tensor:
        ctx.group = group
        ctx.size = size
        x32 = _to_float32(x)
        mean_square = _sum_over_heads(x32.square(), group).div_(size)
        inverse_rms = mean_square.add_(eps).rsqrt_()
        ctx.save_for_backward(x, scale, inverse_rms)
        return (x32 * inverse_rms).mul_(_to_float32(scale)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor, None, None]:
        if torch.is_grad_enabled():
            raise no_second_derivative("the fused RMSNorm")
        x, scale, inverse_rms = ctx.saved_tensors
        grad32 = _to_float32(grad)
        normalized = _to_float32(x) * inverse_rms
        weighted = grad32 * _to_float32(scale)
        mean = _sum_over_heads(weighted * normalized, ctx.group).div_(ctx.size)
        dx = weighted.addcmul_(normalized, mean, value=-1).mul_(inverse_rms).to(x.dtype)
        return (
            dx,
            None,
            normalized.mul_(grad32).sum((0, 2)).unsqueeze(1).to(scale.dtype),
            None,
            None,
        )


def _sum_over_heads(x: Tensor, group: Group | None) -> Tensor:
    """[b, a/tp, s, d] -> [b, 1, s, 1], summed over all heads of all ranks: the same on each."""
    return all_reduce(x.sum((1, 3), keepdim=True), group)


@outside_graphs
def _all_heads_rms_norm(
    x: Tensor, group: Group | None, scale: Tensor, size: int, eps: float
) -> Tensor:
    y: Tensor = _AllHeadsRMSNorm.apply(x, group, scale, size, eps)
    return y


class AllHeadsRMSNorm(SpreadModule):
    """x / rms(x) * weight over all heads of a token together (OLMo 2, arXiv 2501.00656); shape unchanged.

    weight [a d], split over tp as the heads are. Each way one all-reduce of [b, 1, s, 1] over tp.
    """

    def __init__(self, build: Build, heads: int) -> None:
        super().__init__()
        place = build.place
        config = build.config
        self.size = heads * config.head_size
        self.head_size = config.head_size
        self.eps = config.layernorm_epsilon
        self.group = place.group
        self.zero_centered = config.layernorm_zero_centered_gamma
        init = Init(mean=0.0 if self.zero_centered else 1.0)
        self.weight = place.parameter(Layout((self.size,), split={"tp": 0}), init)

    def forward(self, x: Tensor) -> Tensor:
        """[b, a/tp, s, d] -> [b, a/tp, s, d]."""
        if self.zero_centered:
            scale = 1 + _to_float32(self.weight)
        else:
            scale = self.weight
        return _all_heads_rms_norm(
            x, self.group, scale.view(-1, 1, self.head_size), self.size, self.eps
        )

    def extra_repr(self) -> str:
        return f"{self.size}, eps={self.eps}"


def build_norm(build: Build, size: int, *, over_heads: bool = False) -> nn.Module:
    """The norm that the configuration names."""
    norm_class = RMSNorm if build.config.normalization == "RMSNorm" else LayerNorm
    return norm_class(build, size, over_heads=over_heads)
