"""Named schedules on a V: ZB-V, DualPipe-V, V-Half, V-Min. Standard library only.

Rank r holds chunk 0 (stage r, on the way down the V) and chunk 1 (stage 2 * ranks - 1 - r, on the way up). So rank 0
has both ends of the model, and the last rank's two stages follow each other without a message.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence

from core.pipeline.schedule.actions import Action, Schedule, v_shape
from core.pipeline.schedule.named.squeeze import squeeze
from core.pipeline.schedule.passes import only_microbatches


def _from_patterns(
    name: str,
    ranks: int,
    microbatches: int,
    min_microbatches: int,
    pattern: Callable[[int, int], str],
) -> Schedule:
    """A schedule from `pattern(rank, microbatches)`, the order as words of kind and chunk: `F0 F1 I1 W1`.

    The microbatch of a word is the next one of that kind and chunk, where B counts as an I and a W. Patterns hold
    for at least `min_microbatches`; with fewer they are made for that many, and the surplus is left out.
    """
    count = max(microbatches, min_microbatches)

    def rank_order(rank: int) -> Iterator[Action]:
        stage_of_chunk = (rank, 2 * ranks - 1 - rank)
        next_microbatch = Counter[str]()  # by kind and chunk
        for word in pattern(rank, count).split():
            kind = word[0]
            chunk = word[1:]
            halves = "IW" if kind == "B" else kind
            yield Action(kind, stage_of_chunk[int(chunk)], next_microbatch[halves[0] + chunk])
            next_microbatch.update(half + chunk for half in halves)

    schedule = Schedule.make(v_shape(ranks), map(rank_order, range(ranks)), name)
    return only_microbatches(schedule, microbatches)


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """ZB-V (2401.10241): no bubble once a rank has begun if F = I = W, with 1F1B's memory, even over the ranks."""

    def pattern(rank: int, count: int) -> str:
        # to the turning point of the V, this rank included
        distance = ranks - rank
        # rounds of the steady phase until chunk 0 has no F left
        with_forward = count - 2 * ranks + 1 + rank
        without_forward = count - ranks - with_forward

        # Warm-up phase: microbatches go down the V and up again, until the last stage begins its backward
        warmup = "F0 " * (2 * distance - 1)
        warmup += "F1 F0 " * rank
        warmup += "F1 I1 W1 " * distance
        # Steady phase: F, I, W of chunk 0, then of chunk 1, every W right after its I
        steady = "F0 I0 W0 F1 I1 W1 " * with_forward
        # ... whose last rounds find no F of chunk 0
        steady += "I0 W0 F1 I1 W1 " * without_forward
        # Cool-down phase: other ranks wait for I only; the W that were put off fill what would be the bubble
        cooldown = "I0 I1 " * rank
        cooldown += "I0 W0 " * distance
        cooldown += "W1 " * rank + "W0 " * rank
        return warmup + steady + cooldown

    return _from_patterns("zb-v", ranks, microbatches, 2 * ranks - 1, pattern)


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """DualPipeV, "cut in half" (DeepSeek): F of one chunk beside B of the other, so that communication can overlap.

    The steps have the numbers and names of the loop in DeepSeek's dualpipev.py; its B (zero bubble) is our I.
    """

    def pattern(rank: int, count: int) -> str:
        # to the turning point of the V
        distance = ranks - 1 - rank
        # Step 1: nF0
        order = "F0 " * (2 * distance)
        # Step 2: nF0F1
        order += "F0 F1 " * (rank + 1)
        # Step 3: nB1W1F1 (zero bubble)
        order += "I1 W1 F1 " * distance
        # Step 4 (main step): nF0B1F1B0
        order += "F0 B1 F1 B0 " * (count - 2 * ranks + rank + 1)
        # Step 5: nB1F1B0
        order += "B1 F1 B0 " * distance
        # Step 6: nB1B0 (the second half is zero bubble: only I, their W are put off)
        chunks = ("1", "0") * (rank + 1)
        half = rank + 1
        order += "".join(f"B{chunk} " for chunk in chunks[:half])
        order += "".join(f"I{chunk} " for chunk in chunks[half:])
        # Step 7: nWB0 (zero bubble: a W that waits, then an I of chunk 0, whose own W waits in turn)
        waiting = [f"W{chunk} " for chunk in chunks[half:]] + ["W0 "] * distance
        order += "".join(f"{weight}I0 " for weight in waiting[:distance])
        # Step 8: nW
        order += "".join(waiting[distance:])
        return order

    return _from_patterns("dualpipe-v", ranks, microbatches, 2 * ranks, pattern)


