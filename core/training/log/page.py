"""One page that shows a run, report.html: nothing outside the file is needed, and its data are in it.

`page.html.jinja` is the page; here its values are made. The curves need no script; a small one tells the values under
the pointer.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from core.datasets import AnyTokenizer
from core.pipeline.draw.draw import draw_svg
from core.pipeline.schedule.timeline import Event, Timeline
from core.training.log import charts
from core.training.log.charts import Curve, draw, finite, legend, short
from core.training.log.json_rows import json_number
from core.training.log.metrics import OF_ALL_LAYERS, StepRecord
from core.training.log.validation import ValidationRecord, best_of


@dataclass(frozen=True)
class Sample:
    """A text that a model wrote: `prompt` was given to it, `written` is its own."""

    prompt: str
    written: str

    @classmethod
    def of(cls, tokenizer: AnyTokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> "Sample":
        """tokens: the prompt, and what was generated."""
        begins = tokenizer.decode(list(prompt))
        whole = tokenizer.decode(list(tokens))
        # decoded together, since a tokenizer may put spaces between tokens
        if whole.startswith(begins):
            return cls(begins, whole[len(begins) :])
        # a character of two tokens between them
        return cls(begins, tokenizer.decode(list(tokens[len(prompt) :])))


TEMPLATE = Path(__file__).with_name("page.html.jinja")


def write_page(
    path: str | Path,
    records: Sequence[StepRecord],
    *,
    run: Mapping[str, Any],
    origin: Mapping[str, str] | None = None,
    environment: Mapping[str, Any] | None = None,
    baselines: Mapping[str, float] | None = None,
    timelines: Mapping[str, Timeline] | None = None,
    sample: Sample | None = None,
    bytes_per_token: float = 0.0,
    validations: Sequence[ValidationRecord] = (),
    title: str = "Training run",
    facts: Mapping[str, str] | None = None,
) -> None:
    """Write the page at `path`, whole or not at all.

    run: flat name -> value of the resolved configuration; origin: where each came from ("default" is not told).
    environment: name -> value (`report.environment.environment`). baselines: name -> bits per byte, levels beside the
    loss. timelines: title -> what each rank did in a step, in seconds. bytes_per_token: turns the loss (nats per
    token) into bits per byte; 0 leaves it as it is. validations: points beside the loss.
    facts: name -> what tells this run from others, below the title. All of it is in `<script id="data">` as JSON, the
    records by column; what is not finite is "NaN", "Infinity" or "-Infinity" there.
    """
    data = {
        "version": 1,
        "title": title,
        "records": columns(records),
        "validations": [record.to_json() for record in validations],
        "run": _as_json_value(run),
        "origin": _as_json_value(origin),
        "environment": _as_json_value(environment or {}),
        "baselines": _as_json_value(baselines or {}),
        "bytes_per_token": json_number(float(bytes_per_token)),
        "timelines": {
            name: _timeline_rows(timeline) for name, timeline in (timelines or {}).items()
        },
        "sample": None if sample is None else {"prompt": sample.prompt, "written": sample.written},
        "facts": dict(facts or {}),
    }
    drawn = list(curves(records, baselines or {}, bytes_per_token, validations))
    steps = [record.step for record in records]
    text = _render(
        title=title,
        data=embedded(data),
        charts=charts,
        about=_about_run(records),
        tiles=list(_figure_tiles(records, validations, bytes_per_token)),
        facts=facts or {},
        drawings=[(curve, legend(curve), draw(curve, steps)) for curve in drawn],
        timelines=[_drawn_timeline(name, timeline) for name, timeline in (timelines or {}).items()],
        sample=sample,
        parts=_settings_by_part(run, origin or {}),
        changed=_changed_settings(run, origin or {}),
        origins_known=bool(origin),
        environment={name: _in_words(value) for name, value in (environment or {}).items()},
    )
    _replace(Path(path), text)


def _replace(target: Path, text: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    # a browser that reloads meanwhile sees the old page or the new one
    os.replace(temporary, target)


def columns(records: Sequence[StepRecord]) -> dict[str, list[Any]]:
    """Field -> its value in each record, as JSON has it; fields without records are empty."""
    rows = [record.to_json() for record in records]
    names = [*(field.name for field in fields(StepRecord)), *OF_ALL_LAYERS]
    rewards = [*records[-1].rewards] if records else []
    # rewards are fields of their own in a row
    names = [*(name for name in names if name != "rewards"), *rewards]
    return {name: [row.get(name) for row in rows] for name in names}


def _render(**values: Any) -> str:
    # torch has it installed; a run without a page does not import it
    import jinja2

    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(values)


def embedded(data: Any) -> str:
    """JSON that cannot end the script element it stands in, nor open a comment there."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _as_json_value(value: Any) -> Any:
    """What JSON can hold; everything else as text."""
    if isinstance(value, Mapping):
        return {str(key): _as_json_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json_value(inner) for inner in value]
    if value is None or isinstance(value, bool | int | float | str):
        return json_number(value)
    return str(value)


def _timeline_rows(timeline: Timeline) -> list[list[list[Any]]]:
    """By rank: [kind, stage, microbatch, start, end] of each event."""
    return [[[*event.action, event.start, event.end] for event in row] for row in timeline.rows]


# above the fold


def _about_run(records: Sequence[StepRecord]) -> str:
    if not records:
        return "No step was logged."
    first = records[0].step
    last = records[-1].step
    if len(records) == 1:
        return f"1 record, of step {last:,}."
    return f"{len(records):,} records, steps {first:,} to {last:,}."


