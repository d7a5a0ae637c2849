"""Context ranks in a plain loop, without an executor: torch's DDP, and mistakes that one rank makes."""

import pytest
from torch.nn.parallel import DistributedDataParallel

from core.models.gpt import GPTModel
from core.parallel_state import context_batch
from tests.parity.contexts import ROWS, SEED, VOCAB, Case, S, batch, config, one_process, spec
from tests.parity.whole import assert_same, whole_gradients
from tests.states import state


def model_of(ps, style="llama"):
    return GPTModel(config(style), spec(style), VOCAB, S, parallel=ps, seed=SEED)


def averaged_by_torch(case):
    """Gradients of the sum over all tokens: DDP takes the mean over its ranks."""
    ps = state(cp=case.cp, cp_comm_type=case.kind)
    group = ps.group("dp-cp")
    model = model_of(ps)
    wrapped = DistributedDataParallel(model, process_group=group.process_group)
    rows = ROWS // case.dp
    whole = {name: value[ps.index("dp") * rows :][:rows] for name, value in batch(case.packed, False).items()}
    for _ in range(2):
        model.zero_grad()
        (wrapped(**context_batch(whole, ps)).sum() * group.size).backward()
    assert_same(whole_gradients(model, ps), one_process(case)[0])


@pytest.mark.parametrize(
    "case", [Case(cp=2), Case(cp=2, kind="a2a", packed=True), Case(cp=2, dp=2, kind="p2p", packed=True)]
)
def test_torchs_ddp_over_data_and_context_ranks_trains(ranks, case):
    ranks(averaged_by_torch, case, world=case.world)


def one_rank_errs(kind, mistake):
    """The ValueError of this rank in its third forward, where context rank 1 has bad documents."""
    ps = state(cp=2, cp_comm_type=kind)
    model, whole = model_of(ps), batch(True, False)
    mine = context_batch(whole, ps)
    for _ in range(2):
        model(**mine).sum().backward()
    begin = mine["document_begin"].clone()
    if ps.index("cp") == 1:
        begin = {"later": begin + 30, "dtype": begin.int(), "decreasing": begin.flip(1)}[mistake]
    with pytest.raises(ValueError) as error:
        model(**{**mine, "document_begin": begin})
    model(**mine).sum().backward()  # the ranks are still in step
    return str(error.value)


@pytest.mark.parametrize("kind, mistake", [("all_gather", "later"), ("p2p", "dtype"), ("a2a", "decreasing")])
def test_bad_documents_of_one_rank_are_named_on_all(ranks, kind, mistake):
    first, second = ranks(one_rank_errs, kind, mistake, world=2)
    assert first == second
    assert first.startswith("rank 1: document_begin") and "rank 0" not in first


def some_have_documents():
    ps = state(cp=2)
    mine = context_batch(batch(True, False), ps)
    if ps.index("cp") == 0:
        del mine["document_begin"]
    with pytest.raises(ValueError, match=r"1 of 2 context ranks \(\[1\]\) were given document_begin"):
        model_of(ps)(**mine)


def test_documents_on_some_ranks_only_are_refused(ranks):
    ranks(some_have_documents, world=2)