# units after which the building block repeats: F, I, W of two chunks
PERIOD = 6
# the way of a microbatch: forward down and up the V, backward down and up
LEGS = ("F0", "F1", "I1", "I0")


def _first_units(
    ranks: int, rank: int, offsets: Sequence[int], pauses: Sequence[int]
) -> dict[str, int]:
    """The unit of time in which microbatch 0 does each leg on a rank; see `_repeat_building_block`."""
    last = ranks - 1
    first_units = {}
    begin = 0
    for leg, offset, pause in zip(LEGS, offsets, (*pauses, 0), strict=True):
        goes_down = leg in ("F0", "I1")
        # from the leg's first rank
        distance = rank if goes_down else last - rank
        first_units[leg] = begin + offset * distance
        begin += offset * last + 1 + pause
    return first_units


def _repeat_building_block(
    name: str,
    ranks: int,
    microbatches: int,
    offsets: Sequence[int],
    pauses: Sequence[int],
    max_active: int,
) -> Schedule:
    """Repeats one building block every six units, then squeezes it (2405.15362, "controllable memory").

    A unit is the time of one F, I or W of a chunk. The building block is what one microbatch does. `offsets` says
    how many units apart neighbouring ranks are on its four legs, `pauses` how many units more than one pass at
    its three turns: the least with which two legs never meet in one unit, on any rank. The lifespan between F and
    I, and so the memory, follows from both. The legs take four of every six units of a rank. W take the other two,
    two units after their I or later: they are to fill bubbles, not to cause them. Only a rank that holds
    `max_active` chunk activations must do a W before its next F.
    """
    # of (kind, stage, microbatch)
    unit_of: dict[tuple[str, int, int], int] = {}

    def rank_order(rank: int) -> Iterator[Action]:
        stage_of_chunk = {"0": rank, "1": 2 * ranks - 1 - rank}
        first_units = _first_units(ranks, rank, offsets, pauses)
        distinct = {unit % PERIOD for unit in first_units.values()}
        assert len(distinct) == len(LEGS), f"{name}: legs meet on rank {rank} of {ranks}"
        legs_by_unit = {}
        for leg, first_unit in first_units.items():
            for microbatch in range(microbatches):
                legs_by_unit[first_unit + PERIOD * microbatch] = leg, microbatch

        waiting = deque[tuple[int, Action]]()  # (unit of its I, W)
        active = 0  # chunk activations between F and W
        for unit in range(max(legs_by_unit) + 1):
            leg, microbatch = legs_by_unit.get(unit, ("", -1))
            if waiting:
                must_free = leg[:1] == "F" and active == max_active
                may_fill = not leg and unit >= waiting[0][0] + 2
                if must_free or may_fill:
                    yield waiting.popleft()[1]
                    active -= 1
            if not leg:
                continue
            kind = leg[0]
            stage = stage_of_chunk[leg[1]]
            unit_of[kind, stage, microbatch] = unit
            yield Action(kind, stage, microbatch)
            if kind == "F":
                active += 1
            else:
                waiting.append((unit, Action("W", stage, microbatch)))
        yield from (action for _, action in waiting)

    repeated = Schedule.make(v_shape(ranks), map(rank_order, range(ranks)), name)
    return squeeze(repeated, unit_of, max_active)


def v_half(ranks: int, microbatches: int) -> Schedule:
    """V-Half (2405.15362): half the memory of 1F1B and half its bubble."""
    # the middle pause shifts the way back, so that legs do not meet (see `_repeat_building_block`)
    middle = 0 if ranks % 2 else 3
    pauses = (1, middle, 0)
    max_active = 2 * ((ranks + 2) // 2)
    return _repeat_building_block("v-half", ranks, microbatches, (2, 1, 2, 1), pauses, max_active)


def v_min(ranks: int, microbatches: int) -> Schedule:
    """V-Min (2405.15362): a third of the memory of 1F1B, the least on a V, and two thirds of its bubble."""
    # as above
    middle = 0 if ranks % 3 else 2
    pauses = (0, middle, 0)
    max_active = 2 * ((ranks + 4) // 3)
    return _repeat_building_block("v-min", ranks, microbatches, (1, 1, 1, 1), pauses, max_active)
