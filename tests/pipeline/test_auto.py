"""The automatic schedule over real ranks: measured, searched once, the same everywhere, and the same numbers."""

import contextlib
import io
import time

import pytest
import torch
from torch import nn

from core.parallel_state import ParallelState
from core.parallel_state.collectives import all_gather_objects
from core.pipeline import Costs, Pipeline, Schedule, play
from core.pipeline.schedule.integer_schedule import SchedulingProblem
from core.pipeline.schedule.memory import StageMemory, live_peaks
from core.pipeline.schedule.schedules import auto_placement, candidates
from core.pipeline.schedule.timeline import Event, Timeline
from core.pipeline.search.auto import first_schedule, measured_costs
from tests.pipeline import tiny


class Nap(torch.autograd.Function):
    """Backward takes as long as forward."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, gy):
        time.sleep(ctx.seconds)
        return gy, None


class Naps(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.inner, self.seconds = tiny.part(s), 0.002 + 0.001 * (s % 3)

    def forward(self, x):
        return Nap.apply(self.inner(x), self.seconds)


def stages_at(placement, rank):
    return {s: Naps(s) for s, owner in enumerate(placement) if owner == rank}


def learns(placement, recompute, as_list):
    """(schedule texts and gradients of each step, what was printed, seconds of activations' bytes)."""
    ps = tiny.pipeline_state()
    stages = stages_at(placement, ps.index("pp"))
    facts = {"schedule": "auto", "num_microbatches": 6, "recompute": recompute}
    pipe = Pipeline(list(stages.values()) if as_list else stages, ps=ps, **facts)
    said, texts = io.StringIO(), []
    want, gradients = tiny.alone(len(placement), tiny.rows(6), microbatches=6, make=Naps)
    with contextlib.redirect_stdout(said):
        for _ in range(4):
            for p in (p for module in stages.values() for p in module.parameters()):
                p.grad = None
            texts.append(pipe.schedule.text())
            assert pipe.step(tiny.rows(6), tiny.squares).loss_sum.item() == pytest.approx(want, rel=1e-12)
            tiny.assert_equal(tiny.gradients(pipe), gradients)
            assert [e.action for e in pipe._measured().events] == [a for a in orders(texts[-1])[ps.index("pp")]]
    pipe.evaluate(tiny.rows(6), tiny.squares)
    pipe.close()
    return texts, said.getvalue()


def orders(text):
    schedule = Schedule.parse(text)
    return [[k for a in order for k in halves(a)] for order in schedule.orders]


def halves(action):
    return [action._replace(kind=kind) for kind in "IW"] if action.kind == "B" else [action]


@pytest.mark.parametrize(
    "placement, recompute, as_list",
    [
        pytest.param((0, 1, 1, 0), "none", True, marks=pytest.mark.full),
        pytest.param((0, 1, 1, 0), "stage", True, marks=pytest.mark.full),
        ((1, 0, 1), ["stage", "none", "none"], False),
        pytest.param((0, 1, 2, 3, 3, 2, 1, 0), "none", True, marks=pytest.mark.full),
    ],
)
def test_all_ranks_learn_the_same_schedule_and_gradients_stay(ranks, placement, recompute, as_list):
    (texts, said), *rest = ranks(learns, placement, recompute, as_list, world=max(placement) + 1)
    assert rest == [(texts, "")] * max(placement), "rank 0 says it"
    assert texts[0] == texts[1] and texts[2] == texts[3], "two steps are measured, then one schedule is used"
    lines = said.strip().splitlines()
    assert len(lines) == 2 and lines[0].startswith("auto: predicted bubble ")
    assert "auto: step predicted " in lines[1] and " ms, measured " in lines[1] and "bubble predicted" in lines[1]
    assert Schedule.parse(texts[3]).placement == placement


def limited(factor):
    """What lives under the found schedule, on the costs that were measured, against a limit in bytes."""
    ps = tiny.pipeline_state()
    least, memory = bytes_of_one(ps)
    pipe = tiny_auto(ps, least * factor)
    with contextlib.redirect_stdout(io.StringIO()):
        for _ in range(2):
            pipe.step(tiny.rows(6), tiny.squares)
    found = pipe._tuner.result is not None
    return max(live_peaks(pipe.schedule, memory, pipe.receive_ahead)), least * factor, pipe.schedule.text(), found


def tiny_auto(ps, limit):
    return Pipeline(stages_at((0, 1, 1, 0), ps.rank), ps=ps, schedule="auto", num_microbatches=6, memory_limit=limit)


def bytes_of_one(ps):
    """What lives on a rank when one microbatch is done at a time, and what was measured of each stage."""
    pipe = tiny_auto(ps, None)
    with contextlib.redirect_stdout(io.StringIO()):
        pipe.step(tiny.rows(6), tiny.squares)
    row, seen = 8 * tiny.WIDTH, {}
    for part in all_gather_objects(pipe._tuner.memory.stages, ps.group("pp")):
        seen |= part
    for s, memory in seen.items():  # the caller holds the batch anyway; the loss keeps the last stage's output
        first, last = s == 0, s == 3
        assert memory.saved == (not first) * row, "the input"
        few = 8 * 4 * last  # the loss, its gradient, the sums
        assert 0 <= memory.graph - (2 - first + last) * row <= few, "input, output of tanh"
        assert memory.waiting == (4 - first) * row, "the linear layers' inputs and output gradients"
        assert memory.message == row * (not last), "the output"
        assert memory.beyond >= row, "the output before the last layer, while F runs"
    integers = SchedulingProblem((0, 1, 1, 0), 6, Costs())
    return max(live_peaks(integers.schedule(integers.one_by_one()), seen, pipe.receive_ahead)), seen


@pytest.mark.parametrize("factor", [1.1, pytest.param(4, marks=pytest.mark.full)])
def test_a_limit_in_bytes_is_kept(ranks, factor):
    (live, limit, text, searched), (_, _, other, nothing) = ranks(limited, factor)
    assert searched and not nothing, "only rank 0 searches"
    assert text == other and live <= limit


def too_little():
    pipe = tiny_auto(tiny.pipeline_state(), 10.0)
    pipe.step(tiny.rows(6), tiny.squares)
    with pytest.raises(ValueError) as error:
        pipe.step(tiny.rows(6), tiny.squares)
    return str(error.value)


def test_a_limit_that_nobody_meets_is_refused_on_every_rank(ranks):
    first, second = ranks(too_little)
    assert first == second and "MiB" in first and any(word in first for word in ("smallest", "at least", "least"))


def strange_stages():
    """Mappings that together are not all stages."""
    ps = tiny.pipeline_state()
    with pytest.raises(ValueError, match=r"the ranks hold stages \[\[0\], \[2\]\]: together they must be 0 to 1"):
        Pipeline({0: tiny.part(0)} if ps.rank == 0 else {2: tiny.part(2)}, ps=ps, schedule="auto")


def test_stages_that_are_not_all_are_refused(ranks):
    ranks(strange_stages)


def test_the_first_schedule_holds_no_more_than_one_microbatch_per_rank():
    for stages in ((0, 1, 2, 3), auto_placement(4, 2), auto_placement(4, 3), (0, 0, 1), (0,)):
        count = max(stages) + 1
        first = first_schedule(stages, 8)
        assert first.placement == tuple(stages)
        assert play(first, Costs().divided(-(-len(stages) // count))).peak <= count + 0.5 or not candidates(stages, 8)


def test_costs_are_medians_per_stage_and_the_delay_of_idle_ranks():
    schedule = Schedule.parse("two: 0 1\n0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n")
    timeline = play(schedule, Costs(F=(1, 2), I=(3, 4), W=(5, 6), comm=0.5)).timeline
    rows = [[Event(a._replace(kind=k), s, e) for a, s, e in row for k in (a.kind,)] for row in timeline.rows]
    split = []
    for row in rows:
        events = []
        for a, start, end in row:
            if a.kind == "B":
                middle = start + (3, 4)[a.stage]
                events += [Event(a._replace(kind="I"), start, middle), Event(a._replace(kind="W"), middle, end)]
            else:
                events.append(Event(a, start, end))
        split.append(tuple(events))
    found = measured_costs(schedule, Timeline(tuple(split)), {s: StageMemory(1 + s, 5, 3) for s in range(2)})
    assert (found.F, found.I, found.W, found.R) == ((1, 2), (3, 4), (5, 6), (1, 2))
    assert found.comm == 0.5 and found.saved == (1.0, 2.0) and found.graph == (5.0, 5.0)


class Functional(nn.Module):
    """A gradient inside of forward, by torch.func, which refuses hooks on saved tensors."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(tiny.WIDTH, tiny.WIDTH).double()

    def forward(self, x):
        return self.inner(x) + torch.func.vmap(torch.func.grad(lambda row: row.sin().sum()))(x)


def test_bytes_are_counted_in_stages_that_use_torch_func(capsys):
    modules = [Functional(), Functional()]
    pipe = Pipeline(modules, ps=ParallelState.single("cpu"), schedule="auto", num_microbatches=2)
    for _ in range(3):
        for module in modules:
            module.zero_grad()
        pipe.step(tiny.rows(4), tiny.squares)
    got = [p.grad.clone() for module in modules for p in module.parameters()]
    pipe.close()
    for module in modules:
        module.zero_grad()
    modules[1](modules[0](tiny.rows(4))).square().sum().backward()
    want = [p.grad for module in modules for p in module.parameters()]
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(got, want, strict=True))
    assert "auto: predicted bubble" in capsys.readouterr().out
