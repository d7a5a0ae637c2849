"""A stage that fails, on any rank and in any action: every rank stops soon, and says where it began."""

import os
import time

import pytest
import torch
from torch import nn

from core.autograd import StageContext
from core.pipeline import PipelineError
from tests.pipeline import tiny
from tests.pool import Pool, RankError

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
        assert not any(s.context.driven or s._held for s in pipe.stages.values()), "nothing is held"
        return time.perf_counter() - begin, str(error)
    return None


CASES = [  # where, stage, its rank, schedule, recompute
    ("F", 1, 1, "1f1b", "none"),
    ("I", 2, 2, "1f1b", "none"),
    ("W", 1, 1, "zb-h1", "none"),
    ("R", 2, 2, "zb-h1", "stage"),
    ("loss", 7, 0, "zb-v", "none"),
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


@pytest.mark.parametrize("stage", [2, 0])
def test_a_rank_that_is_killed_is_named_by_the_others(apart, tmp_path, stage):
    with pytest.raises(RankError, match=f"rank {stage} of 4: the process died, exit code 7"):
        apart(caught, stage, tmp_path, world=WORLD)
    told = [path.read_text().split("\n", 1) for path in tmp_path.iterdir()]
    assert len(told) == WORLD - 1
    for seconds, text in told:
        assert float(seconds) < 10
        assert f"from rank {stage}" in text and "or is gone" in text


def uneven_batch(schedule):
    """One rank's batch does not divide: it must not leave the others waiting."""
    pipe = tiny.pipeline(schedule, M)
    begin = time.perf_counter()
    with pytest.raises(PipelineError) as error:
        pipe.step(tiny.rows(M + (pipe.ps.rank == 0)), tiny.squares)
    return time.perf_counter() - begin, str(error.value)


def test_a_batch_that_does_not_divide_on_one_rank_stops_all(apart):
    for seconds, text in apart(uneven_batch, "1f1b", world=2):
        assert seconds < 10
        assert "rank 0, before its first action: ValueError: a batch of 7 samples does not divide" in text


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
    return str(error.value)


def test_a_failure_in_a_later_step(apart):
    for text in apart(later_step, world=2):
        assert "rank 0, stage 3, microbatch 2, action F (3F2): KeyError: 'late'" in text
