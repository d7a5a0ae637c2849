"""One output directory, several runs: each keeps its own records, and those of an earlier one are moved aside."""

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from core.training.log.json_rows import json_line, json_rows

METRICS = "metrics.jsonl"
# what a run writes of itself; W&B's folder has a name for each run already
_OF_A_RUN = (METRICS, "run.toml", "report.html", "report.png", "tensorboard")


class RunName(NamedTuple):
    """What tells the records of two runs apart: `name` stands in each record and in the manifests of checkpoints.

    before: the run whose checkpoint it goes on from; None for one from before there were names, and for a run from
    step 0. branches: it is another run than that, as `checkpoint.load` out of another directory makes one.
    """

    name: str
    before: str | None = None
    branches: bool = False


def new_name() -> str:
    """8 hex digits, drawn by the system: no seed of the run is moved on."""
    return secrets.token_hex(4)


def make_room(output: Path, run: RunName, start: int, say: Callable[[str], None]) -> None:
    """Leave in `output` only the records of this run: others are moved to `output`/earlier-N, and it is said.

    A run that goes on (start > 0) is given its own records back, from an earlier folder too. On one rank.
    """
    rows = _rows(output)
    own = [row for row in rows if start and row.get("run") == run.before]
    is_own = len(own) == len(rows) and not run.branches
    if rows and not is_own:
        kept = _move(output)
        steps = max((int(row["step"]) for row in rows if "step" in row), default=0)
        say(
            f"note: {output} has the records of another run, of {steps} steps: they are in {kept} now; "
            "training.output=DIR keeps runs apart"
        )
    if start and not own:
        own = _from_earlier(output, run.before)
    if own and not (rows and is_own):
        (output / METRICS).write_text("".join(map(json_line, own)))


def _rows(folder: Path) -> list[dict[str, Any]]:
    path = folder / METRICS
    return list(json_rows(path)) if path.is_file() else []


def _numbered(output: Path) -> list[int]:
    numbers = (path.name.removeprefix("earlier-") for path in output.glob("earlier-*"))
    return sorted(int(number) for number in numbers if number.isdecimal())


def _move(output: Path) -> Path:
    """The folder that has the files of the earlier run from now on."""
    folder = output / f"earlier-{max(_numbered(output), default=0) + 1}"
    folder.mkdir()
    for name in _OF_A_RUN:
        if (output / name).exists():
            (output / name).rename(folder / name)
    return folder


def _from_earlier(output: Path, name: str | None) -> list[dict[str, Any]]:
    """The records of this run, which another one has moved aside; the latest that there are."""
    if name is None:
        return []
    for number in reversed(_numbered(output)):
        own = [row for row in _rows(output / f"earlier-{number}") if row.get("run") == name]
        if own:
            return own
    return []
