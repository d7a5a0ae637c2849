"""The named schedules: functions of (ranks, microbatches[, chunks]). Standard library only.

A schedule of your own is any function `(ranks, microbatches) -> Schedule`; `make` takes it in place of a name.
Every one works for any number of ranks and microbatches, also fewer microbatches than ranks.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from functools import partial
from typing import NamedTuple

from core.pipeline.schedule.actions import Action, Schedule, looped, v_shape
from core.pipeline.schedule.passes import only_microbatches
from core.pipeline.schedule.player import check, play
from core.pipeline.schedule.squeeze import squeeze

Generator = Callable[[int, int], Schedule]


def _warm_up_then_alternate(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int,
    *,
    warmup: Callable[[int], int],
    lag: Callable[[int], int] | None = None,
    group: int | None = None,
) -> Schedule:
    """Rank r does `warmup(r)` F, then F and backward in turn, then the backward that is left.

    With `lag` backward is split: I when its turn comes, W `lag(r)` turns later; without, it is B.
    F takes chunk after chunk, `group` microbatches (default: ranks) of each, backward the chunks in reverse.
    """
    group = group or ranks
    count = -(-microbatches // group) * group

    def turns(rank: int, order_of_chunks: Sequence[int]) -> list[tuple[int, int]]:
        waves = [range(first, first + group) for first in range(0, count, group)]
        return [(c * ranks + rank, m) for wave in waves for c in order_of_chunks for m in wave]

    def row(rank: int) -> Iterator[Action]:
        forward, backward = turns(rank, range(chunks)), turns(rank, range(chunks)[::-1])
        ahead = min(warmup(rank), len(forward))
        yield from (Action("F", *turn) for turn in forward[:ahead])
        for k in range(len(backward) + (lag(rank) if lag else 0)):
            yield from (Action("F", *turn) for turn in forward[ahead + k : ahead + k + 1])
            yield from (Action("I" if lag else "B", *turn) for turn in backward[k : k + 1])
            if lag and k >= lag(rank):
                yield Action("W", *backward[k - lag(rank)])

    return only_microbatches(Schedule.make(looped(ranks, chunks), map(row, range(ranks)), name), microbatches)


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards: holds every microbatch."""
    everything = partial(_warm_up_then_alternate, "gpipe", ranks, microbatches, 1, group=microbatches)
    return everything(warmup=lambda rank: microbatches)


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """1F1B, PipeDream-flush: a backward as soon as possible, so that rank r holds only ranks - r microbatches."""
    return _warm_up_then_alternate("1f1b", ranks, microbatches, 1, warmup=lambda rank: ranks - 1 - rank)


