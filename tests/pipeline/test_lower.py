"""What one rank does, from a schedule: pure facts, of every schedule that can be drawn."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.pipeline import Action, Schedule, play
from core.pipeline.schedule import schedules as named
from core.pipeline.schedule.lower import plan
from core.pipeline.schedule.passes import add_recompute, split_backward


@st.composite
def random_schedules(draw):
    """Valid by construction: any order in which a single process could do it, dealt to the ranks."""
    ranks = draw(st.integers(1, 4))
    extra = draw(st.lists(st.integers(0, ranks - 1), max_size=4))
    chance = draw(st.randoms(use_true_random=False))
    placement = [*range(ranks), *extra]
    chance.shuffle(placement)
    return any_order(placement, ranks, draw(st.integers(1, 4)), chance)


def any_order(placement, ranks, microbatches, chance):
    last = len(placement) - 1
    waiting = {Action("F", 0, m) for m in range(microbatches)}
    orders = [[] for _ in range(ranks)]
    while waiting:
        kind, s, m = action = chance.choice(sorted(waiting))
        waiting.remove(action)
        orders[placement[s]].append(action)
        if kind == "F":
            waiting.add(Action("F", s + 1, m) if s < last else back(s, m, chance))
        if kind in "IB":
            waiting |= {Action("W", s, m)} if kind == "I" else set()
            waiting |= {back(s - 1, m, chance)} if s else set()
    return Schedule.make(placement, orders, "random")


def back(stage, microbatch, chance):
    return Action(chance.choice("IB"), stage, microbatch)


def plans(schedule):
    return [plan(schedule, rank) for rank in range(schedule.ranks)]


def the_send_of(receive):
    kind, s, m = receive
    return Action(kind.replace("RECV", "SEND"), s + (-1 if kind == "RECV_F" else 1), m)


NAMED = [(name, ranks, m) for name in named.NAMED for ranks, m in ((1, 2), (2, 3), (4, 2), (4, 8))]
TAKEN = [named.make(*case) for case in NAMED] + [add_recompute(named.make(*case)) for case in NAMED]


def check_messages(schedule):
    made = plans(schedule)
    sends = {a: (rank, to) for rank, p in enumerate(made) for a, to in p.outbox.items()}
    receives = {a: rank for rank, p in enumerate(made) for a in p.order if a.kind.startswith("RECV")}
    assert len(receives) == len(sends) == sum(a.kind.startswith("SEND") for p in made for a in p.order)
    for rank, p in enumerate(made):
        assert {a for inbox in p.inbox.values() for a in inbox} == {a for a in p.order if a.kind.startswith("RECV")}
        for peer, inbox in p.inbox.items():
            order = [a for a in made[peer].order if made[peer].outbox.get(a) == rank]
            assert [the_send_of(a) for a in inbox] == order, "in the order in which the peer sends"
            assert all(sends[the_send_of(a)] == (peer, rank) and receives[a] == rank for a in inbox)
        assert p.links == {(peer, -1) for peer in p.inbox} | {(-1, to) for to in p.outbox.values()}


def check_places(schedule):
    """B is I, send, W; a receive right before, a send right after its action; the reduction after the last W."""
    for rank, p in enumerate(plans(schedule)):
        compute = [a for a in p.order if a.kind in "FIWR"]
        given = list(split_backward(schedule).orders[rank])
        assert compute == given
        for i, (kind, s, m) in enumerate(p.order):
            before, after = p.order[i - 1] if i else None, p.order[i + 1] if i + 1 < len(p.order) else None
            if kind.startswith("RECV"):
                assert after == Action("F" if kind == "RECV_F" else "I", s, m)
            if kind.startswith("SEND"):
                assert before == Action("F" if kind == "SEND_F" else "I", s, m)
            if kind == "REDUCE_GRAD":
                rest = [a for a in p.order[i + 1 :] if a.stage == s]
                assert not rest and before.kind == "W" and before.stage == s, "nothing of this stage comes after it"
        reduced = [a.stage for a in p.order if a.kind == "REDUCE_GRAD"]
        assert sorted(reduced) == list(schedule.stages_of(rank)), "once for each stage"


def replay(schedule):
    """Every rank as far as it goes, again and again: when a message is taken, what has the peer read by then?"""
    made, at, sent = plans(schedule), [0] * schedule.ranks, {}
    read = [set() for _ in made]  # sends that a rank has read
    moved = True
    while moved:
        moved = False
        for rank, p in enumerate(made):
            while at[rank] < len(p.order):
                action = p.order[at[rank]]
                if action.kind.startswith("RECV"):
                    if the_send_of(action) not in sent:
                        break
                    seen = sent[the_send_of(action)]
                    for receipt in p.receipts[action]:
                        assert receipt in p.outbox and receipt in seen, f"{receipt} may not have arrived at {action}"
                    read[rank].add(the_send_of(action))
                elif action.kind.startswith("SEND"):
                    sent[action] = frozenset(read[rank])
                at[rank] += 1
                moved = True
    assert all(i == len(p.order) for i, p in zip(at, made, strict=True)), "it ends"


@settings(max_examples=120, deadline=None)
@given(random_schedules())
def test_any_schedule_is_lowered_right(schedule):
    play(schedule)
    for variant in (schedule, add_recompute(schedule)):
        check_messages(variant)
        check_places(variant)
        replay(variant)


@pytest.mark.parametrize("check", [check_messages, check_places, replay])
def test_named_schedules_are_lowered_right(check):
    for schedule in TAKEN:
        check(schedule)


def test_receipts_free_nearly_every_send_before_the_end():
    """What is left is waited for at the end: at most what a pipeline can hold."""
    for schedule in (named.make("1f1b", 4, 32), named.make("zb-v", 4, 32)):
        for p in plans(schedule):
            freed = {send for sends in p.receipts.values() for send in sends}
            assert len(p.outbox) - len(freed) <= 64 + 8 and len(freed) >= 8
            assert len([s for sends in p.receipts.values() for s in sends]) == len(freed), "each once"


def test_trap_14_zb_v_uses_messages_out_of_order():
    """6 of 96 overtake another at 4 ranks and 8 microbatches, 28 of 448 at 8 and 16; 1F1B and interleaved none."""

    def out_of_order(name, ranks, m):
        late = total = 0
        for p in plans(named.make(name, ranks, m)):
            for inbox in p.inbox.values():
                used = [a for a in p.order if a in inbox]
                left = list(inbox)
                for action in used:
                    total += 1
                    late += left[0] != action
                    left.remove(action)
        return late, total

    assert out_of_order("1f1b", 4, 8)[0] == out_of_order("interleaved-1f1b", 4, 8)[0] == 0
    assert [out_of_order("zb-v", 4, 8), out_of_order("zb-v", 8, 16)] == [(6, 96), (28, 448)]


def test_trap_17_an_input_gradient_is_sent_before_its_weight_gradient_is_computed():
    for name in named.NAMED:
        for p in plans(named.make(name, 4, 8)):
            for send in (a for a in p.order if a.kind == "SEND_B"):
                i, w = (p.order.index(send._replace(kind=kind)) for kind in "IW")
                assert i + 1 == p.order.index(send) < w


def test_communication_in_a_users_schedule_is_made_anew():
    words = "0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD", "1RECV_F0 1UNSHARD 1F0 1B0 1RESHARD 1SEND_B0"
    schedule = Schedule.make((0, 1), [[Action.parse(w) for w in row.split()] for row in words])
    assert " ".join(map(str, plan(schedule, 0).order)) == "0F0 0SEND_F0 0RECV_B0 0I0 0W0 0REDUCE_GRAD"
    want = "1UNSHARD 1RECV_F0 1F0 1I0 1SEND_B0 1W0 1REDUCE_GRAD 1RESHARD"
    assert " ".join(map(str, plan(schedule, 1).order)) == want
