"""Seven mistakes of others' context parallelism, put into ours: each breaks a comparison that holds without it."""

import pytest
import torch

from core.context_parallel import Exchange, ring, rows_attention
from core.parallel_state import ContextRows, ParallelState
from core.pipeline.run import single_stage
from core.transformer.dropout import Dropout
from tests.models.test_context import masks
from tests.parity.contexts import Case, differences, one_process, step


def zero_logsumexp(patch):
    """Rows of a block without any key weigh as much as a key: what fused kernels tell of them."""
    attend = rows_attention.attend

    def told_by_the_kernel(*tensors, **how):
        out, logsumexp = attend(*tensors, **how)
        return out, logsumexp.masked_fill(logsumexp == -torch.inf, 0.0)

    patch.setattr(rows_attention, "attend", told_by_the_kernel)


def stale_keys(patch):
    """The ring's backward computes with the keys of the first turn, its own, in every turn."""
    backward, real = ring.backward, ring.Passed

    def first_turn(*tensors):
        messages = []

        class Stale(real):
            def __init__(self, x, of_ring, tag):
                super().__init__(x, of_ring, tag)
                self.sent = x
                messages.append(self)

            def wait(self):
                arrived = super().wait()
                return self.sent if self is messages[0] else arrived

        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(ring, "Passed", Stale)
            return backward(*tensors)

    patch.setattr(ring, "backward", first_turn)


def local_counts(patch):
    """The loss over this rank's tokens."""
    patch.setattr(single_stage, "all_reduce", lambda total, group: total)


def positions_from_zero(patch):
    """Every rank's rows are taken for rows 0 .. s/cp - 1."""
    patch.setattr(ContextRows, "rows", lambda self, s: torch.arange(s // self.size))


def no_documents(patch):
    """Packed documents see each other."""
    of_rows = Exchange.of_rows
    patch.setattr(Exchange, "of_rows", lambda self, q, documents, scale: of_rows(self, q, None, scale))


def sums_over_dp_only(patch):
    """Gradients are summed over the data ranks, not over the context ranks, who hold other tokens."""
    group = ParallelState.group

    def data_only(self, name):
        return group(self, "dp" if name in ("dp-cp", "shard") else name)

    patch.setattr(ParallelState, "group", data_only)


def one_dropout_mask(patch):
    """All context ranks drop the same places of their rows."""
    build = Dropout.__init__

    def without_context(self, *facts, **more):
        build(self, *facts, **more)
        self.key = self.key[:3]

    patch.setattr(Dropout, "__init__", without_context)


MUTANTS = {
    zero_logsumexp: Case(cp=2, packed=True),
    stale_keys: Case(cp=2, kind="p2p"),
    local_counts: Case(cp=2),
    positions_from_zero: Case(cp=2),
    no_documents: Case(cp=2, packed=True),
    sums_over_dp_only: Case(cp=2, zero=0),
    one_dropout_mask: None,
}


def breaks(case):
    """What differs from one process. Without a case: dropout, whose masks must differ between context ranks."""
    if case is None:
        first, second = masks()
        return ["one mask"] if torch.equal(first, second) else []
    try:
        found = step(case)
    except AssertionError as error:  # replicas of one gradient must agree, before anything is compared
        return [str(error)]
    return differences(found, one_process(case))


def with_and_without(mutant, case):
    right = breaks(case)
    with pytest.MonkeyPatch.context() as patch:
        mutant(patch)
        return right, breaks(case)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_each_mistake_is_seen(ranks, mutant):
    right, wrong = zip(*ranks(with_and_without, mutant, MUTANTS[mutant], world=2), strict=True)
    assert right == ([], [])
    assert any(wrong), mutant.__doc__
