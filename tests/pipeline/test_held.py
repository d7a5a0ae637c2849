"""How often stages run and what is alive meanwhile: what the player predicts, counted."""

import gc
import itertools
import weakref
from collections import Counter

import pytest
import torch
from torch import nn

from core.autograd import StageContext
from core.pipeline import Costs, play
from core.pipeline.run.messages.channel import Channel
from core.pipeline.run.stage import Stage
from core.pipeline.schedule import schedules as named
from tests.pipeline import tiny

GRAPH, WAITING, SAVED = 10.0, 3.0, 1.0


class Token:
    """Somebody's memory; counted while it lives."""

    def __init__(self, alive, key):
        alive[key] += 1
        weakref.finalize(self, alive.subtract, [key])


class Thunk:
    def __init__(self, parameter, token):
        self.parameter, self.token = parameter, token

    def tensors(self):
        return ()

    def run(self):
        pass


class Holds(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, parameter, stage, alive, index):
        ctx.token, ctx.stage, ctx.alive, ctx.index, ctx.parameter = None, stage, alive, index, parameter
        ctx.bag, ctx.m = stage.bag, stage.microbatch
        if any(ctx.needs_input_grad):
            ctx.token = Token(alive, ("graph", index, stage.microbatch))
        return x + parameter

    @staticmethod
    def backward(ctx, gy):
        ctx.bag.put(Thunk(ctx.parameter, Token(ctx.alive, ("waiting", ctx.index, ctx.m))))
        return gy, gy.sum(0), None, None, None


class Counted(nn.Module):
    def __init__(self, s, alive, calls):
        super().__init__()
        self.index, self.alive, self.calls, self.stage = s, alive, calls, StageContext()
        self.weight = nn.Parameter(torch.full((tiny.WIDTH,), 1.0 + s, dtype=torch.float64))

    def forward(self, x):
        self.calls[self.index, self.stage.microbatch] += 1
        return Holds.apply(x, self.weight, self.stage, self.alive, self.index)


def units(alive):
    """Memory now, as the player counts: an input belongs to its graph where there is one."""
    total = 0.0
    for (what, s, m), count in alive.items():
        total += {"graph": GRAPH, "waiting": WAITING, "input": 0.0}[what] * count
        total += SAVED * (what == "input" and count > 0 and not alive["graph", s, m])
    return total


def directly(schedule):
    """(stage, microbatch) whose backward follows its forward directly."""
    pairs = (pair for order in schedule.orders for pair in itertools.pairwise(order))
    return {a[1:] for a, b in pairs if a.kind == "F" and b.kind in "IB" and a[1:] == b[1:]}


def watched_step(schedule, recompute, microbatches):
    """(forwards per stage and microbatch, peak memory sampled after each action, alive in the end, the schedule)."""
    alive, calls, peak = Counter(), Counter(), [0.0]
    pipe = tiny.pipeline(schedule, microbatches, lambda s: Counted(s, alive, calls), recompute=recompute)

    def sampled(method, stage):
        def call(*args, **kwargs):
            result = method(*args, **kwargs)
            if method.__name__ == "forward" and not stage.first:  # the first one's input is the batch
                held = stage._in_flight[args[0]]
                key = "input", stage.index, held.global_index
                alive[key] += 1
                weakref.finalize(held.input_leaves[0], alive.subtract, [key])
            peak[0] = max(peak[0], units(alive))
            return result

        return call

    gc.disable()
    try:
        for stage in pipe.stages.values():
            for name in ("forward", "recompute", "input_gradients", "weight_gradients"):
                setattr(stage, name, sampled(getattr(stage, name), stage))
        pipe.step(tiny.rows(microbatches), tiny.squares)
        left = [key for key, count in alive.items() if count]
        for stage in pipe.stages.values():
            stage.__dict__ = {k: v for k, v in stage.__dict__.items() if not hasattr(Stage, k)}
    finally:
        gc.enable()
    pipe.close()
    return calls, peak[0], left, pipe.schedule


