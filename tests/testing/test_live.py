"""The probe of live bytes: each storage once, with its size of the moment, until it is freed."""

import gc
import threading

import torch

from core.testing import LiveBytes, live_bytes

KIB = 256  # float32 elements


def test_what_is_made_counts_until_it_is_freed():
    with live_bytes() as probe:
        x = torch.zeros(KIB)
        assert probe.live == 1024
        y = x + 1
        assert probe.live == 2048
        del x
        assert probe.live == 1024 and probe.peak == 2048
        probe.reset_peak()
        assert probe.peak == 1024
        del y
    assert probe.live == 0


def test_views_share_one_storage():
    with live_bytes() as probe:
        x = torch.zeros(4, KIB)
        rows = [row.view(16, 16).t() for row in x.unbind()]
        assert probe.live == 4096
        del x, rows[1:]
        assert probe.live == 4096, "one view holds the whole"
    rows.clear()
    assert probe.live == 0


def test_a_storage_that_is_resized_counts_with_its_size_of_the_moment():
    """As ZeRO-3 frees weights: the tensor stays, its memory goes and comes."""
    flat = torch.ones(KIB)
    view = flat[10:]
    with live_bytes(flat) as probe:
        assert probe.live == 1024
        flat.untyped_storage().resize_(0)
        assert probe.live == 0
        other = torch.zeros(KIB // 2)
        assert probe.live == 512
        flat.untyped_storage().resize_(1024)
        view.fill_(2)
        assert probe.live == probe.peak == 1536
        flat.untyped_storage().resize_(0)
        del other
        assert probe.live == 0


def test_the_peak_knows_of_memory_that_was_given_back():
    flat = torch.ones(KIB)
    with live_bytes(flat) as probe:
        flat.untyped_storage().resize_(0)
        x = torch.zeros(KIB // 2)
        assert probe.peak == 1024 and probe.live == 512
        probe.reset_peak()
        y = x + 1
        assert probe.peak == 1024, "and not 2048, which are never there at once"
        del x, y


def test_existing_tensors_count_if_they_are_followed_and_not_if_they_are_ignored():
    a, b = torch.zeros(KIB), torch.zeros(2 * KIB)
    probe = live_bytes(a, ignore=[b])
    with probe:
        b.add_(1)
        b[3:].mul_(2)
        assert probe.live == 1024
        assert probe.follow(b, b[1:]).live == 3072
    del a
    assert probe.live == 2048


def test_an_address_that_is_used_again_is_another_storage():
    ignored = torch.zeros(KIB)
    probe = LiveBytes(ignored)
    del ignored
    with probe:
        kept = [torch.zeros(KIB) for _ in range(20)]  # one of them where the ignored one was
        assert probe.live == 20 * 1024
        kept.clear()
        kept = [torch.zeros(KIB) for _ in range(20)]
        assert probe.live == 20 * 1024
        del kept


def test_single_numbers_and_meta_tensors_are_nothing():
    with live_bytes() as probe:
        kept = [torch.zeros(()), torch.zeros(KIB, device="meta"), torch.ones(2)]
        assert probe.live == 0
        del kept


def test_saved_activations_live_until_backward():
    layer = torch.nn.Linear(16, 16)
    with live_bytes(ignore=layer.parameters()) as probe:
        loss = layer(torch.ones(8, 16)).sigmoid().square().sum()
        assert probe.live == 2 * 8 * 16 * 4, "of the linear its input, of the sigmoid its output"
        loss.backward()
        del loss
        for p in layer.parameters():
            p.grad = None
        gc.collect()
        assert probe.live == 0


def test_what_backward_makes_in_a_thread_of_its_own_counts():
    """Autograd's engine hands the caller's modes to its threads: an accelerator's, here that of a deep nesting."""
    threads, kept = set(), []

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, depth):
            ctx.depth = depth
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            if ctx.depth:
                with torch.enable_grad():
                    Nested.apply(gradient.detach().requires_grad_(), ctx.depth - 1).sum().backward()
            else:
                threads.add(threading.get_ident())
                kept.append(torch.zeros(KIB))
            return gradient, None

    y = Nested.apply(torch.zeros(2, requires_grad=True), 70).sum()
    with live_bytes() as probe:
        before = probe.live
        y.backward()
        assert probe.live - before >= 1024
    assert threads and threading.get_ident() not in threads, "it did not run elsewhere"
