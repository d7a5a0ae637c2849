"""Which pipeline ranks a schedule connects: its plan for this rank, and a channel to all its peers."""

from core.parallel_state.state import ParallelState
from core.pipeline.run.messages.channel import Channel
from core.pipeline.schedule.actions import Schedule
from core.pipeline.schedule.lower import RankPlan, plan


class Connections:
    """This rank's plans of the schedules that it has been connected for.

    receive_ahead: receives posted beyond the one that is needed.
    """

    def __init__(self, ps: ParallelState, receive_ahead: int) -> None:
        self._ps = ps
        self._receive_ahead = receive_ahead
        self._global_ranks = ps.grid.members(ps.rank, "pp")
        self._plans: dict[Schedule, RankPlan] = {}

    def plan(self, schedule: Schedule) -> RankPlan:
        """This rank's plan, connected to all its peers. Collective over pp where the schedule is new."""
        if schedule not in self._plans:
            rank_plan = plan(schedule, self._ps.index("pp"))
            self._plans[schedule] = rank_plan
            self._ps.connect(self._links(rank_plan).values())
        return self._plans[schedule]

    def channel(self, schedule: Schedule, rows: int | None) -> Channel:
        """The messages of one step. rows: of this rank's batch; None: it has none."""
        rank_plan = self.plan(schedule)
        links = self._links(rank_plan)
        by_global_rank = self._ps.connect(links.values())
        groups = {link: by_global_rank[global_link] for link, global_link in links.items()}
        return Channel(
            rank_plan, groups, self._global_rank, self._ps.device, self._receive_ahead, rows
        )

    def forget(self) -> None:
        """Drop the plans: another schedule takes the place of all that were used."""
        self._plans.clear()

    def _links(self, rank_plan: RankPlan) -> dict[tuple[int, int], tuple[int, int]]:
        """(sender, receiver) as pipeline ranks -> as global ranks."""
        links = {}
        for sender, receiver in rank_plan.links:
            links[sender, receiver] = self._global_rank(sender), self._global_rank(receiver)
        return links

    def _global_rank(self, index: int) -> int:
        """The global rank of a pipeline rank; of this one for -1."""
        if index == -1:
            return self._ps.rank
        return self._global_ranks[index]
