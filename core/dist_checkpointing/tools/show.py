"""`inspect`: what is in a checkpoint, and who wrote it."""

import json
import time
from math import prod
from typing import Any

from core.dist_checkpointing.publish.manifest import grid_shape
from core.dist_checkpointing.reading.stored import StoredCheckpoint
from core.dist_checkpointing.tools.console import size_text, table


def facts(stored: StoredCheckpoint) -> dict[str, Any]:
    """Everything that `inspect --json` prints, as JSON values."""
    arrays = {key: _array(stored, key) for key in stored.keys}
    return {
        "path": stored.directory.url,
        "format": stored.format,
        "run": dict(stored.run),
        "arrays": arrays,
        "bytes": sum(array["bytes"] for array in arrays.values()),
        "derived": {key: dict(recipe) for key, recipe in stored.derived.items()},
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
        "axis": None if info.tp_dim is None else info.axis,
        "stack": info.stack if info.stacked else None,
        "layers": list(info.layer_numbers) if info.stacked else None,
    }


def text(stored: StoredCheckpoint) -> list[str]:
    """A checkpoint as lines for people."""
    contents = facts(stored)
    arrays = contents["arrays"]
    nbytes = contents["bytes"]
    rows = [("array", "shape", "dtype", "cells", "of", "tp dim", "bytes")]
    cell_count = 0
    for key, array in arrays.items():
        cell_count += array["cells"]
        shape = _shape_text(array["shape"])
        cell_shape = _shape_text(array["cell"])
        tp_dim = "" if array["tp_dim"] is None else str(array["tp_dim"])
        if array["axis"] not in (None, "tp"):
            tp_dim += f" ({array['axis']})"
        if array["layers"] is not None and array["layers"] != list(range(array["shape"][0])):
            key += f" (layers {_short(array['layers'])})"
        rows.append(
            (
                key,
                shape,
                array["dtype"],
                str(array["cells"]),
                cell_shape,
                tp_dim,
                f"{array['bytes']:,}",
            )
        )
    lines = [contents["path"], f"format {stored.format}, {_provenance(stored)}", ""]
    lines += table(rows, right=(3, 5, 6))
    lines.append(
        f"total: {len(arrays)} arrays, {cell_count} cells, {nbytes:,} bytes ({size_text(nbytes)})"
    )
    if contents["derived"]:
        lines += ["", "derived, not stored:"]
        for key, recipe in sorted(contents["derived"].items()):
            lines.append(f"  {key}: {recipe['from']} as {recipe['torch_dtype']}")
    if contents["objects"]:
        lines += ["", "objects:"]
        lines += [f"  {key}: {_short(value)}" for key, value in sorted(contents["objects"].items())]
    return lines


def _provenance(stored: StoredCheckpoint) -> str:
    """When it was written, by which layout, and what else the manifest says of the run."""
    run = dict(stored.run)
    seconds = run.pop("time", None)
    layout = run.pop("layout", None)
    # a hundred values; --json shows them
    run.pop("settings", None)
    # a manifest may hold anything: what is no number or dict is shown as it is, with the rest
    phrases = ["written"]
    if isinstance(seconds, (int, float)):
        phrases.append(_date(seconds))
    if isinstance(layout, dict):
        phrases.append("by " + " ".join(f"{axis}={size}" for axis, size in layout.items()))
    return " ".join(phrases) + "".join(
        f", {key} {_short(value)}" for key, value in sorted(run.items())
    )


def _date(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):  # of no year
        return f"at {seconds} s"


def _shape_text(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text) <= 100:
        return text
    return text[:100] + "…"
