"""Lines of JSON: numbers that JSON cannot write, and files whose last line was never finished."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def json_number(value: Any) -> Any:
    """A float that JSON cannot write as a word that float() and JavaScript's Number() read; others as they are."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    if value > 0:
        return "Infinity"
    return "-Infinity"


def json_line(row: dict[str, Any]) -> str:
    """One line of a file."""
    return json.dumps(row, allow_nan=False) + "\n"


def json_rows(path: str | Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of lines; a line that was never finished is left out."""
    for line in Path(path).read_text(errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row
