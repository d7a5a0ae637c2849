"""Attention of one block of queries with one block of keys, with the logsumexp that merges blocks.

torch's fused kernels, under private names that may change: each is tried once per device and dtype against the plain
twin, which takes its place where it fails. Letters: b microbatch, a heads, g query groups, n queries, t keys, d head
size.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

Forward = Callable[[Tensor, Tensor, Tensor, bool, Tensor | None, float], tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]
Kernel = tuple[Forward, Backward]
_aten: Any = torch.ops.aten


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which blocks are merged."""
    if dtype in (torch.float32, torch.float64):
        return dtype
    return torch.float32


def _scores(q: Tensor, k: Tensor, causal: bool, bias: Tensor | None, scale: float) -> Tensor:
    """[b, g, a/g, n, t]."""
    b, g, t, d = k.shape
    compute = wide(q.dtype)
    scores = q.to(compute).reshape(b, g, -1, q.shape[2], d) @ k.to(compute)[:, :, None].mT * scale
    if causal:
        later = torch.ones(q.shape[2], t, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    if bias is None:
        return scores
    return scores + bias[:, :, None]


def plain_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """See `attend`; the scores exist in full."""
    scores = _scores(q, k, causal, bias, scale)
    logsumexp = scores.logsumexp(-1)
    # a row without any key: exp(-inf - 0) = 0
    lowest = logsumexp.masked_fill(logsumexp == -torch.inf, 0)
    out = (scores - lowest[..., None]).exp() @ v.to(scores.dtype)[:, :, None]
    return out.reshape(q.shape).to(q.dtype), logsumexp.reshape(q.shape[:3])


def plain_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    causal: bool,
    bias: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, as `attend_backward`; the scores exist in full."""
    scores = _scores(q, k, causal, bias, scale)
    shape = (*scores.shape[:4], q.shape[3])
    compute = scores.dtype
    probabilities = (scores - logsumexp.reshape(scores.shape[:4])[..., None]).exp()
    grad = grad.to(compute).reshape(shape)
    out = out.to(compute).reshape(shape)
    dv = (probabilities.mT @ grad).sum(2)
    dp = grad @ v.to(compute)[:, :, None].mT
    # FlashAttention's form of softmax's backward: grad . out is the row's sum of p dp, over all blocks
    ds = probabilities * (dp - (grad * out).sum(-1, keepdim=True)) * scale
    dq = (ds @ k.to(compute)[:, :, None]).reshape(q.shape)
    dk = (ds.mT @ q.to(compute).reshape(shape)).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


PLAIN: Kernel = plain_forward, plain_backward


def _cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    out, logsumexp = _aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=bias, scale=scale
    )
    return out, logsumexp


def _cpu_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    causal: bool,
    bias: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor, Tensor] = (
        _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, logsumexp, 0.0, causal, attn_mask=bias, scale=scale
        )
    )
    return gradients


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    result = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return result[0], result[1]


def _flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    causal: bool,
    bias: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    # no dropout: the random state is not read; lengths are of batches that are packed without padding
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)
    lengths = (None, None, q.shape[2], k.shape[2], 0.0, causal, unused, unused[:0])
    return tuple(
        _aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, logsumexp, *lengths, scale=scale
        )
    )


def _efficient_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    k, v = _repeated(k, q), _repeated(v, q)
    out, logsumexp, *_ = _aten._scaled_dot_product_efficient_attention(
        q, k, v, _aligned(bias, q, k), True, 0.0, causal, scale=scale
    )
    # it is filled up to 32 rows
    return out, logsumexp[:, :, : q.shape[2]]


def _efficient_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    causal: bool,
    bias: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    b, g, t, d = k.shape
    # the kernel reads logsumexp in tiles of 32 rows; e^(score - inf) = 0 leaves the filled ones out
    rows = -q.shape[2] % 32
    logsumexp = torch.nn.functional.pad(logsumexp, (0, rows), value=torch.inf)
    unused = torch.zeros((), dtype=torch.int64, device=q.device)
    k, v = _repeated(k, q), _repeated(v, q)
    mask = _aligned(bias, q, k)
    wanted = [True, True, True, False]
    dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, mask, out, logsumexp, unused, unused, 0.0, wanted, causal, scale=scale
    )
    return dq, dk.view(b, g, -1, t, d).sum(2), dv.view(b, g, -1, t, d).sum(2)


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    """Key or value heads as many as query heads: this kernel knows no groups."""
    if x.shape[1] != q.shape[1]:
        return x.repeat_interleave(q.shape[1] // x.shape[1], 1)
    return x


def _aligned(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The bias in memory as this kernel wants it: rows that start at multiples of 16 elements."""
    if bias is None:
        return None
    b = q.shape[0]
    t = k.shape[2]
    padded = torch.nn.functional.pad(bias, (0, -t % 16))[..., :t]
    return padded.expand(b, q.shape[1], -1, -1)


_FUSED: tuple[Kernel, ...] = (
    (_cpu_forward, _cpu_backward),
    (_flash_forward, _flash_backward),
    (_efficient_forward, _efficient_backward),
)


@cache
def kernel_of(
    device: torch.device, dtype: torch.dtype, head_size: int, groups: bool, biased: bool
) -> Kernel:
    """The first fused kernel that runs here and agrees with the plain twin; else the twin."""
    if device.type == "meta":
        return PLAIN
    # of its own: a try draws none of the user's random numbers
    generator = torch.Generator().manual_seed(0)

    def random(heads: int) -> Tensor:
        drawn = torch.randn(
            1, heads, 32, head_size, generator=generator, dtype=torch.float64, device="cpu"
        )
        return drawn.to(device, dtype)

    q = random(4)
    k = random(2 if groups else 4)
    v = random(2 if groups else 4)
    grad = random(4)
    bias = None
    if biased:
        bias = torch.zeros(1, 1, 32, 32, dtype=dtype, device=device)
        bias[..., 16:] = -torch.inf
    expected = _both(PLAIN, q, k, v, grad, bias)
    # kernels sum in another order; 16-bit ones round their output as well
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-4}.get(dtype, 0.05)
    for kernel in _FUSED:
        # flash attention's signature has no bias
        if biased and kernel[0] is _flash_forward:
            continue
        try:
            computed = _both(kernel, q, k, v, grad, bias)
        except (RuntimeError, NotImplementedError, TypeError, AttributeError):
            # not on this device, or renamed
            continue
        pairs = zip(computed, expected, strict=True)
        if all((a - b).abs().max() <= tolerance * (1 + b.abs().max()) for a, b in pairs):
            return kernel
    return PLAIN


