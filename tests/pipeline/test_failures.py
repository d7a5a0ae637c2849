"""A stage that fails, on any rank and in any action: every rank stops soon, and says where it began."""

import os
import time

import pytest
import torch
from torch import nn

from core.autograd import StageContext
from core.parallel_state.collectives import all_reduce
from core.pipeline import Pipeline, PipelineError
from tests.pipeline import tiny
from tests.pool import Pool, RankError
from tests.states import state

M, BAD, WORLD = 6, 3, 4  # microbatches, the one that fails, ranks


@pytest.fixture(scope="module")
def own_pool():
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def apart(own_pool):
    """`ranks` with processes that are not used again: a failure leaves them without groups."""
    yield own_pool
    own_pool.close()


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bad):
        ctx.bad = bad
        return x.clone()

    @staticmethod
    def backward(ctx, gy):
        if ctx.bad:
            raise ArithmeticError("mine, in backward")
        return gy, None


class _Thunk:
    def __init__(self, parameter):
        self.parameter = parameter

    def tensors(self):
        return ()

    def run(self):
        raise ArithmeticError("mine, in a weight gradient")


class Fails(nn.Module):
    """Fails in F (also when it runs again), I or W of one microbatch; the last stage also in its loss."""

    def __init__(self, inner, where):
        super().__init__()
        self.inner, self.where, self.stage = inner, where, StageContext()

    def forward(self, x):
        bad = self.stage.microbatch == BAD
        if bad and self.where == "F":
            raise ArithmeticError("mine, in forward")
        if bad and self.where == "R" and torch.is_grad_enabled():
            raise ArithmeticError("mine, in the second forward")
        if bad and self.where == "gone":
            os._exit(7)
        if bad and self.where == "W" and self.stage.bag is not None:
            self.stage.bag.put(_Thunk(self.inner[0].weight))
        return Raises.apply(self.inner(x), bad and self.where == "I")


def fails(where, stage, schedule, recompute="none", during="step"):
    """(seconds, message) of a rank."""

    def make(s):
        return Fails(tiny.part(s), where if s == stage else "")

    def loss(output, microbatch):
        seen["losses"] = seen.get("losses", 0) + 1
        if where == "loss" and seen["losses"] == BAD + 1:
            raise ArithmeticError("mine, in the loss")
        return tiny.squares(output, microbatch)

    seen = {}
    pipe = tiny.pipeline(schedule, M, make, recompute=recompute)
    begin = time.perf_counter()
    try:
        getattr(pipe, during)(tiny.rows(M), loss)
    except PipelineError as error:
        assert not any(s.context.driven or s._in_flight for s in pipe.stages.values()), "nothing is held"
        return time.perf_counter() - begin, str(error)
    return None


CASES = [  # where, stage, its rank, schedule, recompute
    ("F", 1, 1, "1f1b", "none"),
    pytest.param("I", 2, 2, "1f1b", "none", marks=pytest.mark.full),
    ("W", 1, 1, "zb-h1", "none"),
    ("R", 2, 2, "zb-h1", "stage"),
    pytest.param("loss", 7, 0, "zb-v", "none", marks=pytest.mark.full),
    ("I", 5, 2, "zb-v", "stage"),
]


@pytest.mark.parametrize("where, stage, rank, schedule, recompute", CASES)
def test_every_rank_says_where_it_began(apart, where, stage, rank, schedule, recompute):
    answers = apart(fails, where, stage, schedule, recompute, world=WORLD)
    kind = "F" if where == "loss" else where
    for seconds, text in answers:
        assert seconds < 10
        assert (
            f"rank {rank}, stage {stage}, microbatch {BAD}, action {kind} ({stage}{kind}{BAD}): ArithmeticError"
            in text
        )
        assert "Traceback" in text and "raise ArithmeticError(" in text and "mine, in" in text


def test_evaluation_fails_alike(apart):
    for seconds, text in apart(fails, "F", 1, "1f1b", during="evaluate", world=WORLD):
        assert seconds < 10 and f"rank 1, stage 1, microbatch {BAD}, action F (1F{BAD})" in text


def dies(stage):
    begin = time.perf_counter()
    answer = fails("gone", stage, "1f1b")
    return time.perf_counter() - begin, answer[1]


def caught(stage, folder):
    """The pool tells of a dead worker only; the others leave what they saw in files."""
    seconds, text = dies(stage)
    (folder / str(torch.distributed.get_rank() if torch.distributed.is_initialized() else os.getpid())).write_text(
        f"{seconds}\n{text}"
    )


@pytest.mark.parametrize("stage", [2, pytest.param(0, marks=pytest.mark.full)])
def test_a_rank_that_is_killed_is_named_by_the_others(apart, tmp_path, stage):
    with pytest.raises(RankError, match=f"rank {stage} of 4: the process died, exit code 7"):
        apart(caught, stage, tmp_path, world=WORLD)
    told = [path.read_text().split("\n", 1) for path in tmp_path.iterdir()]
    assert len(told) == WORLD - 1
    for seconds, text in told:
        assert float(seconds) < 10
        # which of its calls fails first, a message from that rank or one to it, is chance
        assert f"from rank {stage}" in text or f"to rank {stage}" in text, text
        assert "or is gone" in text, text


