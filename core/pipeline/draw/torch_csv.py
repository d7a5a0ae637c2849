"""Schedules in the CSV form of torch.distributed.pipelining: one line per rank, one cell per action.

Standard library only.
"""

import csv
import io
import re
from collections.abc import Iterable

from core.pipeline.schedule.actions import Action, Schedule, check_placement

_WAIT = re.compile(r"\d+WAIT_(SEND_F|SEND_B|REDUCE_GRAD)\d*")


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


def _split_overlap(cell: str) -> list[str]:
    """`(0F4;7B1)OVERLAP_F_B` is 0F4 beside 7B1: one after the other for us. An empty cell is no action.

    Neither is a wait for a message or a sum (torch 2.15 and later): executors here wait where they need what comes.
    """
    inside, bracket, kind = cell.strip().removeprefix("(").partition(")")
    if bracket and kind != "OVERLAP_F_B":
        raise ValueError(f"{cell!r} is no action of torch's; one in brackets ends with OVERLAP_F_B")
    texts = [text.strip() for text in inside.split(";")]
    return [text for text in texts if text and not _WAIT.fullmatch(text)]


def read_csv(text: str, placement: Iterable[int] | None = None, name: str = "csv") -> Schedule:
    """A schedule that torch wrote, or somebody by hand.

    Without `placement`, a stage is on the rank that does its F. A B beside a W of the same stage and microbatch is
    the input half, as torch before 2.6 wrote it. Empty lines at the end are none. Raises ValueError, naming line and
    cell: no text, something that is not an action; a stage with F on two ranks or on none; a rank without stages.
    """
    if not isinstance(text, str) or not text.strip("\ufeff \r\n\t,"):
        if isinstance(text, str):
            content = "no action"
        else:
            content = f"a {type(text).__name__}"
        raise ValueError(
            f"a schedule's CSV has one line per rank, of cells such as 0F0, and this is {content}; read the file"
        )
    # spreadsheets put a byte order mark before the first cell
    rows = csv.reader(text.removeprefix("\ufeff").rstrip("\r\n\t ").splitlines())
    try:
        orders = [_fused_or_split(_parse_row(line, row)) for line, row in enumerate(rows, start=1)]
    except csv.Error as error:
        raise ValueError(f"line {rows.line_num}: {error}; it is no CSV, write it again") from None
    if placement is None:
        placement = _placement_of(orders)
    stages = tuple(placement)
    # the last ranks of a given placement may have nothing to do
    if text.endswith(("\n\n", "\n\r\n")):
        missing_ranks = 1 + max(stages, default=-1) - len(orders)
        orders += [[]] * missing_ranks
    check_placement(stages, len(orders))
    return Schedule.make(stages, orders, name)


def _parse_row(line: int, row: Iterable[str]) -> list[Action]:
    actions: list[Action] = []
    for number, cell in enumerate(row, start=1):
        try:
            actions += map(Action.parse, _split_overlap(cell))
        except ValueError as error:
            raise ValueError(f"line {line}, cell {number}: {error}") from None
    return actions


def _fused_or_split(order: list[Action]) -> list[Action]:
    """B is both halves, unless the weights' half stands in the same line: then it is what we call I."""
    with_weight_half = {action[1:] for action in order if action.kind == "W"}
    with_input_half = {action[1:] for action in order if action.kind == "I"}
    input_halves = with_weight_half - with_input_half
    renamed = []
    for action in order:
        if action.kind == "B" and action[1:] in input_halves:
            action = action._replace(kind="I")
        renamed.append(action)
    return renamed


def _placement_of(orders: Iterable[Iterable[Action]]) -> list[int]:
    """The rank of each stage, by its F."""
    rank_of_stage: dict[int, int] = {}
    for rank, order in enumerate(orders):
        for action in order:
            if action.kind != "F":
                continue
            owner = rank_of_stage.setdefault(action.stage, rank)
            if owner != rank:
                raise ValueError(
                    f"line {rank + 1}: {action} on rank {rank}, but rank {owner} has other F of stage "
                    f"{action.stage}: a stage lives on 1 rank"
                )
    count = 1 + max(rank_of_stage, default=-1)
    for stage in range(count):
        if stage not in rank_of_stage:
            raise ValueError(
                f"no rank does F of stage {stage} of {count}: number the stages without gaps"
            )
    return [rank_of_stage[stage] for stage in range(count)]
