"""One line of the report. Needs no torch, as all that can be said of a machine without it."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "missing", "off", "info"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the report.

    status: "ok"; "missing": does not work; "off": works, but a faster or fuller way is shut; "info".
    remedy: what to type or to change, None where there is nothing to do. required: a run needs it.
    """

    name: str
    value: str
    status: Status
    remedy: str | None = None
    required: bool = False


def first_line(error: BaseException) -> str:
    """Of an error's text, as long as a line may be."""
    return (str(error).splitlines() or [""])[0][:200]


def gib(size: int) -> str:
    """Bytes as people read them."""
    return f"{size / 2**30:.1f} GiB" if size >= 1 << 30 else f"{size / 2**20:.0f} MiB"
