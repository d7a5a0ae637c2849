"""The report as aligned lines or JSON."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from core.training.doctor.check import Check

MARKS = {"ok": "ok", "missing": "MISSING", "off": "off", "info": ""}
COLOURS = {"ok": "green", "missing": "bold red", "off": "yellow", "info": "dim"}


def failures(checks: Sequence[Check]) -> list[str]:
    """Names of what is required and missing."""
    return [check.name for check in checks if check.required and check.status == "missing"]


def as_json(checks: Sequence[Check], seconds: float) -> str:
    """`{"ok": ..., "missing": [names], "seconds": ..., "checks": [...]}`."""
    missing = failures(checks)
    report = {
        "ok": not missing,
        "missing": missing,
        "seconds": round(seconds, 3),
        "checks": [asdict(check) for check in checks],
    }
    return json.dumps(report, indent=1)


def lines(checks: Sequence[Check], seconds: float) -> list[tuple[str, str]]:
    """(line, status): a mark, a name and a value per check, its remedy below it, and a summary at the end."""
    name_width = max((len(check.name) for check in checks), default=0)
    rows = []
    for check in checks:
        rows.append(
            (
                f"{MARKS[check.status]:<8}{check.name:<{name_width}}  {check.value}",
                str(check.status),
            )
        )
        if check.remedy is not None:
            rows.append((f"{'':<{8 + name_width}}  -> {check.remedy}", str(check.status)))
    missing = failures(checks)
    switched_off = sum(check.status == "off" for check in checks)
    if missing:
        summary = f"{len(missing)} required and missing: {', '.join(missing)}"
    elif switched_off:
        summary = f"everything required is there; {switched_off} optional not, see ->"
    else:
        summary = "everything required is there"
    status = "missing" if missing else "ok"
    return [*rows, (f"{summary} ({seconds:.1f} s)", status)]


def show(checks: Sequence[Check], seconds: float) -> None:
    """Print it, in colour on a terminal where rich is installed."""
    rows = lines(checks, seconds)
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.text import Text
        except ImportError:
            pass
        else:
            console = Console(highlight=False)
            for text, status in rows:
                coloured = Text(text)
                # of a good line the mark only
                end = len(MARKS["missing"]) if status == "ok" else None
                coloured.stylize(COLOURS[status], 0, end)
                console.print(coloured, soft_wrap=True)
            return
    for text, _ in rows:
        print(text)
