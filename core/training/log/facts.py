"""What tells two runs apart: date, command, layout, size, duration, code."""

import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from core import __version__
from core.training.log.metrics import StepRecord

_MODULE = "core.pretrain"


def run_facts(records: Sequence[StepRecord], layout: str, parameters: int) -> dict[str, str]:
    """Name -> words, of a run that has just ended; layout: in words."""
    facts = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "layout": layout,
        "parameters": f"{parameters:,}",
    }
    timed = [record for record in records if record.time is not None]
    if timed and (tokens := timed[-1].tokens_seen) is not None:
        facts["tokens seen"] = f"{tokens:,}"
    if len(timed) > 1:
        first = timed[0].time
        last = timed[-1].time
        assert first is not None and last is not None
        facts["duration"] = _duration(last - first)
    return facts | {
        "command": command(sys.argv),
        "code": f"paracore {__version__}{_commit_of_clone()}",
    }


def command(words: Sequence[str]) -> str:
    """As it was typed; a module's file is the module's name again."""
    program, *flags = words
    is_module = Path(program).parts[-2:] == ("core", "pretrain.py")
    return f"{f'python -m {_MODULE}' if is_module else shlex.quote(program)} {shlex.join(flags)}".strip()


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    if minutes:
        return f"{minutes} min {rest} s"
    return f"{rest} s"


def _commit_of_clone() -> str:
    """Of the clone that the package is in; empty for an installed one, or without git."""
    # this file is core/training/log/facts.py of the clone
    folder = Path(__file__).resolve().parents[3]
    if not (folder / ".git").exists():
        return ""
    try:
        commit = _git(folder, "rev-parse", "--short", "HEAD")
        return f", commit {commit}" + (
            " with changes" if _git(folder, "status", "--porcelain", "-uno") else ""
        )
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, check=True
    )
    return done.stdout.strip()
