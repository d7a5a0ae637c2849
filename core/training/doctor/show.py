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
    facts = {"ok": not missing, "missing": missing, "seconds": round(seconds, 3)}
    return json.dumps(facts | {"checks": [asdict(check) for check in checks]}, indent=1)


def lines(checks: Sequence[Check], seconds: float) -> list[tuple[str, str]]:
    """(line, status): a mark, a name and a value per check, the remedy of each below it, and what it comes to."""
    wide = max((len(check.name) for check in checks), default=0)
    found = []
    for check in checks:
        found.append((f"{MARKS[check.status]:<8}{check.name:<{wide}}  {check.value}", str(check.status)))
        if check.remedy is not None:
            found.append((f"{'':<{8 + wide}}  -> {check.remedy}", str(check.status)))
    missing, off = failures(checks), sum(check.status == "off" for check in checks)
    if missing:
        end = f"{len(missing)} required and missing: {', '.join(missing)}"
    else:
        end = "everything required is there" + (f"; {off} optional not, see ->" if off else "")
    return [*found, (f"{end} ({seconds:.1f} s)", "missing" if missing else "ok")]


def show(checks: Sequence[Check], seconds: float) -> None:
    """Print it, in colour on a terminal where rich is installed."""
    told = lines(checks, seconds)
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.text import Text
        except ImportError:
            pass
        else:
            console = Console(highlight=False)
            for text, status in told:
                shown = Text(text)
                shown.stylize(COLOURS[status], 0, len(MARKS["missing"]) if status == "ok" else None)
                console.print(shown, soft_wrap=True)
            return
    for text, _ in told:
        print(text)
