"""Ways to play schedules that several tests share."""

from core.pipeline.schedule.actions import Action, Schedule
from core.pipeline.schedule.player import Costs, Played, play


def play_whole(schedule: Schedule, fused: bool = False, **costs) -> Played:
    """Played with the costs of a rank's whole slice."""
    return play(schedule, Costs(**costs).divided(schedule.stages // schedule.ranks), fused_backward=fused)


def over_ideal(played: Played) -> float:
    """Step over the work of the busiest rank."""
    return played.makespan / max(played.timeline.busy(rank) for rank in range(len(played.timeline.rows)))


def recompute_everywhere(schedule: Schedule) -> Schedule:
    """What other implementations do: R before every I and B, also right after its own F."""
    orders = (
        [a for action in order for a in ([action._replace(kind="R")] * (action.kind in "IB") + [action])]
        for order in schedule.orders
    )
    return Schedule.make(schedule.placement, orders, schedule.name)


def written(text: str, placement: tuple[int, ...]) -> Schedule:
    """A schedule from one line of actions per rank, without sends."""
    return Schedule.make(placement, ([Action.parse(word) for word in row.split()] for row in text.split("\n")))
