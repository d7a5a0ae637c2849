"""Vocab-parallel cross entropy equals torch's, value and gradient, for any vocabulary on any number of ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from core.tensor_parallel import padded_vocab_rows, vocab_parallel_cross_entropy
from tests.states import state


def reference(logits, labels, smoothing):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", label_smoothing=smoothing).view(
        labels.shape
    )


def compare(vocab, smoothing, dtype, inplace):
    world, rank = dist.get_world_size(), dist.get_rank()
    group = state(tp=world).group("tp")
    torch.manual_seed(2)
    full = torch.randn(5, 3, vocab, dtype=dtype) * 4
    labels = torch.randint(vocab, (5, 3))
    labels[1, 1] = labels[4, 0] = -100
    labels[0, 0] = vocab - 1
    upstream = torch.rand(5, 3, dtype=torch.float64)
    x = full.double().clone().requires_grad_()
    want = reference(x, labels, smoothing)
    (want * upstream).sum().backward()

    rows = padded_vocab_rows(vocab, world) // world
    mine = torch.full((5, 3, rows * world), 1e4, dtype=dtype)  # padding that would ruin everything if it leaked
    mine[..., :vocab] = full
    part = mine[..., rank * rows : (rank + 1) * rows].contiguous()
    kept, leaf = part.clone(), part.clone().requires_grad_()
    logits = leaf * 1
    before = logits.detach().clone()
    got = vocab_parallel_cross_entropy(
        logits, labels, group, vocab_size=vocab, label_smoothing=smoothing, inplace=inplace
    )
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    if not inplace:
        assert torch.equal(logits, before), "the user's logits are not changed"
    (got * upstream.to(got.dtype)).sum().backward()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(
        got.double(), want, rtol=1e-5 if dtype != torch.float64 else 1e-12, atol=tolerance / 100
    )
    assert got[1, 1] == 0
    valid = max(0, min(rows, vocab - rank * rows))
    assert (leaf.grad[..., valid:] == 0).all() and (leaf.grad[1, 1] == 0).all()
    expected = x.grad[..., rank * rows : rank * rows + valid]
    torch.testing.assert_close(leaf.grad[..., :valid].double(), expected, rtol=tolerance, atol=tolerance / 10)
    assert torch.equal(leaf, kept)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("vocab", [128, 101, 17])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_equals_torch(ranks, world, vocab, smoothing, dtype):
    ranks(compare, vocab, smoothing, dtype, vocab != 101, world=world)


def test_many_chunks_equal_one(monkeypatch):
    torch.manual_seed(0)
    x, labels = torch.randn(7, 50, dtype=torch.float64, requires_grad=True), torch.randint(50, (7,))
    whole = vocab_parallel_cross_entropy(x, labels)
    whole.sum().backward()
    expected, x.grad = x.grad, None
    monkeypatch.setattr("core.tensor_parallel.cross_entropy._CPU_CHUNK", 100)
    pieces = vocab_parallel_cross_entropy(x, labels)
    pieces.sum().backward()
    assert torch.equal(pieces, whole) and torch.equal(x.grad, expected)


def test_infinite_logits_are_not_hidden():
    x = torch.tensor([[0.0, torch.nan, 1.0], [0.0, 1.0, 2.0]])
    loss = vocab_parallel_cross_entropy(x, torch.tensor([0, 1]))
    assert loss[0].isnan() and loss[1].isfinite()


def test_large_logits_do_not_overflow():
    x = torch.tensor([[1000.0, 0.0, -1000.0]])
    assert vocab_parallel_cross_entropy(x, torch.tensor([0])).item() == 0.0
    assert vocab_parallel_cross_entropy(x, torch.tensor([2])).item() == 2000.0


def test_a_second_backward_is_refused_not_wrong():
    x = torch.randn(2, 5, requires_grad=True)
    loss = vocab_parallel_cross_entropy(x, torch.tensor([1, 2])).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward works once per forward"):
        loss.backward()


def test_shapes_that_disagree_are_refused():
    with pytest.raises(ValueError, match=r"logits \(2, 3, 5\) need labels \(2, 3\), got \(3, 2\)"):
        vocab_parallel_cross_entropy(torch.zeros(2, 3, 5), torch.zeros(3, 2, dtype=torch.long))
