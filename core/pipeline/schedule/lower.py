"""From a schedule of compute actions to what one rank really does: messages, their order, who has read what.

Pure: the executor follows it, tests read it. Standard library only.
"""

from dataclasses import dataclass

from core.pipeline.schedule.actions import COMMUNICATION, Action, Order, Schedule

MESSAGES = {"F": ("RECV_F", "SEND_F", -1), "I": ("RECV_B", "SEND_B", 1)}  # input from stage + step, output to - step


def _lower(schedule: Schedule, order: Order) -> Order:
    """Receives right before the action that needs them, sends right after the one that makes them.

    B becomes I, send, W: the neighbour goes on while this rank computes weight gradients. REDUCE_GRAD follows
    the last W of a stage. Communication that somebody wrote into the schedule is made anew; UNSHARD and RESHARD
    stay.
    """
    rows: list[Action] = []
    last = {action.stage: i for i, action in enumerate(order) if action.kind in "FBW"}

    def away(stage: int, own: int) -> bool:
        return 0 <= stage < schedule.stages and schedule.placement[stage] != schedule.placement[own]

    for i, action in enumerate(order):
        _, s, m = action
        for kind in "IW" if action.kind == "B" else (action.kind,):
            if kind in COMMUNICATION:
                if kind in ("UNSHARD", "RESHARD"):
                    rows.append(action)
                continue
            receive, send, step = MESSAGES.get(kind, ("", "", 0))
            if receive and away(s + step, s):
                rows.append(Action(receive, s, m))
            rows.append(Action(kind, s, m))
            if send and away(s - step, s):
                rows.append(Action(send, s, m))
        if last[s] == i and action.kind in "BW":
            rows.append(Action("REDUCE_GRAD", s))
    return tuple(rows)


def _other_end(message: Action) -> Action:
    """The receive of a send, and the send of a receive, as their rank calls it."""
    way, _, direction = message.kind.partition("_")
    step = 1 if (way == "SEND") == (direction == "F") else -1
    return Action(f"{'RECV' if way == 'SEND' else 'SEND'}_{direction}", message.stage + step, message.microbatch)


@dataclass(frozen=True)
class RankPlan:
    """What one rank does. inbox[sender]: the receives from that rank, in the order in which it sends.

    outbox[send]: to whom. receipts[receive]: sends of this rank that must have arrived once that message is
    here, because the peer had read them before it sent it: they can be let go without waiting.
    """

    order: Order
    inbox: dict[int, tuple[Action, ...]]
    outbox: dict[Action, int]
    receipts: dict[Action, tuple[Action, ...]]

    @property
    def links(self) -> set[tuple[int, int]]:
        """(sender, receiver) of the peers; the rank itself is -1."""
        return {(peer, -1) for peer in self.inbox} | {(-1, peer) for peer in self.outbox.values()}


def plan(schedule: Schedule, rank: int) -> RankPlan:
    """The plan of `rank`."""
    orders = [_lower(schedule, order) for order in schedule.orders]
    outbox = {a: schedule.placement[_other_end(a).stage] for a in orders[rank] if a.kind.startswith("SEND")}
    inbox: dict[int, tuple[Action, ...]] = {}
    receipts: dict[Action, tuple[Action, ...]] = {}
    for peer, order in enumerate(orders):
        if peer == rank:
            continue
        read: list[Action] = []
        sent: list[Action] = []
        for action in order:
            if "_" not in action.kind or action.kind == "REDUCE_GRAD":
                continue
            other = _other_end(action)
            if schedule.placement[other.stage] != rank:
                continue
            if action.kind.startswith("RECV"):
                read.append(other)
            else:
                sent.append(other)
                receipts[other], read = tuple(read), []
        if sent:
            inbox[peer] = tuple(sent)
    return RankPlan(orders[rank], inbox, outbox, receipts)
