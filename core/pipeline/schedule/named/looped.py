"""Named schedules on looped placements: GPipe, 1F1B, interleaved 1F1B, looped BFS, ZB-H1 and ZB-H2.

Standard library only.

All have the same three phases, called as in the papers: warm-up (F only), steady state (one F, one backward), and
cool-down (backward only). They differ in how long the warm-up is and when W runs.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from core.pipeline.schedule.actions import Action, Schedule, looped
from core.pipeline.schedule.passes import only_microbatches


def _three_phases(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int,
    *,
    warmup: Callable[[int], int],
    weight_lag: Callable[[int], int] | None = None,
    group: int | None = None,
) -> Schedule:
    """Rank r does `warmup(r)` F, then F and backward in turn, then the backward that remains.

    weight_lag: splits backward: I when its turn comes, W `weight_lag(r)` turns later. Without it backward is B.
    group: F takes chunk after chunk, `group` microbatches (default: ranks) of each; backward the chunks in reverse.
    """
    group = group or ranks
    # rounded up to full groups; what is too much is cut off below
    full_count = -(-microbatches // group) * group

    def turns(rank: int, chunk_order: Sequence[int]) -> list[tuple[int, int]]:
        """(stage, microbatch) in the order in which a rank does one kind of action."""
        order = []
        for first in range(0, full_count, group):
            for chunk in chunk_order:
                order += [
                    (chunk * ranks + rank, microbatch) for microbatch in range(first, first + group)
                ]
        return order

    def rank_order(rank: int) -> Iterator[Action]:
        forward_turns = turns(rank, range(chunks))
        backward_turns = turns(rank, range(chunks)[::-1])
        ahead = min(warmup(rank), len(forward_turns))
        lag = weight_lag(rank) if weight_lag else 0
        backward_kind = "I" if weight_lag else "B"

        # Warm-up phase: F only
        for turn in forward_turns[:ahead]:
            yield Action("F", *turn)
        # Steady phase while F remain, cool-down phase after them: F (if any), backward, and the W of `lag` turns ago
        for index in range(len(backward_turns) + lag):
            if ahead + index < len(forward_turns):
                yield Action("F", *forward_turns[ahead + index])
            if index < len(backward_turns):
                yield Action(backward_kind, *backward_turns[index])
            if weight_lag and index >= lag:
                yield Action("W", *backward_turns[index - lag])

    schedule = Schedule.make(looped(ranks, chunks), map(rank_order, range(ranks)), name)
    return only_microbatches(schedule, microbatches)


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards: holds every microbatch."""
    build = partial(_three_phases, "gpipe", ranks, microbatches, 1, group=microbatches)
    return build(warmup=lambda rank: microbatches)


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """1F1B, PipeDream-flush: a backward as soon as possible, so that rank r holds only ranks - r microbatches."""
    return _three_phases("1f1b", ranks, microbatches, 1, warmup=lambda rank: ranks - 1 - rank)


def interleaved_1f1b(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """1F1B over `chunks` stages per rank (Megatron's virtual pipeline): a bubble `chunks` times smaller."""
    earlier_chunks = (chunks - 1) * ranks
    # Megatron's count: (ranks - rank - 1) * 2 with chunks, so that backward of the last chunk finds F done
    per_rank = 2 if chunks > 1 else 1
    build = partial(_three_phases, "interleaved-1f1b", ranks, microbatches, chunks)
    return build(warmup=lambda rank: earlier_chunks + per_rank * (ranks - 1 - rank))


def looped_bfs(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Breadth first: every microbatch of one chunk before the next chunk: ZeRO-3 gathers weights once per chunk."""
    build = partial(_three_phases, "looped-bfs", ranks, microbatches, chunks, group=microbatches)
    return build(warmup=lambda rank: chunks * microbatches)


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """ZB-H1 (2401.10241): 1F1B whose W come `rank` turns later and fill the bubbles; no more memory than 1F1B."""
    build = partial(_three_phases, "zb-h1", ranks, microbatches, 1)
    # rank r holds ranks - r graphs and r waiting W: in sum what rank 0 of 1F1B holds
    return build(warmup=lambda rank: ranks - 1 - rank, weight_lag=lambda rank: rank)


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """ZB-H2 (2401.10241): twice the warm-up of ZB-H1, no bubble once a rank has begun, nearly twice the memory."""
    build = partial(_three_phases, "zb-h2", ranks, microbatches, 1)
    return build(warmup=lambda rank: 2 * (ranks - 1 - rank), weight_lag=lambda rank: 2 * rank)


def interleaved_zb(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """ZB-H1 over `chunks` stages per rank."""
    earlier_chunks = (chunks - 1) * ranks
    build = partial(_three_phases, "interleaved-zb", ranks, microbatches, chunks)
    return build(
        warmup=lambda rank: earlier_chunks + ranks - 1 - rank, weight_lag=lambda rank: rank
    )