def interleaved_1f1b(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """1F1B over `chunks` stages per rank (Megatron's virtual pipeline): a bubble `chunks` times smaller."""
    first = (chunks - 1) * ranks
    name, step = "interleaved-1f1b", 2 if chunks > 1 else 1
    return _warm_up_then_alternate(
        name, ranks, microbatches, chunks, warmup=lambda rank: first + step * (ranks - 1 - rank)
    )


def looped_bfs(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Every microbatch of one chunk before the next chunk: parameters are gathered once per chunk."""
    everything = partial(_warm_up_then_alternate, "looped-bfs", ranks, microbatches, chunks, group=microbatches)
    return everything(warmup=lambda rank: chunks * microbatches)


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """1F1B with W later by rank: no more memory than 1F1B's first rank, the W fill the bubbles (2401.10241)."""
    steady = partial(_warm_up_then_alternate, "zb-h1", ranks, microbatches, 1, warmup=lambda rank: ranks - 1 - rank)
    return steady(lag=lambda rank: rank)


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """Twice the warm-up of ZB-H1: no rank ever waits once it has begun, for nearly twice the memory."""
    steady = partial(_warm_up_then_alternate, "zb-h2", ranks, microbatches, 1)
    return steady(warmup=lambda rank: 2 * (ranks - 1 - rank), lag=lambda rank: 2 * rank)


def interleaved_zb(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """ZB-H1 over `chunks` stages per rank."""
    first = (chunks - 1) * ranks
    steady = partial(_warm_up_then_alternate, "interleaved-zb", ranks, microbatches, chunks, lag=lambda rank: rank)
    return steady(warmup=lambda rank: first + ranks - 1 - rank)


def _v_pattern(name: str, ranks: int, microbatches: int, least: int, pattern: Callable[[int, int], str]) -> Schedule:
    """V placement; `pattern(rank, microbatches)` says the order as `F0 F1 I1 W1`: kind and chunk.

    The microbatch is the next one of that kind and chunk, where B counts as an I and a W. The pattern is asked
    for at least `least` microbatches; those that are too many are left out again.
    """
    count = max(microbatches, least)

    def row(rank: int) -> Iterator[Action]:
        stages, done = (rank, 2 * ranks - 1 - rank), Counter[str]()
        for word in pattern(rank, count).split():
            kind, chunk = word[0], word[1:]
            halves = "IW" if kind == "B" else kind
            yield Action(kind, stages[int(chunk)], done[halves[0] + chunk])
            done.update(half + chunk for half in halves)

    return only_microbatches(Schedule.make(v_shape(ranks), map(row, range(ranks)), name), microbatches)


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """Zero bubble with 1F1B's memory, even over the ranks (2401.10241): no rank waits once it has begun if F=I=W."""

    def pattern(rank: int, count: int) -> str:
        below = ranks - rank
        both = count - 2 * ranks + 1 + rank  # rounds of the steady state until chunk 0 has no F left
        # warm-up: the first microbatches go down the V and up again, until the last stage begins its backward
        warmup = "F0 " * (2 * below - 1) + "F1 F0 " * rank + "F1 I1 W1 " * below
        # steady state: one F, I and W of each chunk in turn, W at once; then without the F of chunk 0
        steady = "F0 I0 W0 F1 I1 W1 " * both + "I0 W0 F1 I1 W1 " * (count - ranks - both)
        # cool-down: only I is waited for by others; the W that were put off fill what would be idle
        cooldown = "I0 I1 " * rank + "I0 W0 " * below + "W1 " * rank + "W0 " * rank
        return warmup + steady + cooldown

    return _v_pattern("zb-v", ranks, microbatches, 2 * ranks - 1, pattern)


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """DualPipe cut in half: F of one chunk beside B of the other, so that their communication can overlap.

    The steps are those of the loop that DeepSeek published with it (DualPipeV).
    """

    def pattern(rank: int, count: int) -> str:
        below = ranks - 1 - rank
        # steps 1 to 3 of DualPipe's loop: nF0, nF0F1, nI1W1F1
        warmup = "F0 " * (2 * below) + "F0 F1 " * (rank + 1) + "I1 W1 F1 " * below
        # step 4, the main one: nF0B1F1B0; step 5: nB1F1B0
        steady = "F0 B1 F1 B0 " * (count - 2 * ranks + rank + 1) + "B1 F1 B0 " * below
        # step 6: nB1B0, of which the second half puts W off
        ends = ("1", "0") * (rank + 1)
        last = [f"{'B' if k <= rank else 'I'}{chunk}" for k, chunk in enumerate(ends)]
        # steps 7 and 8: nWB0 (here W, then I, whose own W waits, too) and nW
        waiting = [f"W{chunk}" for chunk in ends[rank + 1 :]] + ["W0"] * below
        fill = [word for w in waiting[:below] for word in (w, "I0")]
        return warmup + steady + " ".join([*last, *fill, *waiting[below:]])

    return _v_pattern("dualpipe-v", ranks, microbatches, 2 * ranks, pattern)


def _repeated(
    name: str, ranks: int, microbatches: int, slopes: Sequence[int], pauses: Sequence[int], most: int
) -> Schedule:
    """Every microbatch does the same, six units after the one before (the building blocks of 2405.15362), squeezed.

    A unit is one F, I or W of a chunk. One microbatch's F goes down the V, up again, then its I down and up;
    `slopes` says how many units apart neighbouring ranks are on these four legs, `pauses` how many more than
    one pass at the three turns: the least with which legs never meet in one unit, on any rank. So four of every
    six units are taken on each rank. W take the others, two units after their I, or more: they are to fill
    waits, not to cause them. Only where `most` chunk activations are held, a W must go before an F.
    """
    last, legs = ranks - 1, ("F0", "F1", "I1", "I0")
    pattern: dict[tuple[str, int, int], int] = {}

    def row(rank: int) -> Iterator[Action]:
        starts, begin = {}, 0
        for leg, slope, pause in zip(legs, slopes, (*pauses, 0), strict=True):
            starts[leg] = begin + slope * (rank if leg in ("F0", "I1") else last - rank)
            begin += slope * last + 1 + pause
        assert len({start % 6 for start in starts.values()}) == 4, f"{name}: legs meet on rank {rank} of {ranks}"
        units = {start + 6 * m: (leg, m) for leg, start in starts.items() for m in range(microbatches)}
        waiting, held = deque[tuple[int, Action]](), 0
        for unit in range(max(units) + 1):
            leg, m = units.get(unit, ("W", -1))
            if waiting and (held == most if leg[0] == "F" else leg == "W" and unit >= waiting[0][0] + 2):
                yield waiting.popleft()[1]
                held -= 1
            if leg != "W":
                stage = rank if leg[1] == "0" else 2 * ranks - 1 - rank
                pattern[leg[0], stage, m] = unit
                yield Action(leg[0], stage, m)
                held += leg[0] == "F"
                waiting += [(unit, Action("W", stage, m))] if leg[0] == "I" else []
        yield from (action for _, action in waiting)

    return squeeze(Schedule.make(v_shape(ranks), map(row, range(ranks)), name), pattern, most)


def v_half(ranks: int, microbatches: int) -> Schedule:
    """Half the memory of 1F1B and half its bubble (2405.15362)."""
    pauses = (1, 0 if ranks % 2 else 3, 0)
    return _repeated("v-half", ranks, microbatches, (2, 1, 2, 1), pauses, most=2 * ((ranks + 2) // 2))


def v_min(ranks: int, microbatches: int) -> Schedule:
    """A third of the memory of 1F1B, the least on a V, and two thirds of its bubble (2405.15362)."""
    pauses = (0, 0 if ranks % 3 else 2, 0)
    return _repeated("v-min", ranks, microbatches, (1, 1, 1, 1), pauses, most=2 * ((ranks + 4) // 3))


class Named(NamedTuple):
    """What is known of a named schedule before the number of microbatches is.

    chunks: how many stages a rank has if nothing else is said. any_chunks: whether it can be said.
    """

    generator: Callable[..., Schedule]
    place: Callable[[int, int], tuple[int, ...]]
    chunks: int
    any_chunks: bool = False


NAMED = {
    "gpipe": Named(gpipe, looped, 1),
    "1f1b": Named(one_f_one_b, looped, 1),
    "interleaved-1f1b": Named(interleaved_1f1b, looped, 2, True),
    "looped-bfs": Named(looped_bfs, looped, 2, True),
    "zb-h1": Named(zb_h1, looped, 1),
    "zb-h2": Named(zb_h2, looped, 1),
    "interleaved-zb": Named(interleaved_zb, looped, 2, True),
    "zb-v": Named(zb_v, v_shape, 2),
    "v-half": Named(v_half, v_shape, 2),
    "v-min": Named(v_min, v_shape, 2),
    "dualpipe-v": Named(dualpipe_v, v_shape, 2),
}


def _named(name: str) -> Named:
    if name not in NAMED:
        near = get_close_matches(name, NAMED, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"there is no schedule {name!r}: {hint}known are {', '.join(NAMED)}")
    return NAMED[name]


def _at_least_one(count: int, what: str) -> None:
    if not hasattr(count, "__index__"):
        raise ValueError(f"a schedule needs a whole number of {what}s, got {count!r}; convert it with int()")
    if count < 1:
        raise ValueError(f"a schedule needs at least 1 {what}, got {count}")


def chunks_of(name: str, chunks: int | None = None) -> int:
    """How many stages a rank has under a named schedule. Raises ValueError: unknown name, chunks it cannot have."""
    named = _named(name)
    if chunks is None:
        return named.chunks
    _at_least_one(chunks, "chunk per rank")
    if chunks != named.chunks and not named.any_chunks:
        free = " or ".join(other for other, its in NAMED.items() if its.any_chunks)
        raise ValueError(
            f"{name} has {named.chunks} chunk{'s'[: named.chunks != 1]} per rank, got chunks {chunks}: leave chunks "
            f"out, or use {free}, which take any number"
        )
    return chunks


def auto_placement(ranks: int, chunks: int = 2) -> tuple[int, ...]:
    """Where "auto" has stages that nobody placed: a V for two per rank, else in a loop."""
    return v_shape(ranks) if chunks == 2 else looped(ranks, chunks)


def placement(schedule: str | Generator, ranks: int, chunks: int | None = None) -> tuple[int, ...]:
    """The rank of each stage, before the number of microbatches is known.

    "auto" searches on the placement that it is given: a V for two stages per rank (the default here), else a loop.
    Of a generator of your own this is the placement at two microbatches per rank: it must not depend on them.
    Raises ValueError: as `make`.
    """
    if not isinstance(schedule, str):
        return make(schedule, ranks, 2 * ranks, chunks).placement
    if schedule == "auto":
        return auto_placement(ranks, 2 if chunks is None else chunks)
    _at_least_one(ranks, "rank")
    return _named(schedule).place(ranks, chunks_of(schedule, chunks))


def make(schedule: str | Generator, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """A named schedule, or one of your own, checked.

    Raises ValueError: unknown name; ranks, microbatches or chunks that cannot be; a generator of your own whose
    schedule is for other numbers, incomplete or never ends.
    """
    _at_least_one(ranks, "rank")
    _at_least_one(microbatches, "microbatch")
    if isinstance(schedule, str):
        each = chunks_of(schedule, chunks)
        return _named(schedule).generator(ranks, microbatches, *([each] if _named(schedule).any_chunks else []))
    if chunks is not None:
        raise ValueError(f"chunks {chunks} is for named schedules; a generator of your own places its stages itself")
    if not callable(schedule):
        raise ValueError(
            f"schedule={schedule!r} is no schedule: give a name ({', '.join(NAMED)}, auto), a Schedule, or a "
            "function (ranks, microbatches) -> Schedule"
        )
    made = schedule(ranks, microbatches)
    if not isinstance(made, Schedule):
        raise ValueError(f"the function for the schedule returned {made!r}, not a Schedule; use Schedule.make")
    if (made.ranks, made.microbatches) != (ranks, microbatches):
        raise ValueError(
            f"schedule {made.name!r} is for {made.ranks} ranks and {made.microbatches} microbatches, asked for were "
            f"{ranks} and {microbatches}: a generator must follow its arguments"
        )
    check(made, microbatches)
    play(made)
    return made


def candidates(stages: Sequence[int], microbatches: int) -> list[Schedule]:
    """Every named schedule of this placement of stages."""
    ranks = max(stages) + 1
    found = []
    for name, its in NAMED.items():
        chunks = len(stages) // ranks if its.any_chunks else None
        if placement(name, ranks, chunks) == tuple(stages):
            found.append(make(name, ranks, microbatches, chunks))
    return found
