"""One block of attention: fused kernels against the plain twin, the twin against torch, and merging."""

import pytest
import torch
import torch.nn.functional as F

from core.context_parallel.kernels import (
    PLAIN,
    attend,
    attend_backward,
    kernel_of,
    merge,
    plain_backward,
    plain_forward,
)

SCALE = 0.5


def tensors(n, t, groups=2, dtype=torch.float64):
    shapes = [(2, 4, n, 4), (2, groups, t, 4), (2, groups, t, 4), (2, 4, n, 4)]
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def random_bias(n, t, dtype=torch.float64):
    """Half of the pairs hidden, and row 1 sees nothing."""
    hidden = torch.rand(2, 1, n, t) < 0.5
    hidden[:, :, :, 0] = False
    hidden[:, :, 1] = True
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, -torch.inf)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("causal, n, t", [(True, 7, 7), (False, 5, 9), (False, 40, 33)])
def test_the_plain_twin_is_attention_and_its_gradient(causal, n, t, groups):
    q, k, v, grad = tensors(n, t, groups)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*leaves, is_causal=causal, scale=SCALE, enable_gqa=True)
    expected.backward(grad)
    out, logsumexp = plain_forward(q, k, v, causal, None, SCALE)
    found = plain_backward(grad, q, k, v, out, logsumexp, causal, None, SCALE)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-12, atol=1e-12)
    for a, leaf in zip(found, leaves, strict=True):
        torch.testing.assert_close(a, leaf.grad, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_the_fused_kernel_is_the_plain_twin(dtype, tolerance, groups, biased):
    q, k, v, grad = tensors(40, 33, groups, dtype)
    assert kernel_of(q.device, dtype, 4, groups != 4, biased) is not PLAIN, "this machine's CPU kernel was not found"
    bias = random_bias(40, 33, dtype) if biased else None
    out, logsumexp = attend(q, k, v, bias=bias, scale=SCALE)
    plain_out, plain_logsumexp = plain_forward(q, k, v, False, bias, SCALE)
    assert logsumexp.dtype == plain_logsumexp.dtype
    if biased:
        assert (logsumexp[:, :, 1] == -torch.inf).all() and (out[:, :, 1] == 0).all()
    torch.testing.assert_close(logsumexp, plain_logsumexp, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(out, plain_out, rtol=tolerance, atol=tolerance)
    whole = torch.logaddexp(plain_logsumexp, torch.zeros_like(plain_logsumexp))  # as merged with other keys
    found = attend_backward(grad, q, k, v, plain_out, whole, bias=bias, scale=SCALE)
    expected = plain_backward(grad, q, k, v, plain_out, whole, False, bias, SCALE)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a, b, rtol=10 * tolerance, atol=10 * tolerance)


def test_a_device_without_a_fused_kernel_takes_the_twin():
    assert kernel_of(torch.device("meta"), torch.float32, 4, False, False) is PLAIN


def test_blocks_merge_to_the_whole_also_where_one_has_no_key_for_a_row():
    q, k, v, _ = tensors(6, 12)
    bias = torch.zeros(2, 1, 6, 12, dtype=torch.float64)
    bias[:, :, 2, 8:] = -torch.inf
    expected, _ = plain_forward(q, k, v, False, bias, SCALE)
    out, logsumexp = attend(q, k[:, :, :8], v[:, :, :8], bias=bias[..., :8].contiguous(), scale=SCALE)
    other = attend(q, k[:, :, 8:], v[:, :, 8:], bias=bias[..., 8:].contiguous(), scale=SCALE)
    merge(out, logsumexp, *other)
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-13)
    broken_out, broken = attend(q, k[:, :, :8], v[:, :, :8], bias=bias[..., :8].contiguous(), scale=SCALE)
    merge(broken_out, broken, other[0], other[1].masked_fill(other[1] == -torch.inf, 0))  # as the kernel tells it
    assert (broken_out - expected).abs().max() > 1e-2, "the trap is seen by this test"
