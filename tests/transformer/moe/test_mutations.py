"""Mistakes of others' experts, put into ours: each breaks a comparison with one process that holds without it."""

import time

import pytest
import torch

from core.optimizer.step import watch
from core.parallel_state import Layout, ParallelConfig, ParallelState
from core.pipeline import PipelineError
from core.training import next_token_loss
from core.transformer.moe import dispatch
from core.transformer.moe.balance import Balance
from core.transformer.moe.dispatch import Dispatch
from core.transformer.moe.router import Router
from tests.parity.pipelines import differences
from tests.pool import Pool
from tests.transformer.moe import layouts
from tests.transformer.moe.layouts import on_layout, reference, step, trained, trained_alone


def aux_times_tp(patch):
    """Every tensor rank adds the auxiliary loss of all tokens."""
    build = Balance.__init__

    def of_all_tokens(self, of, router):
        build(self, of, router)
        self._aux_coefficient *= of.parallel.size("tp")

    patch.setattr(Balance, "__init__", of_all_tokens)


def counted_twice(patch):
    """A forward that runs again is counted again."""
    patch.setattr(dispatch, "note", lambda compute: compute())


def norm_of_an_expert_rank(patch):
    """Each expert rank, and those with the same experts, clip by a norm of their own."""
    total = watch.sum_in_rank_order

    def of_mine(local, message, ps):
        _, rows = total(local, message, ps)
        mine = [rows[rank][0] for rank in ps.group("edp").ranks] if ps.group("edp") else [rows[ps.rank][0]]
        return torch.stack(mine).sum(), rows

    patch.setattr(watch, "sum_in_rank_order", of_mine)


def experts_summed_over_data_ranks(patch):
    """Gradients of experts are added to those of other experts on the other data ranks."""
    patch.setattr(Layout, "gradient_groups", property(lambda self: ("dp-cp", *sorted(self.partial))))


GLOBAL = {"balancing": "global"}
# mistake: (what is compared, facts, layout of two ranks)
MISTAKES = {
    aux_times_tp: ("step", {"balancing": "sequence"}, {"tp": 2, "expert": 2}),
    counted_twice: ("training", GLOBAL, {"expert": 2, "recompute": "layer"}),
    norm_of_an_expert_rank: ("training", {}, {"expert": 2, "zero": 1}),
    experts_summed_over_data_ranks: ("step", {}, {"expert": 2}),
}


def breaks(compared, facts, layout):
    """What differs from one process: of a step, or of weights and counts after three."""
    try:
        if compared == "step":
            return differences(step(facts, **layout), reference(**facts)[:3])
        found, want = trained(facts, **layout), trained_alone(**facts)
    except AssertionError as error:  # replicas must agree, before anything is compared
        return [str(error)]
    return [name for name in want if (found[name] - want[name]).abs().max() > 1e-10 * want[name].abs().max()]


def with_and_without(mistake, case):
    right = breaks(*case)
    with pytest.MonkeyPatch.context() as patch:
        mistake(patch)
        return right, breaks(*case)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_each_mistake_is_seen(ranks, mistake):
    right, wrong = zip(*ranks(with_and_without, mistake, MISTAKES[mistake]), strict=True)
    assert right == ([], [])
    assert any(wrong), mistake.__doc__


def all_to_the_first_rank(self, scores, logits):
    return torch.tensor([0, 1]).expand(len(scores), 2).contiguous()


def skipped_without_rows(patch):
    """A rank whose experts get no rows leaves the exchanges of a layer out."""
    start, there, back = Dispatch.start, Dispatch.to_experts, Dispatch.from_experts

    def starts(self, x, per_row):
        return start(self, x, per_row) if sum(self.receive) else lambda: x[:0]

    def to_experts(self, x, per_row):
        return there(self, x, per_row) if sum(self.receive) else x[:0]

    def from_experts(self, rows, per_row):
        tokens = len(self.order) if per_row == 1 else len(self.order) // per_row
        return back(self, rows, per_row) if sum(self.receive) else rows.new_zeros(tokens, rows.shape[1])

    patch.setattr(Dispatch, "start", starts)
    patch.setattr(Dispatch, "to_experts", to_experts)
    patch.setattr(Dispatch, "from_experts", from_experts)


def debugged():
    """One rank's experts get all rows: right; then each rank is told what the others were about to do."""
    ps = ParallelState.build(ParallelConfig(expert=2), device="cpu", debug=True, timeout_s=5.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts, "state", lambda **sizes: ps)
        patch.setattr(Router, "_chosen", all_to_the_first_rank)
        want = reference.__wrapped__()[:3]  # the cached one is of the router's own choice
        right = differences(step({}, expert=2, schedule="1f1b"), want)
        skipped_without_rows(patch)
        _, _, executor, mine = on_layout({}, 0, "none", "none", expert=2)
        with pytest.raises(RuntimeError) as error:
            executor.step(mine, next_token_loss)
    ps.destroy()
    return right, str(error.value)


def test_debug_mode_says_which_exchange_a_rank_without_rows_skips(ranks):
    for right, told in ranks(debugged):
        assert right == []
        assert "the ranks of group ep make different collective calls" in told
        assert "rank 0: all_to_all (0, 16) float64 at transformer/moe/dispatch.py" in told
        assert "rank 1: all_to_all (2, 3) int64 at transformer/moe/dispatch.py" in told


def hangs():
    """The same without debug mode, where nothing follows that another call could be taken for: one layer."""
    layout = {"expert": 2, "schedule": "1f1b", "recompute": "none", "zero": 0}
    _, shard, executor, mine = on_layout({"layers": 1}, **layout)
    executor.use_microbatches(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Router, "_chosen", all_to_the_first_rank)
        shard.zero_grad()
        executor.step(mine, next_token_loss)
        shard.zero_grad()
        shard.ps.set_timeout(1.0)
        skipped_without_rows(patch)
        begin = time.perf_counter()
        with pytest.raises(PipelineError) as error:
            executor.step(mine, next_token_loss)
    return time.perf_counter() - begin, str(error.value)


def test_an_exchange_that_a_rank_without_rows_skips_ends_and_names_the_ranks():
    pool = Pool()  # a pair that timed out is closed for ever: not the session's pool
    try:
        for seconds, told in pool(hangs, timeout=20):
            assert seconds < 5
            assert "rank 0, stage 0, microbatch 0, action F" in told
            assert "rank 0 waited in vain for rank 1 at an all-to-all" in told
            assert "rank 1 waited in vain for rank 0 at the gradient sum" in told
    finally:
        pool.close()