def _figure_tiles(
    records: Sequence[StepRecord], validations: Sequence[ValidationRecord], bytes_per_token: float
) -> Iterator[dict[str, str]]:
    """The figures above the curves: name, value, unit."""

    def tile(name: str, value: str, unit: str) -> dict[str, str]:
        return {"name": name, "value": value, "unit": unit}

    def known(field: str) -> list[float]:
        return sorted(value for record in records if finite(value := getattr(record, field)))

    if not records:
        return
    last = records[-1]
    bits = _bits_factor(bytes_per_token)
    for name in dict.fromkeys(record.name for record in validations):
        newest = [record for record in validations if record.name == name][-1]
        best = best_of(validations, newest)
        assert best is not None
        if newest.step == best.step:
            told = "the best"
        else:
            told = f"best {best.figure[0]:.3f} at step {best.step:,}"
        value, unit = newest.figure
        yield tile(name, f"{value:.3f}", f"{unit}, {told}")
    more = "" if bits is None else f", about {last.loss * bits:.3f} bits per byte"
    per = "pair" if last.rewards else "token"
    yield tile("training loss", f"{last.loss:.4f}", f"nats per {per}{more}")
    yield tile("last gradient norm", f"{last.grad_norm:.3g}", "before clipping")
    if rates := known("tokens_per_s"):
        # the median: first steps compile or load, and others wait for a save
        yield tile("throughput", short(rates[len(rates) // 2]), "tokens/s, median")
    if utilization := known("mfu"):
        yield tile("MFU", f"{utilization[len(utilization) // 2]:.1%}", "median")
    if memory := known("memory_mib"):
        yield tile("peak memory", short(memory[-1]), "MiB, rank 0")
    spikes = sum(record.spikes for record in records)
    told = f"{spikes:,} of them spikes of the gradient norm" if spikes else "in all"
    yield tile("skipped steps", f"{sum(record.skipped for record in records):,}", told)


def _bits_factor(bytes_per_token: float) -> float | None:
    """What a loss in nats per token is multiplied by to be bits per byte."""
    has_rate = math.isfinite(bytes_per_token) and bytes_per_token > 0
    if has_rate:
        return 1 / (math.log(2) * bytes_per_token)
    return None


# curves


def curves(
    records: Sequence[StepRecord],
    baselines: Mapping[str, float],
    bytes_per_token: float,
    validations: Sequence[ValidationRecord] = (),
) -> Iterator[Curve]:
    """What is drawn, without what no record knows."""
    if not records:
        return
    scale = _bits_factor(bytes_per_token)
    skipped = [record.step for record in records if record.skipped]
    # bits per byte compare tokenizers; nats per token do not
    factor, unit = (1.0, "nats per token") if scale is None else (scale, "bits per byte")
    if records[-1].rewards:
        unit = "nats per pair"
    loss = [record.loss * factor for record in records]
    levels = dict(baselines) if scale is not None else {}
    points: dict[str, list[tuple[int, float]]] = {}
    for record in validations:
        value = record.loss if scale is None else record.figure[0]
        points.setdefault(record.name, []).append((record.step, value))
    yield Curve(
        key="loss",
        title="Loss",
        unit=unit,
        values=loss,
        factor=factor,
        levels=levels,
        marked=skipped,
        points=points,
    )
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
        ("reward_margin", "Reward margin", "chosen less rejected, mean of the pairs", 1.0),
        (
            "reward_accuracy",
            "Reward accuracy",
            "share of pairs whose chosen response gained more",
            1.0,
        ),
        ("expert_load", "Busiest expert", "its rows over the mean, of all layers", 1.0),
        ("aux_loss", "Auxiliary loss", "mean of the layers, 1: experts are used alike", 1.0),
        ("z_loss", "Router z loss", "mean of the layers", 1.0),
    )
    for key, name, unit, by in rest:
        values = [None if (v := getattr(record, key)) is None else v * by for record in records]
        if any(value is not None for value in values):
            yield Curve(key=key, title=name, unit=unit, values=values, factor=by, zero=True)


# below the curves


def _drawn_timeline(name: str, timeline: Timeline) -> str:
    """The drawing of a step whose times are seconds, in milliseconds."""
    rows = tuple(
        tuple(Event(e.action, 1e3 * e.start, 1e3 * e.end) for e in row) for row in timeline.rows
    )
    return draw_svg(Timeline(rows), name, "ms")


def _settings_by_part(
    run: Mapping[str, Any], origin: Mapping[str, str]
) -> dict[str, list[dict[str, str]]]:
    """A table per part of the configuration: `optimizer.lr` is field "lr" of part "optimizer"."""
    parts: dict[str, list[dict[str, str]]] = {}
    for name, value in run.items():
        part, _, field = name.rpartition(".")
        setting = {"field": field, "value": _in_words(value), "origin": origin.get(name, "default")}
        parts.setdefault(part, []).append(setting)
    return parts


def _changed_settings(run: Mapping[str, Any], origin: Mapping[str, str]) -> list[dict[str, str]]:
    """The settings that are not from a default."""
    names = [name for name in run if origin.get(name, "default") != "default"]
    return [
        {"field": name, "value": _in_words(run[name]), "origin": origin[name]} for name in names
    ]


def _in_words(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        if value:
            return "yes"
        return "no"
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "none"
    return str(value)
