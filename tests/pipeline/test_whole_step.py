"""Around the step: the timeline, evaluation, sampling, resuming, loss scale, what is given back."""

import time
from functools import partial

import pytest
import torch
from torch import nn

from core.models.gpt import GPTModel, gpt_stages
from core.parallel_state import ParallelState
from core.pipeline import Action, Pipeline, SingleStage
from core.pipeline.schedule import schedules as named
from core.pipeline.schedule.passes import split_backward
from core.training import next_token_loss
from core.training.generate import generate
from tests.parity.pipelines import VOCAB, S, batch, config, spec
from tests.pipeline import tiny
from tests.states import state
from tests.twins.per_parameter import PerParameterGradSync


def timelines(cases):
    """What a measured timeline is, of every schedule."""
    for name, recompute in cases:
        pipe = tiny.pipeline(name, 4, recompute=recompute)
        pipe.step(tiny.rows(4), tiny.squares)
        timeline = pipe.timeline()
        pipe.evaluate(tiny.rows(4), tiny.squares)
        assert pipe.timeline() == timeline, "of the last step, not of what was evaluated since"
        orders = split_backward(pipe.schedule).orders
        assert [[event.action for event in row] for row in timeline.rows] == [list(order) for order in orders]
        for row in timeline.rows:
            times = [t for event in row for t in (event.start, event.end)]
            assert times == sorted(times) and times[0] >= 0, "one after the other, from the start of the step"
        assert timeline.makespan == max(row[-1].end for row in timeline.rows) < 30
        assert 0 <= timeline.bubble < 1
        assert all(0 < timeline.busy(rank) <= timeline.makespan for rank in range(len(timeline.rows)))
        pipe.close()


@pytest.mark.parametrize("world", [1, 2])
def test_a_timeline_holds_the_schedules_actions(ranks, world):
    ranks(timelines, [(name, recompute) for name in named.NAMED for recompute in ("none", "stage")], world=world)


def late(rank):
    """One rank begins a step later than the others, which are in it already."""
    pipe = tiny.pipeline("zb-v", 4)
    for _ in range(2):
        pipe.step(tiny.rows(4), tiny.squares)
    if pipe.ps.rank == rank:
        time.sleep(0.5)
    pipe.step(tiny.rows(4), tiny.squares)
    timeline = pipe.timeline()
    ends = {event.action: event.end for row in timeline.rows for event in row}
    for row in timeline.rows:
        for (kind, s, m), start, _ in row:
            source = Action(kind, s - 1 if kind == "F" else s + 1, m)
            if kind in "FI" and source in ends:
                assert ends[source] < start + 0.25, f"{source} ends after {kind}{s} of microbatch {m} begins"
    return timeline.makespan


@pytest.mark.parametrize("rank", [0, 1])
def test_rows_of_ranks_that_begin_late_stand_where_they_belong(ranks, rank):
    first, second = ranks(late, rank)
    assert first == second and (rank == 0 or first > 0.5)


PROMPT = [5, 50, 3]


def gpt_facts(ps, tied):
    return config(0.0, num_layers=4), spec(), VOCAB, S, {"share_embeddings_and_output_weights": tied, "parallel": ps}


def whole_gpt(tied, rows):
    """(loss sums of evaluations, logits, greedy text) in one process."""
    ps = ParallelState.single("cpu")
    *facts, more = gpt_facts(ps, tied)
    model = GPTModel(*facts, **more)
    alone = SingleStage(model, ps=ps, num_microbatches=4)
    sums = [alone.evaluate(batch(n), next_token_loss) for n in rows]
    logits = alone.forward({"tokens": batch(4)["tokens"]})
    return [(r.loss_sum.item(), r.num_tokens.item()) for r in sums], logits, generate(model, PROMPT, new_tokens=4)


def staged_gpt(name, tied, sp, tp, rows):
    ps = state(tp=tp, pp=2, sp=sp)
    *facts, more = gpt_facts(ps, tied)
    stages = gpt_stages(*facts, placement=named.placement(name, 2), **more)
    pipe = Pipeline(stages, ps=ps, schedule=name, num_microbatches=4, recompute="layer")
    first = next(iter(stages.values()))
    first.decoder.eval()
    modes = [[m.training for m in stage.modules()] for stage in stages.values()]
    wanted = {0, pipe.schedule.placement[-1]}
    sums = []
    for n in rows:  # before any step, any number of rows; a rank without ends has no batch
        data = batch(n) if ps.index("pp") in wanted else None
        sums.append(pipe.evaluate(data, next_token_loss))
    logits = pipe.forward({"tokens": batch(4)["tokens"]})
    assert (logits is not None) == (ps.index("pp") == pipe.schedule.placement[-1])
    if logits is not None:
        last = stages[max(stages)]
        logits = last.gather_logits(logits) if last.parallel_output else logits
    text = generate(first, PROMPT, new_tokens=4, executor=pipe)
    assert modes == [[m.training for m in stage.modules()] for stage in stages.values()], "modes are put back"
    assert all(p.grad is None for stage in stages.values() for p in stage.parameters())
    pipe.step(batch(4), next_token_loss)
    pipe.close()
    return [(r.loss_sum.item(), r.num_tokens.item()) for r in sums], logits, text