def uneven_batch(schedule):
    """One rank's batch does not divide: it must not leave the others waiting."""
    pipe = tiny.pipeline(schedule, M)
    begin = time.perf_counter()
    with pytest.raises(ValueError) as error:
        pipe.step(tiny.rows(M + (pipe.ps.rank == 0)), tiny.squares)
    assert isinstance(error.value, PipelineError)
    return time.perf_counter() - begin, str(error.value)


def test_a_batch_that_does_not_divide_on_one_rank_stops_all(apart):
    for seconds, text in apart(uneven_batch, "1f1b", world=2):
        assert seconds < 10
        # the cause first, for the one line that a console shows; its traceback behind it
        assert text.startswith(
            "the step failed: rank 0, before its first action: ValueError: a batch of 7 samples does not divide"
        )
        assert "\nTraceback (most recent call last):\n" in text


def later_step():
    """Failure after steps that went well; the message is about the last one."""
    pipe = tiny.pipeline("zb-v", M)
    for _ in range(2):
        pipe.step(tiny.rows(M), tiny.squares)

    def loss(output, microbatch):
        if len(seen) == 2:
            raise KeyError("late")
        seen.append(1)
        return tiny.squares(output, microbatch)

    seen = []
    with pytest.raises(PipelineError) as error:
        pipe.step(tiny.rows(M), loss)
    assert not isinstance(error.value, ValueError)
    return str(error.value)


def test_a_failure_in_a_later_step(apart):
    for text in apart(later_step, world=2):
        assert "rank 0, stage 3, microbatch 2, action F (3F2): KeyError: 'late'" in text


class Together(nn.Module):
    """A collective over the tensor ranks in the middle of the stage; one of them fails before it."""

    def __init__(self, s, ps, bad):
        super().__init__()
        self.inner, self.ps, self.bad, self.stage = tiny.part(s), ps, bad, StageContext()

    def forward(self, x):
        y = self.inner(x)
        if self.bad and self.stage.microbatch % 3 == 1:
            raise ArithmeticError("mine")
        return all_reduce(y.detach().clone(), self.ps.group("tp")) * 0 + y


def meshed(tp, late):
    """The last rank fails; its tensor peer waits in a collective, another replica in the sum of the results."""
    ps = state(tp=tp, pp=2)
    pipe = Pipeline(
        [Together(ps.index("pp"), ps, ps.rank == 3)], ps=ps, num_microbatches=M, schedule="zb-h1", seed=late
    )
    begin = time.perf_counter()
    with pytest.raises(PipelineError) as error:
        pipe.step(tiny.rows(M), tiny.squares)
    return time.perf_counter() - begin, str(error.value)


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_failure_reaches_tensor_peers_and_other_replicas(apart, tp):
    for seconds, text in apart(meshed, tp, 0, world=WORLD):
        assert seconds < 10
        assert "rank 3, stage 1, microbatch 1, action F (1F1)" in text and "ArithmeticError: mine" in text


def hangs():
    """A rank that never comes: the time of a wait is bounded, and who is missing is named."""
    pipe = tiny.pipeline("1f1b", M)
    pipe.step(tiny.rows(M), tiny.squares)
    pipe.ps.set_timeout(0.8)
    if pipe.ps.rank == 1:
        time.sleep(2)
    begin = time.perf_counter()
    with pytest.raises(PipelineError) as error:
        pipe.step(tiny.rows(M), tiny.squares)
    return time.perf_counter() - begin, str(error.value)


def test_a_rank_that_hangs_is_named_when_the_time_is_over(apart):
    first, second = apart(hangs)
    assert 0.5 < first[0] < 2
    for _, text in (first, second):
        assert "from rank 1, which did not send it within 0.8 s or is gone" in text and "rank 0, stage 0" in text


class InPlace(nn.Module):
    def __init__(self, s, what):
        super().__init__()
        self.inner, self.index, self.what, self.calls = tiny.part(s), s, what, []
        self.register_buffer("last", torch.zeros(1, tiny.WIDTH, dtype=torch.float64))

    def forward(self, x, _=None):
        self.calls.append(1)
        if self.what == "input" and self.index == 0 and len(self.calls) == 2:  # not so the first time
            x.mul_(2)
        y = self.inner(x)
        return (y, self.last.copy_(y.detach())) if self.what == "buffer" and self.index == 0 else y


def in_place(what):
    pipe = tiny.pipeline("gpipe", M, lambda s: InPlace(s, what), recompute="stage" if what == "input" else "none")
    with pytest.raises(PipelineError) as error:
        pipe.step(tiny.rows(M), tiny.squares)
    return str(error.value)


@pytest.mark.parametrize(
    "what, told",
    [
        ("input", "stage 0 changed its input or its microbatch in place: it cannot be recomputed from it"),
        ("buffer", "was written while it was being sent"),
    ],
)
def test_what_is_changed_in_place_is_not_silently_wrong(apart, what, told):
    for text in apart(in_place, what):
        assert told in text
