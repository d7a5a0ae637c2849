"""From the fused projection to query, key and value heads, rotated on the way, with one buffer each way.

Written by hand because autograd would allocate and add a zero-filled copy of the whole fused tensor for each
slice. Letters: s sequence, b microbatch, g query groups here, r query heads per group, d head size.
"""

from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from core.autograd.gradients import no_second_derivative

Tables = tuple[Tensor, Tensor]
# by the layers' global numbers; None does not rotate
LayerTables = list[Tables | None]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, sign: int) -> None:
    """out = x turned by the tables (sign -1: turned back), over the first 2 * cos.shape[-1] dims of the head."""
    # Halves convention: dim i is rotated together with dim i + half. Dims beyond (partial rotary) are copied.
    width = 2 * cos.shape[-1]
    partial = width < x.shape[-1]
    x1, x2 = (x[..., :width] if partial else x).chunk(2, -1)
    o1, o2 = (out[..., :width] if partial else out).chunk(2, -1)
    torch.mul(x1, cos, out=o1).addcmul_(x2, sin, value=-sign)
    torch.mul(x2, cos, out=o2).addcmul_(x1, sin, value=sign)
    if partial:
        out[..., width:].copy_(x[..., width:])


def _split(
    y: Tensor, g: int, d: int, cos: Tensor | None, sin: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """q [b, g r, s, d] and k [b, g, s, d], rotated; v [b, g, s, d], a view of y."""
    s, b, width = y.shape
    r = width // (g * d) - 2
    # of each group: r query heads, then its key head, then its value head
    fused = y.view(s, b, g, r + 2, d).permute(1, 2, 3, 0, 4)  # [b, g, r+2, s, d]
    q = fused[:, :, :r]
    k = fused[:, :, r]
    v = fused[:, :, r + 1]
    new_q = y.new_empty(b, g, r, s, d)
    new_k = y.new_empty(b, g, s, d)
    if cos is None or sin is None:
        new_q.copy_(q)
        new_k.copy_(k)
    else:
        _rotate(q, cos[:, None], sin[:, None], new_q, 1)
        _rotate(k, cos, sin, new_k, 1)
    return new_q.view(b, g * r, s, d), new_k, v


class _SplitQKV(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, g: int, d: int, cos: Tensor | None, sin: Tensor | None
    ) -> tuple[Tensor, ...]:
        s, b, width = y.shape
        ctx.save_for_backward(cos, sin)
        ctx.shape = (s, b, g, width // (g * d) - 2, d)
        q, k, v = _split(y, g, d, cos, sin)
        return q, k, v.contiguous()

    @staticmethod
    def backward(ctx: Any, gq: Tensor, gk: Tensor, gv: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise no_second_derivative("the fused split of query, key and value")
        cos, sin = ctx.saved_tensors
        s, b, g, r, d = ctx.shape
        # One buffer for the gradient of the fused tensor; a rotation's gradient is the rotation back.
        grad = gq.new_empty(s, b, g, r + 2, d)
        fused = grad.permute(1, 2, 3, 0, 4)
        gq = gq.reshape(b, g, r, s, d)
        if cos is None:
            fused[:, :, :r].copy_(gq)
            fused[:, :, r].copy_(gk)
        else:
            _rotate(gq, cos[:, None], sin[:, None], fused[:, :, :r], -1)
            _rotate(gk, cos, sin, fused[:, :, r], -1)
        fused[:, :, r + 1].copy_(gv)
        return grad.view(s, b, g * (r + 2) * d), None, None, None, None


class _RotateHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        out = torch.empty_like(x)
        _rotate(x, cos, sin, out, 1)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():
            raise no_second_derivative("the fused rotary embedding")
        cos, sin = ctx.saved_tensors
        out = torch.empty_like(g)
        _rotate(g, cos, sin, out, -1)
        return out, None, None


def split_qkv(
    y: Tensor, groups: int, head_size: int, tables: Tables | None
) -> tuple[Tensor, Tensor, Tensor]:
    """y [s, b, g (r+2) d] -> q [b, g r, s, d], k [b, g, s, d], v [b, g, s, d]; q and k rotated with `tables`."""
    # the compiler fuses by itself, and knows no views as `out`
    if torch.compiler.is_compiling():
        return split_qkv_plainly(y, groups, head_size, tables)
    if tables is not None:
        cos, sin = tables
    else:
        cos, sin = (None, None)
    if not torch.is_grad_enabled():  # nothing to save
        q, k, v = _split(y, groups, head_size, cos, sin)
        # one token's goes into a cache, which copies it
        return (q, k, v if y.shape[0] == 1 else v.contiguous())
    q, k, v = _SplitQKV.apply(y, groups, head_size, cos, sin)
    return q, k, v


def split_qkv_plainly(
    y: Tensor, groups: int, head_size: int, tables: Tables | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`split_qkv` in plain autograd: for the compiler, and what the tests compare with."""
    fused = rearrange(y, "s b (g r d) -> b g r s d", g=groups, d=head_size)
    q = fused[:, :, :-2]
    k = fused[:, :, -2]
    v = fused[:, :, -1]
    if tables is not None:
        q = rotate_plainly(q, tables[0][:, None], tables[1][:, None])
        k = rotate_plainly(k, *tables)
    return rearrange(q, "b g r s d -> b (g r) s d"), k, v


def rotate(x: Tensor, tables: Tables) -> Tensor:
    """Heads x [b, a, s, d] turned by (cos, sin) of [b or 1, 1, s, d/2]."""
    if torch.compiler.is_compiling():
        return rotate_plainly(x, *tables)
    out: Tensor = _RotateHeads.apply(x, *tables)
    return out


def rotate_plainly(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate` in plain autograd."""
    half = cos.shape[-1]
    x1 = x[..., :half]
    x2 = x[..., half : 2 * half]
    rest = x[..., 2 * half :]
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest), -1)
