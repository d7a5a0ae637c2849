"""Output layer and loss in chunks equal the whole logits' loss: any gradient per token, tied or not, over ranks."""

import pytest
import torch
import torch.nn.functional as F

from core.autograd import Comm, StageContext, WeightGradBag
from core.models.gpt import GPTModel, llama_spec
from core.models.gpt.head_loss import head_loss
from core.parallel_state import ParallelState
from core.tensor_parallel import vocab_parallel_cross_entropy
from core.testing.live import LiveBytes
from tests.parity.test_universal import config
from tests.parity.whole import assert_same, whole_gradients
from tests.states import state

S, B, VOCAB = 12, 3, 37


def batch():
    generator = torch.Generator().manual_seed(2)
    tokens, labels = torch.randint(VOCAB, (2, B, S), generator=generator)
    labels[0, 3:9] = -100
    upstream = torch.randn(B, S, generator=generator, dtype=torch.float64)
    return tokens, labels, upstream


def gradients(ps, chunk, tied, main_grad=False):
    """Loss per token and gradients, with another upstream gradient for each token."""
    made = GPTModel(
        config("llama"), llama_spec(), VOCAB, S, share_embeddings_and_output_weights=tied, loss_chunk=chunk,
        parallel=ps, seed=3,
    )  # fmt: skip
    tokens, labels, upstream = batch()
    bag = WeightGradBag()
    head = made.embedding.word_embeddings.weight if tied else made.output_layer.weight
    if main_grad:
        head.main_grad = torch.zeros_like(head)
        made.stage.begin(seed=0, step=0, microbatch=0, bag=bag)
    loss = made(tokens, labels=labels)
    loss.backward(upstream)
    if main_grad:
        assert any(parameter is head for parameter in bag.parameters()), "W tells when it has arrived"
        bag.run()
    return loss.detach(), whole_gradients(made, ps)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 36, 1000])
def test_chunks_equal_the_whole(single, chunk, tied):
    torch.set_default_dtype(torch.float64)
    try:
        loss, expected = gradients(single, None, tied)
        for main_grad in (False, True):
            found, got = gradients(single, chunk, tied, main_grad)
            torch.testing.assert_close(found, loss, rtol=1e-13, atol=1e-13)
            assert_same(got, expected, 1e-12)
        assert (loss[batch()[1] == -100] == 0).all()
    finally:
        torch.set_default_dtype(torch.float32)


def over_ranks(sp, tied, main_grad):
    ps = state(tp=torch.distributed.get_world_size(), sp=sp)
    loss, expected = gradients(ps, None, tied)
    found, got = gradients(ps, 5, tied, main_grad)
    torch.testing.assert_close(found, loss, rtol=1e-13, atol=1e-13)
    assert_same(got, expected, 1e-12)


@pytest.mark.parametrize(
    "world, sp, tied, main_grad", [(2, False, False, True), (2, True, True, False), (4, True, False, True)]
)
def test_chunks_equal_the_whole_over_tensor_ranks(ranks, world, sp, tied, main_grad):
    ranks(over_ranks, sp, tied, main_grad, world=world)


def tensors(n, h, v, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 1, h, generator=generator).to(dtype).requires_grad_()
    weight = torch.nn.Parameter((torch.randn(v, h, generator=generator) / h**0.5).to(dtype))
    return x, weight, torch.randint(v, (n, 1), generator=generator)


def ours(x, weight, labels, chunk):
    how = {"stage": StageContext(), "comm": Comm(), "group": None, "vocab_size": weight.shape[0]}
    return head_loss(x, weight, labels, chunk=chunk, **how)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch 2.13 has it")
def test_torchs_chunked_loss_agrees():
    x, weight, labels = tensors(40, 16, 50, torch.float32)
    options = torch.nn.LinearCrossEntropyOptions()
    expected = F.linear_cross_entropy(x[:, 0], weight, labels[:, 0], reduction="none", options=options)
    upstream = torch.linspace(-1, 1, 40)
    wanted = torch.autograd.grad(expected, (x, weight), upstream)
    found = ours(x, weight, labels, 7)
    torch.testing.assert_close(found[:, 0], expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(torch.autograd.grad(found, (x, weight), upstream[:, None]), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_sixteen_bits_sum_weights_in_float32():
    x, weight, labels = tensors(512, 16, 50, torch.bfloat16)
    wide = x.detach().float().requires_grad_(), torch.nn.Parameter(weight.detach().float())
    (expected,) = torch.autograd.grad(F.cross_entropy(wide[0][:, 0] @ wide[1].t(), labels[:, 0]), wide[1])
    (found,) = torch.autograd.grad(ours(x, weight, labels, 8).mean(), weight)
    (whole,) = torch.autograd.grad(ours(x, weight, labels, 512).mean(), weight)
    error, whole_error = ((g.float() - expected).norm() / expected.norm() for g in (found, whole))
    assert error <= 1.5 * whole_error, "each chunk's product is rounded, their sum is not"


def peak(chunk):
    """Most bytes of tensors alive at once in the loss and its backward, the weight's gradient among them."""
    x, weight, labels = tensors(1024, 16, 2048, torch.float32)
    with LiveBytes(x, weight, labels) as live:
        if chunk is None:
            logits = F.linear(x, weight)
            loss = vocab_parallel_cross_entropy(logits, labels, inplace=True)
            del logits
        else:
            loss = ours(x, weight, labels, chunk)
        loss.sum().backward()
    return live.peak


def test_a_chunk_of_logits_is_all_that_exists():
    assert peak(64) <= 0.15 * peak(None)


def test_no_chunk_is_refused():
    with pytest.raises(ValueError, match="loss_chunk=0 must be at least 1 token"):
        GPTModel(config("llama"), llama_spec(), VOCAB, S, loss_chunk=0, parallel=ParallelState.single("cpu"))
