"""Attention over context ranks equals one process, forward and backward, for every way of exchanging keys."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.context_parallel import Documents, Exchange, begin_of_rows, context_attention, document_rows, within_window
from core.parallel_state import ContextRows, ParallelState
from tests.context_parallel.rows import documents, error, on_rank, reference, whole

WAYS = [(2, "all_gather", None), (2, "p2p", None), (2, "a2a", None), (4, "all_gather", None), (4, "p2p", None)]
WAYS += [(4, "a2a", None), (4, "a2a+p2p", 2), (3, "all_gather", None), (3, "p2p", None)]
CUTS = {"none": None, "some": [[1, 5, 6, 30], [24]], "edges": [[8, 16, 24], [12, 36]], "single": [range(1, 48), [47]]}
SIZES = {"heads": 8, "groups": 4}


def compare(s, kind, ulysses, cuts, sizes):
    found, rows = on_rank(s, kind, ulysses, cuts, sizes)
    return error(found, reference(s, cuts, **sizes), rows)


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("world, kind, ulysses", WAYS)
def test_every_way_equals_one_process(ranks, world, kind, ulysses, cuts):
    """Documents of one token, cuts on the edges of chunks, blocks without any key among them."""
    assert max(ranks(compare, 48, kind, ulysses, CUTS[cuts], SIZES, world=world)) <= 1e-13


def alone(q, k, v, grad, begin, window=None):
    """One process: out, dq, dk, dv with documents."""
    ps = ParallelState.single("cpu")
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    found = begin_of_rows(begin, ps) if begin is not None else None
    if window is not None:
        found = within_window(found, window, document_rows(q.shape[2], ContextRows()), torch.device("cpu"))
    out = context_attention(*leaves, Exchange(ps), documents=found, scale=q.shape[3] ** -0.5)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves)]


@given(st.integers(1, 600), st.data())
@settings(max_examples=25, deadline=None)
def test_random_documents_in_one_process(s, data):
    cuts = [data.draw(st.sets(st.integers(0, s - 1), max_size=8)) for _ in range(2)]
    found = alone(*whole(s), documents(s, cuts))
    assert error(found, reference(s, cuts), torch.arange(s)) <= 1e-12


@pytest.mark.parametrize("window", [2, 3, 40, 700])
@pytest.mark.parametrize("cuts", [None, [[5, 300], [290]]])
def test_windows_in_one_process(window, cuts):
    s = 600
    found = alone(*whole(s), documents(s, cuts) if cuts else None, window)
    assert error(found, reference(s, cuts, window), torch.arange(s)) <= 1e-12


def test_one_document_is_one_kernel_call(monkeypatch):
    calls = count_kernels(monkeypatch)
    alone(*whole(600), torch.zeros(2, 600, dtype=torch.int64))
    assert calls == [(600, 600), (600, 600)]


def count_kernels(monkeypatch):
    """(queries, keys) of each kernel call from now on."""
    from core.context_parallel import rows_attention

    calls, attend, backward = [], rows_attention.attend, rows_attention.attend_backward

    def counted(q, k, v, **how):
        calls.append((q.shape[2], k.shape[2]))
        return attend(q, k, v, **how)

    def counted_backward(grad, q, k, *tensors, **how):
        calls.append((q.shape[2], k.shape[2]))
        return backward(grad, q, k, *tensors, **how)

    monkeypatch.setattr(rows_attention, "attend", counted)
    monkeypatch.setattr(rows_attention, "attend_backward", counted_backward)
    return calls


def test_keys_of_earlier_documents_are_not_read(monkeypatch):
    calls = count_kernels(monkeypatch)
    s = 2048
    alone(*whole(s), documents(s, [range(256, s, 256)] * 2))
    assert calls == [(256, 256)] * 16


def traffic(kind, ulysses, sizes):
    """Bytes of forward and backward that this rank's groups and links carried."""
    from tests.states import state

    ps = state(cp=torch.distributed.get_world_size(), cp_comm_type=kind, ulysses=ulysses)
    on_rank(48, kind, ulysses, None, sizes)  # connects the ring
    before = sum(t.bytes for t in ps.traffic().values())
    on_rank(48, kind, ulysses, None, sizes)
    return sum(t.bytes for t in ps.traffic().values()) - before


def test_bytes_are_those_of_the_formulas(ranks):
    """docs/concepts/context_parallel.md; b, s, d, a query heads, g groups, c ranks, in elements of 8 bytes."""
    b, s, d, a, g, c = 2, 48, 4, 8, 4, 4
    element = 8 * b * s * d
    gathered = 3 * 2 * g * element  # forward, backward, and the reduce-scatter of gradients
    assert ranks(traffic, "all_gather", None, SIZES, world=c) == [gathered] * c
    ring = 3 * 2 * g * (c - 1) * element // c  # forward, backward, and the gradients' way home
    assert ranks(traffic, "p2p", None, SIZES, world=c) == [ring] * c
    assert ranks(traffic, "a2a", None, SIZES, world=c) == [2 * (2 * a + 2 * g) * element // c] * c


def test_bounds_are_of_all_rows_of_a_microbatch():
    begin = documents(8, [[3], [5]])
    found = begin_of_rows(begin, ParallelState.single("cpu"))
    assert isinstance(found, Documents)
    assert found.bounds.tolist() == [[0, 0, 0, 0, 0, 3, 3, 3], [0, 0, 0, 3, 3, 5, 5, 5]]


def test_no_second_derivative():
    q, k, v, _ = (x.requires_grad_() for x in whole(8))
    out = context_attention(q, k, v, Exchange(ParallelState.single("cpu")), scale=0.5)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(out.sum(), q, create_graph=True)
