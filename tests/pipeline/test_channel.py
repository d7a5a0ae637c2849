"""Messages between ranks: any schedule, any depth; the traps of gloo, each by name."""

import ast
import gc
import itertools
import random
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import core
from core.parallel_state import ParallelConfig, ParallelState
from core.parallel_state.random import mix32
from core.pipeline import Pipeline
from core.pipeline.run.messages.channel import Channel
from core.pipeline.run.step import stage_seed
from core.pipeline.schedule import schedules as named
from core.pipeline.schedule.lower import plan
from tests.pipeline import tiny
from tests.pipeline.test_lower import any_order
from tests.states import state


def channel(ps, todo, depth):
    links = {(a, b): tuple(ps.rank if i == -1 else i for i in (a, b)) for a, b in todo.links}
    made = ps.connect(links.values())
    return Channel(todo, {key: made[link] for key, link in links.items()}, int, ps.device, depth)


def value(boundary, m):
    """What crosses boundary s (between stages s and s + 1): a tensor or a nesting with integers, by boundary."""
    x = torch.full((2, 1 + boundary), float(100 * boundary + m), requires_grad=True)
    return {"x": [x, torch.tensor([m])], "n": boundary} if boundary % 2 else x


def gradients(boundary, m):
    return [torch.full((2, 1 + boundary), -float(100 * boundary + m))]


def exchange(ps, schedule, depth):
    """Everything that this rank sends and takes, without computing; what arrived wrong."""
    todo, wrong = plan(schedule, ps.rank), []
    pipe = channel(ps, todo, depth)
    for action in todo.order:
        kind, s, m = action
        if kind == "SEND_F":
            pipe.send(action, value(s, m))
        elif kind == "SEND_B":
            pipe.send(action, gradients(s - 1, m))
        elif kind in ("RECV_F", "RECV_B"):
            got, want = pipe.take(action), value(s - 1, m) if kind == "RECV_F" else gradients(s, m)
            if str(got) != str(want):
                wrong.append(f"{action}: {got} and not {want}")
    pipe.finish()
    assert not pipe._pending_sends
    return wrong


def exchanges(seeds, depths):
    ps, wrong = tiny.pipeline_state(), {}
    world = ps.size("pp")
    taken = {}
    for seed in seeds:
        chance = random.Random(seed)
        placement = [*range(world), *(chance.randrange(world) for _ in range(chance.randrange(4)))]
        chance.shuffle(placement)
        taken[seed] = any_order(placement, world, chance.randint(1, 5), chance)
    taken |= {name: named.make(name, world, 8) for name in named.NAMED}
    for key, schedule in taken.items():
        for depth in depths:
            if told := exchange(ps, schedule, depth):
                wrong[key, depth] = told
    return wrong


@pytest.mark.parametrize("depths", [(0, 1000), pytest.param((1, 2, 5), marks=pytest.mark.full)], ids=str)
@pytest.mark.parametrize("world", [2, 4])
def test_trap_14_15_any_schedule_at_any_depth_without_deadlock(ranks, world, depths):
    """Messages that are taken out of order (zb-v, random ones) arrive right, posted ahead or not."""
    assert ranks(exchanges, range(12 if world == 2 else 3), depths, world=world) == [{}] * world


def test_trap_07_seeds_have_32_bits_and_do_not_repeat():
    parts = (0, 1, 2, 2**32, 2**32 + 1, 2**40)
    facts = itertools.product(parts, parts, range(64), (0, 7))
    seeds = [stage_seed(*each) for each in facts]
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert len(set(seeds)) == len(seeds), "even where only bits above 32 differ"
    many = Counter(mix32(1, "stage", 0, step, m) for step in range(300) for m in range(300))
    assert len(many) >= 90_000 - 8, "collisions as of random numbers: one expected"


class Draws(nn.Module):
    """Somebody's module that draws from torch's generator."""

    def __init__(self, s, drawn):
        super().__init__()
        self.inner, self.index, self.drawn = tiny.part(s), s, drawn

    def forward(self, x):
        noise = torch.rand(3)
        self.drawn.append((self.index, noise.tolist()))
        return self.inner(x) * noise.sum()


def draws(tp, recompute):
    """(data rank, what each stage drew) and the gradients' sum over replicas."""
    ps, drawn = state(tp=tp, pp=2), []
    stages = [Draws(ps.index("pp"), drawn)]
    plain, before = torch.manual_seed, torch.get_rng_state()
    count = 4 // ps.size("dp")

    def refuse(_):
        raise AssertionError("torch.manual_seed visits every backend: 70 us")

    torch.manual_seed = torch.random.manual_seed = refuse
    try:
        pipe = Pipeline(stages, ps=ps, schedule="zb-h1", num_microbatches=count, recompute=recompute, seed=3)
        rows = tiny.rows(4)[ps.index("dp") * count :][:count]
        pipe.step(rows, tiny.squares)
    finally:
        torch.manual_seed = torch.random.manual_seed = plain
    assert torch.equal(before, torch.get_rng_state()), "the user's generator is where it was"
    pipe.close()
    return ps.coordinate["pp"], ps.coordinate["dp"], drawn


