"""What a rank does when it fails, for the cases in `failures`."""

import ctypes
import os
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from core.autograd import NullGradSync, StageContext
from core.parallel_state import ParallelConfig, ParallelState
from core.parallel_state.collectives import all_reduce
from core.pipeline import Pipeline
from core.pipeline.schedule import schedules as named
from tests.pipeline import tiny
from tests.zoo.case import Case

M, BAD = 6, 3  # microbatches, the one that fails


@dataclass(frozen=True)
class Failure(Case):
    """`run(case)` on each rank. lost: the ranks that do not answer. cheap: in every test run."""

    outcome: str = "refused"
    remedy: str = "every other rank names this one"
    lost: tuple[int, ...] = ()
    timeout_s: float = 30.0
    rank_0_keeps_the_store: bool = False
    cheap: bool = False


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, act):
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx, gy):
        if ctx.act is not None:
            ctx.act()
        return gy, None


class _Thunk:
    def __init__(self, parameter, act):
        self.parameter, self._act = parameter, act

    def tensors(self):
        return ()

    def run(self):
        self._act()


class Acts(nn.Module):
    """Does `act` in F, R, I or W of one microbatch."""

    def __init__(self, s, where, act):
        super().__init__()
        self.inner, self.where, self.act, self.stage = tiny.part(s), where, act, StageContext()

    def forward(self, x):
        now = self.stage.microbatch % M == BAD
        if now and (self.where == "F" or (self.where == "R" and torch.is_grad_enabled())):
            changed = self.act(x)
            x = x if changed is None else changed
        if now and self.where == "W" and self.stage.bag is not None:
            self.stage.bag.put(_Thunk(self.inner[0].weight, self.act))
        return _Backward.apply(self.inner(x), self.act if now and self.where == "I" else None)


def built(case, where="", act=None, rank=2, schedule="1f1b", recompute="none", make=None, **config):
    """A pipeline over all ranks whose first stage on `rank` acts."""
    ps = ParallelState.build(ParallelConfig(**({"pipeline": 4} | config)), device="cpu", timeout_s=case.timeout_s)
    mine = [s for s, owner in enumerate(named.placement(schedule, ps.size("pp"))) if owner == ps.index("pp")]
    stages = {s: Acts(s, where if ps.rank == rank and s == mine[0] else "", act) for s in mine}
    stages = stages if make is None else make(stages, ps)
    pipe = Pipeline(stages, ps=ps, schedule=schedule, num_microbatches=M, recompute=recompute)
    dist.barrier()  # nobody fails while others are still building
    return pipe


def rows(count=2 * M):
    return tiny.rows(count)


def inside(where, act, **more):
    """A step in which a rank acts inside a stage."""

    def run(case):
        built(case, where, act, **more).step(rows(), tiny.squares)

    return run


def raises(error):
    def act(*_):
        raise error

    return act


def with_loss(loss, schedule="1f1b", call="step"):
    def run(case):
        getattr(built(case, schedule=schedule), call)(rows(), loss)

    return run


def bad_loss(output, _):
    raise ArithmeticError("in the loss")


def late_loss(output, microbatch):
    loss, count = tiny.squares(output, microbatch)
    return loss + nn.functional.linear(output, torch.zeros(3, 3)).sum(), count


def around(rank, instead, schedule="1f1b", first=1, **config):
    """`first` steps by all, then one rank does something else while the others step."""

    def run(case):
        pipe = built(case, schedule=schedule, **config)
        for _ in range(first):
            pipe.step(rows(), tiny.squares)
        if pipe.ps.rank == rank:
            instead(pipe)
        pipe.step(rows(), tiny.squares)

    return run


def signalled(number):
    def act(*_):
        os.kill(os.getpid(), number)
        time.sleep(60)

    return act


def spin(*_):
    while True:
        pass


def sleep(*_):
    time.sleep(100)


def leave(*_):
    os._exit(0)


def crash(*_):
    ctypes.string_at(0)


def wait_alone(*_):
    dist.all_reduce(torch.zeros(3))


class Speechless(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class Peers(nn.Module):
    """A collective over the tensor ranks, before which one of them fails."""

    def __init__(self, inner, ps, bad):
        super().__init__()
        self.inner, self.ps, self.bad, self.stage = inner, ps, bad, StageContext()

    def forward(self, x):
        y = self.inner(x)
        if self.bad and self.stage.microbatch % M == BAD:
            self.bad()
        return all_reduce(y.detach().clone(), self.ps.group("tp")) * 0 + y


def with_peers(bad):
    def run(case):
        def make(stages, ps):
            return {s: Peers(stage, ps, bad if ps.rank == 3 else None) for s, stage in stages.items()}

        built(case, make=make, pipeline=2, tensor=2).step(rows(), tiny.squares)

    return run


def hooked(kind):
    """A hook of the user's on rank 2's stage."""

    def run(case):
        def hook(*args):
            raise FloatingPointError("a NaN, says my hook")

        def make(stages, ps):
            for stage in stages.values() if ps.rank == 2 else ():
                if kind == "forward":
                    stage.inner[1].register_forward_hook(hook)
                elif kind == "backward":
                    stage.inner[1].register_full_backward_hook(hook)
                else:
                    stage.inner[0].weight.register_post_accumulate_grad_hook(hook)
            return stages

        built(case, make=make, schedule="zb-h1").step(rows(), tiny.squares)

    return run


def anomaly(case):
    def nan(x):
        return (x * 0).sqrt() * 0 + x if x.requires_grad else None

    pipe = built(case, "F", nan)
    with torch.autograd.detect_anomaly(check_nan=True):
        pipe.step(rows(), tiny.squares)


def batch_of(counts, schedule="1f1b", call="step"):
    """Other numbers of rows on other ranks; None: no batch."""

    def run(case):
        pipe = built(case, schedule=schedule)
        count = counts[pipe.ps.rank]
        getattr(pipe, call)(None if count is None else rows(count), tiny.squares)

    return run


def two_at_once(case):
    pipe = built(case)
    if pipe.ps.rank in (1, 3):
        raise_now = raises(KeyError(f"from rank {pipe.ps.rank}"))
        pipe.stages[pipe.ps.rank].module.act, pipe.stages[pipe.ps.rank].module.where = raise_now, "F"
    pipe.step(rows(), tiny.squares)


class BadSync(NullGradSync):
    def __init__(self, rank, when):
        self.bad, self.when = rank, when

    def finish(self):
        if self.bad == dist.get_rank() and self.when == "finish":
            raise ArithmeticError("in my sums")

    def begin_step(self, counts, split=False):
        if self.bad == dist.get_rank() and self.when == "begin":
            raise ArithmeticError("in my beginning")


def bad_sync(when):
    def run(case):
        pipe = built(case)
        pipe.grad_sync = BadSync(2, when)
        pipe.step(rows(), tiny.squares)

    return run


def differently(**other):
    """Rank 2 builds something else."""

    def run(case):
        ps = ParallelState.build(ParallelConfig(pipeline=4), device="cpu", timeout_s=case.timeout_s)
        facts = {"schedule": "1f1b", "num_microbatches": M} | (other if ps.rank == 2 else {})
        stages = facts.pop("stages", 1)
        Pipeline([tiny.part(s) for s in range(stages)], ps=ps, **facts).step(rows(), tiny.squares)

    return run
