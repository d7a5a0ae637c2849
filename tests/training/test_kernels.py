"""Kernels that a run chooses, and what reaches an accelerator without stopping the host; with stand-ins for one."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from core.autograd import products
from core.data_parallel.buffers.assembly import check_device
from core.optimizer.state.state_buffers import paired_chunks
from core.parallel_state.collectives import checks
from core.training.run.loader import moved_to
from core.transformer.attention import kernels


def test_attention_has_a_stated_priority_inside_a_run_only():
    def order():
        return [SDPBackend(number) for number in torch._C._get_sdp_priority_order()]

    before = order()
    with kernels.kernels_of_run(torch.device("cuda")):
        assert order()[:4] == list(kernels.PRIORITY["cuda"])
        q = torch.randn(1, 4, 8, 8, requires_grad=True)
        k = torch.randn(1, 2, 8, 8)
        F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True).sum().backward()
    assert order() == before
    with kernels.kernels_of_run(torch.device("cpu")):
        assert order() == before, "torch's own order"


def test_deterministic_algorithms_end_with_the_run(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with kernels.kernels_of_run(torch.device("cpu"), deterministic=True):
        assert torch.are_deterministic_algorithms_enabled()
        table = torch.zeros(3, 2)
        table.index_add_(0, torch.tensor([1, 1]), torch.ones(2, 2))
    assert not torch.are_deterministic_algorithms_enabled()


class Copies(torch.Tensor):
    """Remembers how it was copied."""

    def pin_memory(self):
        assert self.is_contiguous()
        self.pinned = True
        return self

    def to(self, device, *, non_blocking=False):
        return (getattr(self, "pinned", False), device, non_blocking)


class OnAnAccelerator(torch.Tensor):
    """Says that it is on one."""

    device = torch.device("cuda", 0)


def test_batches_are_pinned_and_copied_beside_the_step():
    cuda = torch.device("cuda")
    rows = {"tokens": torch.zeros(2).as_subclass(Copies), "document_begin": torch.zeros(2)}
    # one row for all sequences: torch pins no expanded tensor
    rows["position_ids"] = torch.zeros(1, 2).as_subclass(Copies).expand(3, 2)
    moved = moved_to(cuda)(rows)
    assert moved["tokens"] == (True, cuda, True) and moved["document_begin"] is rows["document_begin"]
    assert moved["position_ids"] == (True, cuda, True)


def test_a_batch_on_the_device_stays_there():
    rows = {"tokens": torch.zeros(2, device="meta")}
    assert moved_to(torch.device("meta"))(rows)["tokens"] is rows["tokens"]


def test_main_weights_are_compared_in_few_passes_on_a_device():
    """A bucket of 2^23 elements is one, 1.4 billion at most 43; of the size of a CPU's cache they would be 5,491."""
    for elements, count in ((1 << 23, 1), (1_439_270_912, 43)):
        main = torch.empty(elements, device="meta")
        parts = list(paired_chunks(main, torch.empty_like(main, dtype=torch.bfloat16)))
        assert len(parts) == count and sum(a.numel() for a, _ in parts) == elements
    assert {a.numel() for a, _ in paired_chunks(torch.empty(1 << 20), torch.empty(1 << 20))} == {1 << 18}


def test_weights_on_an_accelerator_that_the_state_is_not_on_are_refused():
    weight = torch.zeros(2).as_subclass(OnAnAccelerator)
    with pytest.raises(ValueError, match=r"layer\.weight is on cuda:0, the parallel state on cpu.*nccl"):
        check_device({weight: "layer.weight"}, torch.device("cpu"))
    check_device({weight: "layer.weight"}, torch.device("cuda", 0))


@pytest.mark.parametrize(("drops", "expected"), [(False, True), (True, False)])
def test_a_mixed_product_that_drops_what_is_there_is_not_used(monkeypatch, drops, expected):
    def addmm(target, a, b, *, out_dtype, out):
        return out.copy_((a.float() @ b.float()) + (0 if drops else target.clone()))

    monkeypatch.setattr(torch, "addmm", addmm)
    assert products._multiplies_into_float32.__wrapped__("cpu") is expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_mixed_words_tell_every_difference(dtype, monkeypatch):
    """One flipped bit anywhere, two elements that changed places, other lengths; equal for a copy."""
    x = torch.randint(0, 200, (7, 11), generator=torch.Generator().manual_seed(1)).to(dtype)
    words = checks.mixed_words(x).tolist()
    assert checks.mixed_words(x.t().contiguous().t()).tolist() == words
    assert checks.mixed_words(torch.cat((x[:1], x))[1:]).tolist() == words, "a view that begins inside of a storage"
    seen = {tuple(words)}
    bits = x.reshape(-1).view(torch.uint8)
    for byte in range(bits.numel()):
        bits[byte] ^= 1
        seen.add(tuple(checks.mixed_words(x).tolist()))
        bits[byte] ^= 1
    assert len(seen) == bits.numel() + 1
    swapped = x.reshape(-1).clone()
    swapped[[0, -1]] = swapped[[-1, 0]]
    assert checks.mixed_words(swapped).tolist() != words or swapped[0] == swapped[-1]
    assert checks.mixed_words(torch.cat((x.reshape(-1), x.reshape(-1)[:1]))).tolist() != words
    monkeypatch.setattr(checks, "MIXED", 16)
    assert checks.mixed_words(x).tolist() == words, "in parts"
    assert checks.mixed_words(torch.cat((x[:1], x))[1:]).tolist() == words