@pytest.mark.parametrize(
    "name, tied, sp, tp",
    [
        ("zb-v", True, False, 2),
        pytest.param("1f1b", False, True, 2, marks=pytest.mark.full),
        pytest.param("interleaved-zb", True, False, 1, marks=pytest.mark.full),
    ],
)
def test_evaluation_logits_and_greedy_text_are_those_of_one_process(ranks, name, tied, sp, tp):
    rows = [4, 3, 1, 6, 8]
    sums, logits, text = whole_gpt(tied, rows)
    for found, got, said in ranks(staged_gpt, name, tied, sp, tp, rows, world=2 * tp):
        assert said == text
        assert [n for _, n in found] == [n for _, n in sums]
        for (loss, _), (want, _) in zip(found, sums, strict=True):
            assert loss == pytest.approx(want, rel=1e-12)
        if got is not None:
            torch.testing.assert_close(got, logits, rtol=0, atol=1e-10)


def middle_without_batch():
    """Four ranks, one stage each: those in the middle take nothing from the batch."""
    ps = state(pp=4)
    pipe = tiny.pipeline("1f1b", 4)
    data = tiny.rows(4) if ps.index("pp") in (0, 3) else None
    loss = pipe.step(data, tiny.squares).loss_sum.item()
    want, gradients = tiny.alone(4, tiny.rows(4))
    assert abs(loss - want) <= 1e-12 * want
    tiny.assert_equal(tiny.gradients(pipe), gradients)
    return pipe.evaluate(data, tiny.squares).loss_sum.item() / want


def test_middle_ranks_need_no_batch(ranks):
    assert ranks(middle_without_batch, world=4) == [pytest.approx(1.0)] * 4


class Noisy(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.inner, self.drop = tiny.part(s), nn.Dropout(0.4)

    def forward(self, x):
        return self.drop(self.inner(x))


def losses(name, count, start=0, **more):
    pipe = tiny.pipeline(name, 4, Noisy, **more)
    pipe.step_index = start
    return [pipe.step(tiny.rows(4), tiny.squares).loss_sum.item() for _ in range(count)]


def resumed(name):
    all_of_them = losses(name, 4)
    assert losses(name, 2, 2) == all_of_them[2:] and len(set(all_of_them)) == 4
    return all_of_them == losses(name, 4, recompute="stage") and all_of_them != losses(name, 4, seed=1)


def test_a_step_index_resumes_the_random_numbers(ranks):
    assert ranks(resumed, "zb-v") == [True, True]


def scaled(cases):
    """Gradients grow with the scale, the loss does not; in both places where gradients can be."""
    for name, owner in cases:
        found = []
        for scale in (1.0, 4.0):
            pipe = tiny.pipeline(name, 4)
            if owner:
                sync = PerParameterGradSync(pipe.modules, pipe.ps)
                pipe = Pipeline(pipe.modules, ps=pipe.ps, schedule=name, num_microbatches=4, grad_sync=sync)
            result = pipe.step(tiny.rows(4), tiny.squares, loss_scale=scale)
            parameters = [p for module in pipe.modules.values() for p in module.parameters()]
            found.append((result.loss_sum.item(), [(p.main_grad if owner else p.grad).clone() for p in parameters]))
        assert found[0][0] == found[1][0]
        assert all(torch.equal(4 * a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


def test_a_loss_scale_is_on_the_gradients_only(ranks):
    ranks(scaled, [("zb-v", False), ("zb-v", True), ("1f1b", True)])


def loss_below(limit, output, microbatch):
    if microbatch[0, 0] > limit:
        return output.new_zeros(()), 0
    return tiny.squares(output, microbatch)


def masked(cases):
    """A loss that is a constant wherever everything is masked: some microbatches, then all of them."""

    rows = tiny.rows(4)
    for name, recompute in cases:
        for limit in (rows[:, 0].median().item(), -1e9):
            loss = partial(loss_below, limit)
            stages = len(named.placement(name, 2))
            want, gradients = tiny.alone(stages, rows, loss)
            pipe = tiny.pipeline(name, 4, recompute=recompute)
            assert pipe.step(rows, loss).loss_sum.item() == pytest.approx(want, rel=1e-12)
            tiny.assert_equal(tiny.gradients(pipe), gradients)
            pipe.close()


def test_microbatches_without_a_valid_token(ranks):
    ranks(masked, [(name, recompute) for name in ("1f1b", "zb-v", "zb-h1") for recompute in ("none", "stage")])


def given_back(recompute):
    pipe = tiny.pipeline("zb-v", 4, lambda s: nn.Sequential(tiny.part(s)), recompute=recompute)
    x = tiny.rows(2)
    before = {s: module(x) for s, module in pipe.modules.items()}
    assert any("forward" in m.__dict__ for module in pipe.modules.values() for m in module.modules())
    pipe.step(tiny.rows(4), tiny.squares)
    pipe.close()
    pipe.close()
    assert not [m for module in pipe.modules.values() for m in module.modules() if "forward" in m.__dict__]
    again = Pipeline(pipe.modules, ps=pipe.ps, schedule="zb-v", num_microbatches=2)
    again.step(tiny.rows(4), tiny.squares)
    again.close()
    return all(torch.equal(before[s], module(x)) for s, module in pipe.modules.items())


def test_close_gives_the_modules_their_own_forwards_back(ranks):
    for recompute in ("none", [[nn.Sequential]] * 4):
        assert ranks(given_back, recompute) == [True, True]