def _both(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, bias: Tensor | None
) -> list[Tensor]:
    forward, backward = kernel
    scale = q.shape[3] ** -0.5
    causal = bias is None
    with torch.no_grad():
        out, logsumexp = forward(q, k, v, causal, bias, scale)
        gradients = backward(grad, q, k, v, out, logsumexp, causal, bias, scale)
    return [x.double() for x in (out, logsumexp, *gradients)]


def has_kernel(q: Tensor, k: Tensor) -> bool:
    """Whether a fused kernel serves tensors like these."""
    return kernel_of(q.device, q.dtype, q.shape[3], q.shape[1] != k.shape[1], False) is not PLAIN


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    bias: Tensor | None = None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T + bias) v, [b, a, n, d], and the logsumexp of its rows, [b, a, n] in float32 at least.

    q [b, a, n, d], k and v [b, g, t, d]. causal: query i sees keys 0 .. i, of as many keys as queries. bias: [b or 1,
    1, n, t] in q's dtype, -inf where a query does not see a key. A row that sees none is 0, its logsumexp -inf.
    """
    forward, _ = kernel_of(
        q.device, q.dtype, q.shape[3], q.shape[1] != k.shape[1], bias is not None
    )
    out, logsumexp = forward(q, k, v, causal, bias, scale)
    # fused kernels tell 0 of a row without keys, which would weigh as much as a key
    if bias is not None:
        logsumexp = logsumexp.masked_fill((bias == -torch.inf).all(-1), -torch.inf)
    return out, logsumexp


def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    *,
    causal: bool = False,
    bias: Tensor | None = None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v that pass through this block.

    out, logsumexp: of the whole rows, merged over all blocks of keys (arXiv 2310.01889).
    """
    grad = grad.contiguous()
    out = out.contiguous()
    logsumexp = logsumexp.contiguous()
    _, backward = kernel_of(
        q.device, q.dtype, q.shape[3], q.shape[1] != k.shape[1], bias is not None
    )
    return backward(grad, q, k, v, out, logsumexp, causal, bias, scale)


def merge(out: Tensor, logsumexp: Tensor, other: Tensor, other_logsumexp: Tensor) -> None:
    """Add the attention of other keys to (out, logsumexp), in place, in out's dtype.

    logsumexp must be finite: every row has seen a key.
    """
    total = torch.logaddexp(logsumexp, other_logsumexp)
    out.mul_((logsumexp - total).exp_()[..., None]).add_(
        other * (other_logsumexp - total).exp_()[..., None]
    )
    logsumexp.copy_(total)
