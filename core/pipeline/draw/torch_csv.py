"""Schedules in the CSV form of torch.distributed.pipelining: one line per rank, one cell per action.

Standard library only.
"""

import csv
import io
from collections.abc import Iterable, Iterator

from core.pipeline.schedule.actions import Action, Schedule, check_placement


def write_csv(schedule: Schedule) -> str:
    """The text that torch's `_load_csv` reads: format `compute_only`, or `compute_comms` where it has sends.

    torch has no R. Raises ValueError for a schedule with recomputation: write it before `add_recompute`.
    """
    if schedule.recomputed:
        raise ValueError(
            f"schedule {schedule.name!r} has {len(schedule.recomputed)} R, but torch's schedules have 0: write the "
            "schedule as it was before add_recompute, and add R again after reading"
        )
    text = io.StringIO()
    csv.writer(text).writerows(map(str, order) for order in schedule.orders)
    return text.getvalue()


def _parts(cell: str) -> list[str]:
    """`(0F4;7B1)OVERLAP_F_B` is 0F4 beside 7B1: one after the other for us. An empty cell is no action."""
    inside, bracket, kind = cell.strip().removeprefix("(").partition(")")
    if bracket and kind != "OVERLAP_F_B":
        raise ValueError(f"{cell!r} is no action of torch's; one in brackets ends with OVERLAP_F_B")
    return [part for part in inside.split(";") if part.strip()]


def read_csv(text: str, placement: Iterable[int] | None = None, name: str = "csv") -> Schedule:
    """A schedule that torch wrote, or somebody by hand.

    Without `placement`, a stage is on the rank that does its F. A B beside a W of the same stage and microbatch is
    the input half, as torch before 2.6 wrote it. Empty lines at the end are none. Raises ValueError, naming line and
    cell: no text, something that is not an action; a stage with F on two ranks or on none; a rank without stages.
    """
    if not isinstance(text, str) or not text.strip("\ufeff \r\n\t,"):
        what = f"a {type(text).__name__}" if not isinstance(text, str) else "no action"
        raise ValueError(
            f"a schedule's CSV has one line per rank, of cells such as 0F0, and this is {what}; read the file"
        )
    lines = csv.reader(text.removeprefix("\ufeff").rstrip("\r\n\t ").splitlines())
    try:
        orders = [_new_letters(list(_actions(line, row))) for line, row in enumerate(lines, start=1)]
    except csv.Error as error:
        raise ValueError(f"line {lines.line_num}: {error}; it is no CSV, write it again") from None
    place = tuple(_placement(orders) if placement is None else placement)
    if text.endswith(("\n\n", "\n\r\n")):  # the last ranks of a given placement may have nothing to do
        orders += [[]] * (1 + max(place, default=-1) - len(orders))
    check_placement(place, len(orders))
    return Schedule.make(place, orders, name)


def _actions(line: int, row: Iterable[str]) -> Iterator[Action]:
    for number, cell in enumerate(row, start=1):
        try:
            yield from map(Action.parse, _parts(cell))
        except ValueError as error:
            raise ValueError(f"line {line}, cell {number}: {error}") from None


def _new_letters(order: list[Action]) -> list[Action]:
    """B is both halves, unless the weights' half stands in the same line: then it is what we call I."""
    halves = {a[1:] for a in order if a.kind == "W"} - {a[1:] for a in order if a.kind == "I"}
    return [a._replace(kind="I") if a.kind == "B" and a[1:] in halves else a for a in order]


def _placement(orders: Iterable[Iterable[Action]]) -> Iterator[int]:
    """The rank of each stage, by its F."""
    home: dict[int, int] = {}
    for rank, order in enumerate(orders):
        for action in order:
            if action.kind == "F" and home.setdefault(action.stage, rank) != rank:
                raise ValueError(
                    f"line {rank + 1}: {action} on rank {rank}, but rank {home[action.stage]} has other F of stage "
                    f"{action.stage}: a stage lives on 1 rank"
                )
    for stage in range(1 + max(home, default=-1)):
        if stage not in home:
            raise ValueError(f"no rank does F of stage {stage} of {1 + max(home)}: number the stages without gaps")
        yield home[stage]
