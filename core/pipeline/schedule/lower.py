"""From a schedule of compute actions to what one rank really does: messages, their order, who has read what.

Pure: the executor follows it, tests read it. Standard library only.
"""

from dataclasses import dataclass

from core.pipeline.schedule.actions import COMMUNICATION, Action, Order, Schedule

# F takes its input from the previous stage, I from the next one: (receive, send, where the input comes from)
MESSAGES = {"F": ("RECV_F", "SEND_F", -1), "I": ("RECV_B", "SEND_B", 1)}


def _add_messages(schedule: Schedule, order: Order) -> Order:
    """Receives right before the action that needs them, sends right after the one that makes them.

    B becomes I, send, W: the neighbour goes on while this rank computes weight gradients. REDUCE_GRAD follows
    the last W of a stage. Communication that a user wrote into the schedule is inferred anew; UNSHARD and RESHARD
    stay.
    """
    last_use = {action.stage: index for index, action in enumerate(order) if action.kind in "FBW"}

    def is_remote(stage: int, local_stage: int) -> bool:
        """Whether a stage exists and is on another rank."""
        if not 0 <= stage < schedule.stages:
            return False
        return schedule.placement[stage] != schedule.placement[local_stage]

    actions: list[Action] = []
    for index, action in enumerate(order):
        _, stage, microbatch = action
        if action.kind in COMMUNICATION:
            if action.kind in ("UNSHARD", "RESHARD"):
                actions.append(action)
            continue
        # B is split, so that the previous stage gets its gradient before this rank computes W
        halves = "IW" if action.kind == "B" else action.kind
        for kind in halves:
            if kind not in MESSAGES:
                actions.append(Action(kind, stage, microbatch))
                continue
            receive, send, direction = MESSAGES[kind]
            if is_remote(stage + direction, stage):
                actions.append(Action(receive, stage, microbatch))
            actions.append(Action(kind, stage, microbatch))
            if is_remote(stage - direction, stage):
                actions.append(Action(send, stage, microbatch))
        if last_use[stage] == index and action.kind in "BW":
            actions.append(Action("REDUCE_GRAD", stage))
    return tuple(actions)


def _other_end(message: Action) -> Action:
    """The receive of a send, and the send of a receive, as the other rank calls it."""
    verb, _, direction = message.kind.partition("_")
    other_verb = "RECV" if verb == "SEND" else "SEND"
    # to, or for a receive from, the next stage
    goes_up = (verb == "SEND") == (direction == "F")
    other_stage = message.stage + 1 if goes_up else message.stage - 1
    return Action(f"{other_verb}_{direction}", other_stage, message.microbatch)


@dataclass(frozen=True)
class RankPlan:
    """What one rank does. inbox[sender]: the receives from that rank, in the order in which it sends.

    outbox[send]: to whom. receipts[receive]: sends of this rank that must have arrived once that message is
    here, because the peer had read them before it sent it: their memory can be freed without waiting.
    """

    order: Order
    inbox: dict[int, tuple[Action, ...]]
    outbox: dict[Action, int]
    receipts: dict[Action, tuple[Action, ...]]

    @property
    def links(self) -> set[tuple[int, int]]:
        """(sender, receiver) of the peers; the rank itself is -1."""
        receiving = {(peer, -1) for peer in self.inbox}
        sending = {(-1, peer) for peer in self.outbox.values()}
        return receiving | sending


def plan(schedule: Schedule, rank: int) -> RankPlan:
    """The plan of `rank`."""
    orders = [_add_messages(schedule, order) for order in schedule.orders]
    # to whom each send goes: the rank of the neighbouring stage
    outbox = {}
    for action in orders[rank]:
        if action.kind.startswith("SEND"):
            outbox[action] = schedule.placement[_other_end(action).stage]

    inbox: dict[int, tuple[Action, ...]] = {}
    receipts: dict[Action, tuple[Action, ...]] = {}
    for peer, order in enumerate(orders):
        if peer == rank:
            continue
        # follow the peer: what it reads from this rank before its next message to this rank has surely arrived
        read_by_peer: list[Action] = []
        sent_by_peer: list[Action] = []
        for action in order:
            if not action.kind.startswith(("SEND", "RECV")):
                continue
            local_action = _other_end(action)
            if schedule.placement[local_action.stage] != rank:
                continue
            if action.kind.startswith("RECV"):
                read_by_peer.append(local_action)
            else:
                sent_by_peer.append(local_action)
                receipts[local_action], read_by_peer = tuple(read_by_peer), []
        if sent_by_peer:
            inbox[peer] = tuple(sent_by_peer)
    return RankPlan(orders[rank], inbox, outbox, receipts)
