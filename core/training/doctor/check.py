"""One line of the doctor's report. Needs no torch: a machine without it gets a report as well."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "missing", "off", "info"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the report.

    status: "ok"; "missing": does not work; "off": works, but a faster or fuller way is not available; "info".
    remedy: what to type or to change, None where there is nothing to do. required: a run needs it.
    """

    name: str
    value: str
    status: Status
    remedy: str | None = None
    required: bool = False


def first_line(error: BaseException) -> str:
    """The first line of an error's text, cut to 200 characters."""
    return (str(error).splitlines() or [""])[0][:200]


def gib(size: int) -> str:
    """Bytes as GiB, or below one GiB as MiB."""
    if size >= 1 << 30:
        return f"{size / 2**30:.1f} GiB"
    return f"{size / 2**20:.0f} MiB"
