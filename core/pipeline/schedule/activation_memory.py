"""What each rank holds during list scheduling, and whether it may take more without a deadlock.

Standard library only.
"""

from collections.abc import Sequence

from core.pipeline.schedule.integer_schedule import F, I, R, SchedulingProblem, W

# per stage: how far it is with a microbatch: 0 nothing, 1 F, 2 R, 3 I, 4 W done
STATE_BITS = 3
STATE_MASK = 7
ALL_DONE = 4


class ActivationMemory:
    """The memory of every rank, and the banker's rule of who may take more.

    A rank may take memory if afterwards its microbatches, oldest first, can still end one after the other. So no
    choice ends with every rank waiting for memory, if one microbatch at a time fits.

    progress[rank][microbatch] packs how far each stage of the rank is with it, STATE_BITS per stage, into one
    integer: few different ones occur, so what a microbatch still needs is remembered by that integer.
    """

    def __init__(self, problem: SchedulingProblem, limits: Sequence[float], careful: bool) -> None:
        self.problem = problem
        self.limits = limits
        self.careful = careful
        self.used = [0.0] * problem.ranks
        self.progress = [[0] * problem.microbatches for _ in range(problem.ranks)]
        # microbatches in flight
        self.oldest = [0] * problem.ranks
        self.newest = [0] * problem.ranks
        # bits to shift by, of each stage
        self.shift = [
            problem.stages_of[rank].index(stage) * STATE_BITS
            for stage, rank in enumerate(problem.placement)
        ]
        self.remaining_by_progress: list[dict[int, tuple[float, float]]] = [
            {} for _ in range(problem.ranks)
        ]
        self.peak_of_one = [self.remaining(rank, 0)[0] for rank in range(problem.ranks)]
        self.finished = [
            sum(ALL_DONE << self.shift[stage] for stage in stages) for stages in problem.stages_of
        ]

    def remaining(self, rank: int, progress: int) -> tuple[float, float]:
        """(memory it takes on top to end a microbatch with this progress, memory that it holds now)."""
        known = self.remaining_by_progress[rank].get(progress)
        if known is not None:
            return known
        problem = self.problem
        more = peak = present = 0.0
        stages = problem.stages_of[rank]
        actions = [(stage, F) for stage in stages]
        for stage in reversed(stages):
            if problem.recomputed[stage]:
                actions.append((stage, R))
            actions += [(stage, I), (stage, W)]
        for stage, kind in actions:
            change = problem.memory_change[stage * problem.stride + kind]
            is_done = progress >> self.shift[stage] & STATE_MASK > kind
            if is_done:
                present += change
            else:
                more += change
                peak = max(peak, more)
        self.remaining_by_progress[rank][progress] = (peak, present)
        return peak, present

    def fits(self, rank: int, stage: int, microbatch: int, kind: int) -> bool:
        """Whether the rank may do an action (an F with the R of a direct I counts as its R)."""
        more = self.change(rank, stage, microbatch, kind)
        limit = self.limits[rank]
        used = self.used[rank] + more
        if more <= 0:
            return True
        # room for a whole microbatch: surely safe
        if not self.careful or used + self.peak_of_one[rank] <= limit:
            return used <= limit

        # the banker's rule: let the microbatches in flight end in turn, each giving its memory back
        rank_progress = self.progress[rank]
        before = rank_progress[microbatch]
        rank_progress[microbatch] = self.after(microbatch, rank, stage, kind)
        safe = used <= limit
        for other in range(self.oldest[rank], max(self.newest[rank], microbatch + 1)):
            if not safe:
                break
            peak, gives_back = self.remaining(rank, rank_progress[other])
            safe = used + peak <= limit
            used -= gives_back
        rank_progress[microbatch] = before
        return safe

    def after(self, microbatch: int, rank: int, stage: int, kind: int) -> int:
        """The progress of the microbatch once the action is done."""
        shift = self.shift[stage]
        progress = self.progress[rank][microbatch]
        without_stage = progress & ~(STATE_MASK << shift)
        return without_stage | (kind + 1) << shift

    def change(self, rank: int, stage: int, microbatch: int, kind: int) -> float:
        """Memory that everything of the stage up to `kind` takes on top."""
        state = self.progress[rank][microbatch] >> self.shift[stage] & STATE_MASK
        first = stage * self.problem.stride
        # without R, where the stage is not recomputed
        undone = range(state, kind + 1)
        changes = self.problem.memory_change
        return sum(changes[first + k] for k in undone if k != R or self.problem.recomputed[stage])

    def do(self, rank: int, stage: int, microbatch: int, kind: int) -> None:
        """An action is done: its memory, and which microbatches are in flight."""
        self.used[rank] += self.change(rank, stage, microbatch, kind)
        self.progress[rank][microbatch] = self.after(microbatch, rank, stage, kind)
        self.newest[rank] = max(self.newest[rank], microbatch + 1)
        rank_progress = self.progress[rank]
        finished = self.finished[rank]
        while (
            self.oldest[rank] < self.newest[rank] and rank_progress[self.oldest[rank]] == finished
        ):
            self.oldest[rank] += 1
