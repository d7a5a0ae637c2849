"""One page that shows a run, report.html: nothing outside the file is needed, and its data are in it.

The curves are drawn here and need no script; a small script tells the values under the pointer.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from html import escape
from pathlib import Path
from typing import Any

from core.pipeline.draw.draw import draw_svg
from core.pipeline.schedule.timeline import Event, Timeline
from core.training.log import charts
from core.training.log.charts import Curve, draw, finite, short
from core.training.log.metrics import StepRecord, json_number
from core.training.log.page_style import SCRIPT, STYLE

# nothing is loaded, whatever a text in the page says
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def write_page(
    path: str | Path,
    records: Sequence[StepRecord],
    *,
    run: Mapping[str, Any],
    origin: Mapping[str, str] | None = None,
    environment: Mapping[str, Any] | None = None,
    baselines: Mapping[str, float] | None = None,
    timelines: Mapping[str, Timeline] | None = None,
    sample: str = "",
    bytes_per_token: float = 0.0,
    title: str = "Training run",
) -> None:
    """Write the page at `path`, whole or not at all.

    run: flat name -> value of the resolved configuration; origin: where each came from ("default" is not told).
    environment: name -> value (`report.environment.environment`). baselines: name -> bits per byte, levels beside the
    loss. timelines: title -> what each rank did in a step, in seconds. bytes_per_token: turns the loss (nats per
    token) into bits per byte; 0 leaves it as it is. All of it is in `<script type="application/json" id="data">`,
    the records by column; what is not finite is "NaN", "Infinity" or "-Infinity" there.
    """
    data = {
        "version": 1,
        "title": title,
        "records": columns(records),
        "run": _plain(run),
        "origin": _plain(origin),
        "environment": _plain(environment or {}),
        "baselines": _plain(baselines or {}),
        "bytes_per_token": json_number(float(bytes_per_token)),
        "timelines": {name: _timeline_rows(timeline) for name, timeline in (timelines or {}).items()},
        "sample": sample,
    }
    body = [
        f"<h1>{escape(title)}</h1>",
        _about(records),
        *_tiles(records, bytes_per_token),
        *_charts(records, baselines or {}, bytes_per_token),
        *_timelines(timelines or {}),
        *_sample(sample),
        *_configuration(run, origin or {}),
        *_environment(environment or {}),
    ]
    text = _page(title, "\n".join(body), data)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    whole = target.with_name(f".{target.name}.{os.getpid()}")
    whole.write_text(text, encoding="utf-8", errors="backslashreplace")
    os.replace(whole, target)


def columns(records: Sequence[StepRecord]) -> dict[str, list[Any]]:
    """Field -> its value in each record, as JSON has it; fields without records are empty."""
    return {field.name: [json_number(getattr(r, field.name)) for r in records] for field in fields(StepRecord)}


def _page(title: str, body: str, data: Mapping[str, Any]) -> str:
    ends = f"[{charts.LEFT:g}, {charts.RIGHT:g}]"
    script = SCRIPT.replace("[LEFT, RIGHT]", ends).replace("WIDTH", f"{charts.WIDTH:g}")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
{body}
</main>
<script type="application/json" id="data">{embedded(data)}</script>
<script>{script}</script>
</body>
</html>
"""


def embedded(data: Any) -> str:
    """JSON that cannot end the script element it stands in, nor open a comment there."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _plain(value: Any) -> Any:
    """What JSON can hold; everything else as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return json_number(value) if value is None or isinstance(value, bool | int | float | str) else str(value)


def _timeline_rows(timeline: Timeline) -> list[list[list[Any]]]:
    """By rank: [kind, stage, microbatch, start, end] of each event."""
    return [[[*event.action, event.start, event.end] for event in row] for row in timeline.rows]


# above the fold


def _about(records: Sequence[StepRecord]) -> str:
    if not records:
        return '<p class="about">No step was logged.</p>'
    first, last = records[0].step, records[-1].step
    if len(records) == 1:
        return f'<p class="about">1 record, of step {last:,}.</p>'
    return f'<p class="about">{len(records):,} records, steps {first:,} to {last:,}.</p>'