def test_trap_08_09_seeds_cost_little_and_follow_the_global_microbatch(ranks):
    """Equal draws on every layout: two replicas with two microbatches draw what one with four does; R as F."""
    alone = {stage: found for stage, _, found in ranks(draws, 1, "none", world=2)}
    assert len({str(noise) for found in alone.values() for _, noise in found}) == 8, "all differ"
    both = {0: [], 1: []}
    for stage, _, found in sorted(ranks(draws, 1, "none", world=4), key=lambda each: each[1]):
        both[stage] += found
    assert both == alone
    for stage, _, found in ranks(draws, 1, "stage", world=2):
        again = Counter(str(each) for each in found)
        assert set(again) == {str(each) for each in alone[stage]}
        assert set(again.values()) <= ({2} if stage == 0 else {1, 2}), "R draws what F drew"
    for stage, _, found in ranks(draws, 2, "none", world=4):
        assert found == alone[stage], "alike on tensor ranks"


def test_trap_10_nothing_is_polled():
    """On gloo `is_completed` is False until `wait`, and a wait that expires closes the connection for ever."""
    for path in Path(core.__path__[0]).rglob("*.py"):
        text = path.read_text()
        names = {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
        programs = {"poll"} if "import subprocess" in text else set()
        assert not (names - programs) & {"is_completed", "is_success", "get_future", "poll"}, path


class Naps(nn.Module):
    def __init__(self, s, rank):
        super().__init__()
        self.inner, self.nap = tiny.part(s), 0.004 * ((s + rank) % 3)

    def forward(self, x):
        time.sleep(self.nap)
        return self.inner(x)


def orders():
    pipe = tiny.pipeline("zb-v", 6, lambda s: Naps(s, tiny.pipeline_state().rank))
    taken = []
    for _ in range(3):
        pipe.step(tiny.rows(6), tiny.squares)
        taken.append([event.action for event in pipe._measured().events])
    return taken, [a for a in plan(pipe.schedule, pipe.ps.index("pp")).order if a.kind in "FIWR"]


def test_trap_11_the_order_is_the_schedules_whoever_is_late(ranks):
    for taken, want in ranks(orders, world=2):
        assert taken == [want] * 3


def dropped(late):
    """The caller forgets what it sent; the receiver comes much later."""
    ps = tiny.pipeline_state()
    schedule = named.make("1f1b", 2, 4)
    todo = plan(schedule, ps.rank)
    pipe = channel(ps, todo, 0)
    if ps.rank == 1:
        time.sleep(late)
    found = []
    for action in todo.order:
        if action.kind == "SEND_F":
            pipe.send(action, torch.full((1 << 16,), float(action.microbatch), requires_grad=True))
            gc.collect()
        elif action.kind == "SEND_B":
            pipe.send(action, [torch.full((1 << 16,), -float(action.microbatch))])
        elif action.kind.startswith("RECV"):
            got = pipe.take(action)
            got = got if isinstance(got, torch.Tensor) else got[0]
            found.append((str(action), got.unique().tolist()))
    pipe.finish()
    return found


def test_trap_12_a_message_whose_tensor_nobody_else_holds_arrives(ranks):
    first, second = ranks(dropped, 0.2)
    assert first == [(f"0RECV_B{m}", [-float(m)]) for m in range(4)]
    assert second == [(f"1RECV_F{m}", [float(m)]) for m in range(4)]


def posted(depth):
    """How many receives are posted at most, right after one was taken."""
    plain, most = Channel.take, [0]

    def take(self, action):
        result = plain(self, action)
        most[0] = max(most[0], *(len(inbox.posted) for inbox in self._inboxes.values()))
        return result

    Channel.take = take
    try:
        tiny.pipeline("1f1b", 8, receive_ahead=depth).step(tiny.rows(8), tiny.squares)
    finally:
        Channel.take = plain
    return most[0]


def test_trap_15_so_many_receives_are_posted_ahead(ranks):
    for depth in (0, 1, 4, 1000):
        assert max(ranks(posted, depth)) == min(depth, 7)


def groups_of(name):
    ps = ParallelState.build(ParallelConfig(pipeline=4), device="cpu")
    where = named.placement(name, 4)
    stages = [tiny.part(s) for s, rank in enumerate(where) if rank == ps.rank]
    pipe = Pipeline(stages, ps=ps, schedule=name, num_microbatches=4)
    before = len(ps._links)
    pipe.step(tiny.rows(4), tiny.squares)
    pipe.evaluate(tiny.rows(4), tiny.squares)
    collective, links = {g.ranks for g in ps.groups.values()}, len(ps._links)
    assert links == before, "every connection is made when the pipeline is built"
    ps.destroy()
    return len(collective), links


def test_trap_16_one_group_per_direction_and_neighbour_beside_at_most_eight(ranks):
    assert [links for _, links in ranks(groups_of, "1f1b", world=4)] == [2, 4, 4, 2]
    assert [links for _, links in ranks(groups_of, "zb-v", world=4)] == [2, 4, 4, 2]
    looped = ranks(groups_of, "interleaved-1f1b", world=4)
    assert [links for _, links in looped] == [4] * 4 and all(count <= 8 for count, _ in looped)
