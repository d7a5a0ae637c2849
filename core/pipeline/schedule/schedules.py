"""The named schedules: functions of (ranks, microbatches[, chunks]). Standard library only.

A schedule of your own is any function `(ranks, microbatches) -> Schedule`; `make` takes it in place of a name.
Every one works for any number of ranks and microbatches, also fewer microbatches than ranks.
"""

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import NamedTuple

from core.pipeline.schedule.actions import Schedule, looped, v_shape
from core.pipeline.schedule.named.looped import (
    gpipe,
    interleaved_1f1b,
    interleaved_zb,
    looped_bfs,
    one_f_one_b,
    zb_h1,
    zb_h2,
)
from core.pipeline.schedule.named.v_shaped import dualpipe_v, v_half, v_min, zb_v
from core.pipeline.schedule.player import check, play

Generator = Callable[[int, int], Schedule]


class Named(NamedTuple):
    """What is known of a named schedule before the number of microbatches is.

    place: (ranks, chunks) -> the rank of each stage. chunks: stages per rank by default. any_chunks: whether the
    user may choose another number.
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


# torch's and Megatron's names that do not look alike, in small letters and without "Schedule"
_TORCHS = {"zbvzerobubble": "zb-v", "interleavedzerobubble": "interleaved-zb"}
_TORCHS |= {"interleaved": "interleaved-1f1b", "vpp": "interleaved-1f1b"}


def _look_up(name: str) -> Named:
    if name not in NAMED:
        plain = name.lower().removeprefix("schedule")
        close = get_close_matches(_TORCHS.get(plain, plain), NAMED, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"there is no schedule {name!r}: {hint}known are {', '.join(NAMED)}")
    return NAMED[name]


def _check_positive(count: int, noun: str) -> None:
    if not hasattr(count, "__index__"):
        raise ValueError(
            f"a schedule needs a whole number of {noun}s, got {count!r}; convert it with int()"
        )
    if count < 1:
        raise ValueError(f"a schedule needs at least 1 {noun}, got {count}")


def chunks_of(name: str, chunks: int | None = None) -> int:
    """How many stages a rank has under a named schedule. Raises ValueError: unknown name, chunks it cannot have."""
    named = _look_up(name)
    if chunks is None:
        return named.chunks
    _check_positive(chunks, "chunk per rank")
    if chunks != named.chunks and not named.any_chunks:
        flexible = " or ".join(other for other, schedule in NAMED.items() if schedule.any_chunks)
        plural = "" if named.chunks == 1 else "s"
        raise ValueError(
            f"{name} has {named.chunks} chunk{plural} per rank, got chunks {chunks}: leave chunks "
            f"out, or use {flexible}, which take any number"
        )
    return chunks


def auto_placement(ranks: int, chunks: int = 2) -> tuple[int, ...]:
    """The placement for "auto" where the user gave none: a V for two stages per rank, else a loop."""
    if chunks == 2:
        return v_shape(ranks)
    return looped(ranks, chunks)


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
    _check_positive(ranks, "rank")
    return _look_up(schedule).place(ranks, chunks_of(schedule, chunks))


def make(
    schedule: str | Generator, ranks: int, microbatches: int, chunks: int | None = None
) -> Schedule:
    """A named schedule, or one of your own, checked.

    Raises ValueError: unknown name; ranks, microbatches or chunks that cannot be; a generator of your own whose
    schedule is for other numbers, incomplete, or deadlocks.
    """
    _check_positive(ranks, "rank")
    _check_positive(microbatches, "microbatch")
    if isinstance(schedule, str):
        # named ones are right by their tests; a user's own is checked below
        chunk_count = chunks_of(schedule, chunks)
        named = _look_up(schedule)
        if named.any_chunks:
            return named.generator(ranks, microbatches, chunk_count)
        return named.generator(ranks, microbatches)

    if chunks is not None:
        raise ValueError(
            f"chunks {chunks} is for named schedules; a generator of your own places its stages itself"
        )
    if not callable(schedule):
        raise ValueError(
            f"schedule={schedule!r} is no schedule: give a name ({', '.join(NAMED)}, auto), a Schedule, or a "
            "function (ranks, microbatches) -> Schedule"
        )
    generated = schedule(ranks, microbatches)
    if not isinstance(generated, Schedule):
        raise ValueError(
            f"the function for the schedule returned {generated!r}, not a Schedule; use Schedule.make"
        )
    # before anything runs: other ranks would wait for actions that never come
    if (generated.ranks, generated.microbatches) != (ranks, microbatches):
        raise ValueError(
            f"schedule {generated.name!r} is for {generated.ranks} ranks and {generated.microbatches} microbatches, "
            f"asked for were {ranks} and {microbatches}: a generator must follow its arguments"
        )
    check(generated, microbatches)
    play(generated)  # raises for a deadlock
    return generated


def candidates(stages: Sequence[int], microbatches: int) -> list[Schedule]:
    """Every named schedule of this placement (stage -> rank)."""
    ranks = max(stages) + 1
    schedules = []
    for name, named in NAMED.items():
        chunks = None
        if named.any_chunks:
            # those of the placement: one of another number of chunks cannot be equal
            chunks = len(stages) // ranks
        if placement(name, ranks, chunks) == tuple(stages):
            schedules.append(make(name, ranks, microbatches, chunks))
    return schedules