def _tiles(records: Sequence[StepRecord], bytes_per_token: float) -> Iterator[str]:
    if not records:
        return
    last, scale = records[-1], _bits(bytes_per_token)
    memory, rates, used = (
        sorted(value for r in records if finite(value := getattr(r, name)))
        for name in ("memory_mib", "tokens_per_s", "mfu")
    )
    tiles = [("last loss", f"{last.loss:.4f}", "nats per token")]
    if scale is not None:
        tiles.append(("last loss", f"{last.loss * scale:.3f}", "bits per byte"))
    tiles.append(("last gradient norm", f"{last.grad_norm:.3g}", "before clipping"))
    if rates:
        tiles.append(("throughput", short(rates[len(rates) // 2]), "tokens/s, median"))
    if used:
        tiles.append(("MFU", f"{used[len(used) // 2]:.1%}", "median"))
    if memory:
        tiles.append(("peak memory", short(memory[-1]), "MiB, rank 0"))
    tiles.append(("skipped steps", f"{sum(record.skipped for record in records):,}", "in all"))
    yield '<div class="tiles">'
    for name, value, unit in tiles:
        yield f'<div class="card tile"><div class="name">{name}</div>'
        yield f'<div class="value">{escape(value)} <span class="unit">{unit}</span></div></div>'
    yield "</div>"


def _bits(bytes_per_token: float) -> float | None:
    """What a loss in nats per token is multiplied by to be bits per byte."""
    known = math.isfinite(bytes_per_token) and bytes_per_token > 0
    return 1 / (math.log(2) * bytes_per_token) if known else None


# curves


def curves(records: Sequence[StepRecord], baselines: Mapping[str, float], bytes_per_token: float) -> Iterator[Curve]:
    """What is drawn, without what no record knows."""
    scale = _bits(bytes_per_token)
    skipped = [record.step for record in records if record.skipped]
    factor, unit = (1.0, "nats per token") if scale is None else (scale, "bits per byte")
    loss = [record.loss * factor for record in records]
    levels = dict(baselines) if scale is not None else {}
    yield Curve(key="loss", title="Loss", unit=unit, values=loss, factor=factor, levels=levels, marked=skipped)
    yield Curve(
        key="grad_norm",
        title="Gradient norm",
        unit="before clipping",
        values=[record.grad_norm for record in records],
        logarithmic=True,
        zero=True,
        marked=skipped,
    )
    rest = (
        ("learning_rate", "Learning rate", "", 1.0),
        ("tokens_per_s", "Throughput", "tokens/s, all ranks", 1.0),
        ("memory_mib", "Peak memory", "MiB, rank 0", 1.0),
        ("mfu", "MFU", "% of the devices' FLOP/s", 100.0),
    )
    for key, name, unit, by in rest:
        values = [None if (v := getattr(record, key)) is None else v * by for record in records]
        if any(value is not None for value in values):
            yield Curve(key=key, title=name, unit=unit, values=values, factor=by, zero=True)


def _charts(records: Sequence[StepRecord], baselines: Mapping[str, float], bytes_per_token: float) -> Iterator[str]:
    if not records:
        return
    steps = [record.step for record in records]
    yield '<div class="charts">'
    for curve in curves(records, baselines, bytes_per_token):
        unit = f' <span class="unit">{escape(curve.unit)}</span>' if curve.unit else ""
        yield f'<section class="card"><div class="head"><h3>{curve.title}{unit}</h3><output></output></div>'
        yield from _legend(curve)
        yield f"{draw(curve, steps)}</section>"
    yield "</div>"


def _legend(curve: Curve) -> Iterator[str]:
    if not curve.levels and not curve.marked:
        return
    key = '<svg viewBox="0 0 22 8"><line class="{}" x1="0" x2="22" y1="4" y2="4"/></svg>'
    yield f'<div class="legend"><span>{key.format("line")}training</span>' if curve.levels else '<div class="legend">'
    for number, (name, value) in enumerate((curve.levels or {}).items()):
        yield f"<span>{key.format(f'level l{number % 4}')}{escape(name)} {value:.3f}</span>"
    if curve.marked:
        yield '<span><svg viewBox="0 0 22 8"><path class="odd" d="M7,8h8l-4,-8z"/></svg>skipped</span>'
    yield "</div>"


# the rest


def _timelines(timelines: Mapping[str, Timeline]) -> Iterator[str]:
    if timelines:
        yield "<h2>What each rank did in a step</h2>"
    for name, timeline in timelines.items():
        rows = tuple(tuple(Event(e.action, 1e3 * e.start, 1e3 * e.end) for e in row) for row in timeline.rows)
        yield f'<div class="card timeline">{draw_svg(Timeline(rows), name, "ms")}</div>'


def _sample(sample: str) -> Iterator[str]:
    if sample:
        yield f'<h2>A sample</h2>\n<div class="card"><pre>{escape(sample)}</pre></div>'


def _configuration(run: Mapping[str, Any], origin: Mapping[str, str]) -> Iterator[str]:
    """A table per part, `optimizer.lr` under optimizer; what is no default stands out."""
    if not run:
        return
    parts: dict[str, list[str]] = {}
    for name in run:
        parts.setdefault(name.rpartition(".")[0], []).append(name)
    yield '<h2>Configuration</h2>\n<div class="tables">'
    for part, names in parts.items():
        yield f'<section class="card"><h3>{escape(part or "run")}</h3><table>'
        for name in names:
            source = origin.get(name, "default")
            given = ' class="given"' if source != "default" else ""
            told = f'<td class="from">{escape(source if given else "")}</td>' if origin else ""
            field, value = escape(name.rpartition(".")[2]), escape(_told(run[name]))
            yield f"<tr><td>{field}</td><td{given}>{value}</td>{told}</tr>"
        yield "</table></section>"
    yield "</div>"


def _told(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "none"
    return {None: "none", True: "yes", False: "no"}[value] if value is None or isinstance(value, bool) else str(value)


def _environment(environment: Mapping[str, Any]) -> Iterator[str]:
    if environment:
        yield '<h2>Environment</h2>\n<section class="card"><table>'
        for name, value in environment.items():
            yield f"<tr><td>{escape(str(name))}</td><td>{escape(_told(value))}</td></tr>"
        yield "</table></section>"
