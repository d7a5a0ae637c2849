"""`inspect`: what is in a checkpoint, and who wrote it."""

import json
import time
from math import prod
from typing import Any

from core.dist_checkpointing.publish.manifest import grid_shape
from core.dist_checkpointing.reading.stored import StoredCheckpoint
from core.dist_checkpointing.tools.console import size_text, table


def facts(stored: StoredCheckpoint) -> dict[str, Any]:
    """All of it, as JSON values."""
    arrays = {key: _array(stored, key) for key in stored.keys}
    return {
        "path": stored.directory.url,
        "format": stored.format,
        "run": dict(stored.run),
        "arrays": arrays,
        "bytes": sum(array["bytes"] for array in arrays.values()),
        "derived": {key: dict(how) for key, how in stored.derived.items()},
        "objects": dict(stored.objects),
    }


def _array(stored: StoredCheckpoint, key: str) -> dict[str, Any]:
    info = stored.info(key)
    return {
        "shape": info.shape,
        "dtype": info.dtype,
        "cell": stored.cell(key),
        "cells": prod(grid_shape(stored.metadata[key])),
        "bytes": stored.nbytes(key),
        "tp_dim": info.tp_dim,
        "stack": info.stack if info.stacked else None,
    }


def text(stored: StoredCheckpoint) -> list[str]:
    """A checkpoint as lines for people."""
    all_ = facts(stored)
    arrays = all_["arrays"]
    rows = [("array", "shape", "dtype", "cells", "of", "tp dim", "bytes")]
    for key, a in arrays.items():
        tp_dim = "" if a["tp_dim"] is None else str(a["tp_dim"])
        rows.append(
            (key, _times(a["shape"]), a["dtype"], str(a["cells"]), _times(a["cell"]), tp_dim, f"{a['bytes']:,}")
        )
    cells = sum(a["cells"] for a in arrays.values())
    lines = [all_["path"], f"format {stored.format}, {_written(stored)}", "", *table(rows, right=(3, 5, 6))]
    lines += [f"total: {len(arrays)} arrays, {cells} cells, {all_['bytes']:,} bytes ({size_text(all_['bytes'])})"]
    if all_["derived"]:
        lines += ["", "derived, not stored:"]
        lines += [f"  {key}: {how['from']} as {how['torch_dtype']}" for key, how in sorted(all_["derived"].items())]
    if all_["objects"]:
        lines += ["", "objects:"]
        lines += [f"  {key}: {_short(value)}" for key, value in sorted(all_["objects"].items())]
    return lines


def _written(stored: StoredCheckpoint) -> str:
    run = dict(stored.run)
    when, layout = run.pop("time", None), run.pop("layout", None)
    said = ["written"]
    if isinstance(when, (int, float)):
        said.append(_date(when))
    if isinstance(layout, dict):
        said.append("by " + " ".join(f"{axis}={size}" for axis, size in layout.items()))
    return " ".join(said) + "".join(f", {key} {_short(value)}" for key, value in sorted(run.items()))


def _date(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):  # of no year
        return f"at {seconds} s"


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _short(value: Any) -> str:
    said = value if isinstance(value, str) else json.dumps(value)
    return said if len(said) <= 100 else said[:100] + "…"