def held_as_predicted(cases):
    wrong = {}
    for schedule, recompute, m in cases:
        calls, peak, left, played = watched_step(schedule, recompute, m)
        plain = named.make(schedule, played.ranks, m)
        again = set() if recompute == "none" else {(s, k) for s, k in calls} - directly(plain)
        costs = Costs(graph=GRAPH, waiting=WAITING, saved=[0.0] + [SAVED] * (played.stages - 1))
        want = play(played, costs).peaks[tiny.pipeline_state().index("pp")]
        told = {}
        if calls != {key: 1 + (key in again) for key in calls} or len(calls) != m * played.stages // played.ranks:
            told["calls"] = dict(calls)
        if peak != want:
            told["peak"] = peak, want
        if left:
            told["left"] = left
        if told:
            wrong[schedule, recompute, m] = told
    return wrong


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.full)])
def test_forwards_and_live_activations_of_every_schedule_are_as_predicted(ranks, world):
    """Also trap 19: no recompute where I follows F directly."""
    cases = [(s, r, 6 if world == 4 else 3) for s in named.NAMED for r in ("none", "stage")]
    assert ranks(held_as_predicted, cases, world=world) == [{}] * world


def test_trap_19_the_last_stage_of_1f1b_is_not_run_again():
    for ranks in (1, 2, 4):
        schedule = named.make("1f1b", ranks, 6)
        assert directly(schedule) == {(ranks - 1, m) for m in range(6)}


class Layer(nn.Module):
    def __init__(self, s, name, calls):
        super().__init__()
        self.inner, self.key, self.calls = tiny.part(s), (s, name), calls

    def forward(self, x):
        self.calls[self.key] += 1
        return self.inner(x)


class Layers(nn.Module):
    def __init__(self, s, calls):
        super().__init__()
        self.layers = nn.ModuleList(Layer(s, name, calls) for name in range(2))

    def forward(self, x):
        return self.layers[1](self.layers[0](x))


def layer_calls(schedules):
    """Regions are run inside I, once."""
    found = {}
    for schedule in schedules:
        calls = Counter()
        pipe = tiny.pipeline(schedule, 3, lambda s: Layers(s, calls), recompute="layer")
        pipe.step(tiny.rows(3), tiny.squares)
        pipe.close()
        found[schedule] = set(calls.values()), len(calls)
    return found


def test_every_layer_runs_once_more_under_the_layer_policy(ranks):
    for found in ranks(layer_calls, ["1f1b", "zb-v", "interleaved-zb"]):
        assert found == {"1f1b": ({6}, 2), "zb-v": ({6}, 4), "interleaved-zb": ({6}, 4)}


def sends_held(schedule, microbatches):
    """The most sends that are kept at once."""
    most, plain = [0], Channel.send

    def send(self, action, value):
        plain(self, action, value)
        most[0] = max(most[0], len(self._pending_sends))

    Channel.send = send
    try:
        tiny.pipeline(schedule, microbatches).step(tiny.rows(microbatches), tiny.squares)
    finally:
        Channel.send = plain
    return most[0]


def test_trap_12_sends_are_let_go_when_a_later_message_proves_that_they_arrived(ranks):
    held = ranks(sends_held, "1f1b", 16, world=4)
    assert all(count <= 2 * 4 for count in held), f"{held}: of 16 outputs and 16 gradients"


def tensors():
    return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())


def nothing_left(schedules):
    """Tensors alive in Python before and after a step and an evaluation, without the garbage collector's help."""
    for schedule, recompute in schedules:
        pipe = tiny.pipeline(schedule, 5, recompute=recompute)
        rows = tiny.rows(5)
        for _ in range(5):  # after steps 1, 2, 4 and 8 a few gradients are looked at until the next
            pipe.step(rows, tiny.squares)
        gc.collect()
        gc.disable()
        try:
            counts = []
            for _ in range(3):  # what an earlier job left may go meanwhile; all ranks as often
                before = tensors()
                pipe.step(rows, tiny.squares)
                pipe.evaluate(rows, tiny.squares)
                pipe.forward(rows)
                counts.append(tensors() - before)
            assert 0 in counts, (schedule, recompute, counts)
        finally:
            gc.enable()
        pipe.close()


def test_after_a_step_no_output_input_or_gradient_is_alive(ranks):
    ranks(nothing_left, [("1f1b", "none"), ("zb-v", "stage")])
