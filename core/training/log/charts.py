"""Curves over steps as inline SVG: static, coloured by the page's CSS variables, with room for a cursor."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 440.0
HEIGHT = 206.0
LEFT = 50.0
RIGHT = 430.0
TOP = 10.0
BOTTOM = 168.0
# the page's and the picture's colours on paper; the dark ones stand in the page
LIGHT = {
    "paper": "#f6f7f9",
    "card": "#ffffff",
    "ink": "#1b2129",
    "soft": "#5c6775",
    "grid": "#e7eaef",
    "edge": "#d9dee5",
    "line": "#2866c8",
    "l0": "#c2410c",
    "l1": "#0a7d5a",
    "l2": "#8a3fb0",
    "l3": "#7a6a00",
    "odd": "#cf222e",
    "given": "#0a7d5a",
}
# a level this far outside of the curve, as a part of its range, stretches the axis; not farther
LEVEL_REACH = 0.35
POINTS = 800  # more are drawn as their mean and range
BUCKETS = 400
MARKERS = 200
LARGEST = 1e100  # what is larger is drawn as not finite
# a range of more than this factor gets a logarithmic axis, where one is allowed
LOG_FROM = 50.0


Row = tuple[float, float, float, float]  # step, mean, least, most
Point = tuple[int, float]  # step, value


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One number of every record; `values` may hold None and what is not finite, which leave gaps.

    key: of the record, for the cursor. factor: what the record's value was multiplied by. zero: the axis starts at 0.
    logarithmic: the axis may be. levels: name -> height of a dashed line. marked: steps to point out.
    points: name -> values at some steps, drawn as circles; the lowest one is the best.
    """

    key: str
    title: str
    unit: str
    values: Sequence[float | None]
    factor: float = 1.0
    zero: bool = False
    logarithmic: bool = False
    levels: Mapping[str, float] | None = None
    marked: Sequence[int] = ()
    points: Mapping[str, Sequence[Point]] | None = None


def finite(value: float | None) -> bool:
    """Whether it can be drawn."""
    return value is not None and math.isfinite(value) and abs(value) < LARGEST


def short(value: float) -> str:
    """12,345,678 as 12.3M: a few characters for an axis or a tile."""
    size = abs(value)
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if letter == 'k' else limit):.4g}{letter}"
    if size == 0 or size >= 1e-3:
        return f"{value:.4g}"
    digits, _, exponent = f"{value:.2e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high` on pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        """The pixel of a value; outside ones are at the edge."""
        low = self.low
        high = self.high
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(max(value, low))
        part = min(1.0, max(0.0, (value - low) / (high - low)))
        return self.start + part * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """Round values between the ends."""
        if self.logarithmic:
            powers = range(
                math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1
            )
            every = -(-len(powers) // (count + 1)) or 1
            if len(powers) >= 2:
                return [10.0**power for power in powers[::every]]
        raw = (self.high - self.low) / count
        unit = 10.0 ** math.floor(math.log10(raw))
        # 0.999, so that a range of exactly five steps has five ticks despite rounding
        step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= raw * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [k * step for k in range(first, last + 1)]


def value_axis(curve: Curve) -> Axis:
    """Of all that is drawn, with some air; a logarithmic one for wide ranges."""
    points = []
    for row in (curve.points or {}).values():
        for _, value in row:
            points.append(value)
    candidates = (*curve.values, *points)
    finite_values = [float(v) for v in candidates if v is not None and finite(v)] or [0.0]
    low, high = min(finite_values), max(finite_values)
    # levels must not press the curve flat: those far away are told in the legend
    reach = LEVEL_REACH * (high - low)
    near = [
        v for v in (curve.levels or {}).values() if finite(v) and low - reach <= v <= high + reach
    ]
    low = min([low, *near])
    high = max([high, *near])
    if curve.logarithmic and low > 0 and high / low > LOG_FROM:
        return Axis(low / 1.3, high * 1.3, BOTTOM, TOP, True)
    if curve.zero:
        low = min(low, 0.0)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        # a constant curve: an axis of some height around it
        high = high + (abs(high) * 0.1 or 1.0)
        if not (curve.zero and low == 0):
            low = low - (abs(low) * 0.1 or 1.0)
    # a curve along the frame could not be told from it
    air = 0.05 * (high - low)
    return Axis(low if curve.zero and low == 0 else low - air, high + air, BOTTOM, TOP)


def step_axis(steps: Sequence[int]) -> Axis:
    """From the first step to the last."""
    low, high = (min(steps), max(steps)) if steps else (0, 1)
    return Axis(low - (low == high), high + (low == high), LEFT, RIGHT)


def draw(curve: Curve, steps: Sequence[int]) -> str:
    """The picture of one curve; `curve.values` in the order of `steps`, which ascend."""
    x, y = step_axis(steps), value_axis(curve)
    facts = f'data-key="{curve.key}" data-low="{x.low}" data-high="{x.high}" data-factor="{curve.factor!r}"'
    box = f'viewBox="0 0 {WIDTH:g} {HEIGHT:g}"'
    parts = [
        f'<svg class="chart" {box} role="img" aria-label="{escape(curve.title)}" {facts}>',
        *_grid_lines(x, y),
        *_level_lines(curve, y),
        *_curve_paths(curve, steps, x, y),
        *_point_circles(curve, x, y),
        *_marker_triangles(curve, steps, x),
        f'<line class="cursor" x1="0" x2="0" y1="{TOP:g}" y2="{BOTTOM:g}"/>',
        "</svg>",
    ]
    return "\n".join(parts)


def _grid_lines(x: Axis, y: Axis) -> Iterator[str]:
    for tick in y.ticks():
        height = y.at(tick)
        yield f'<line class="grid" x1="{LEFT:g}" x2="{RIGHT:g}" y1="{height:.1f}" y2="{height:.1f}"/>'
        yield f'<text x="{LEFT - 8:g}" y="{height + 3.5:.1f}" text-anchor="end">{short(tick)}</text>'
    yield f'<text class="axis" x="{(LEFT + RIGHT) / 2:g}" y="{BOTTOM + 33:g}" text-anchor="middle">step</text>'
    whole = [tick for tick in x.ticks(4) if tick == int(tick)]
    for tick in whole:
        place = x.at(tick)
        # a long number would leave the picture
        anchor = "end" if place > RIGHT - 24 else "middle"
        yield f'<text x="{place:.1f}" y="{BOTTOM + 17:g}" text-anchor="{anchor}">{int(tick):,}</text>'
    yield f'<line class="base" x1="{LEFT:g}" x2="{RIGHT:g}" y1="{BOTTOM:g}" y2="{BOTTOM:g}"/>'


def _level_lines(curve: Curve, y: Axis) -> Iterator[str]:
    for number, (name, value) in enumerate((curve.levels or {}).items()):
        if is_on(y, value):
            height = y.at(value)
            yield (
                f'<line class="level l{number % 4}" x1="{LEFT:g}" x2="{RIGHT:g}" y1="{height:.1f}" y2="{height:.1f}">'
                f"<title>{escape(name)} {value:.3f}</title></line>"
            )


def is_on(axis: Axis, value: float) -> bool:
    """Whether it can be drawn where it belongs."""
    return finite(value) and axis.low <= value <= axis.high


def legend(curve: Curve) -> list[tuple[str, str]]:
    """(name, value) of each level; of those that the axis leaves out, on which side they are."""
    axis = value_axis(curve)
    rows = []
    for name, value in (curve.levels or {}).items():
        if is_on(axis, value):
            side = ""
        elif value > axis.high:
            side = " (above)"
        else:
            side = " (below)"
        rows.append((name, f"{value:.3f}{side}"))
    return rows


def _curve_paths(curve: Curve, steps: Sequence[int], x: Axis, y: Axis) -> Iterator[str]:
    """One path per run without gaps; a lone point is a dot; very many points are their mean within their range."""
    if len(steps) <= POINTS:
        pairs = zip(steps, curve.values, strict=True)
        rows: list[Row | None] = []
        for s, v in pairs:
            if v is not None and finite(v):
                rows.append((s, v, v, v))
            else:
                rows.append(None)
    else:
        rows = list(_buckets(curve, steps))
        for run in _runs_without_gaps(rows):
            above = [f"{x.at(s):.1f},{y.at(high):.1f}" for s, _, _, high in run]
            below = [f"{x.at(s):.1f},{y.at(low):.1f}" for s, _, low, _ in reversed(run)]
            yield f'<polygon class="band" points="{" ".join(above + below)}"/>'
    for run in _runs_without_gaps(rows):
        places = [f"{x.at(s):.1f},{y.at(mean):.1f}" for s, mean, _, _ in run]
        if len(places) == 1:
            across, down = places[0].split(",")
            yield f'<circle class="dot" cx="{across}" cy="{down}" r="3"/>'
        else:
            yield f'<polyline class="line" points="{" ".join(places)}"/>'


def _buckets(curve: Curve, steps: Sequence[int]) -> Iterator[Row | None]:
    count = len(steps)
    for bucket in range(BUCKETS):
        # equal shares of the records, not of the steps: they may be logged at other intervals after a resume
        span = range(bucket * count // BUCKETS, (bucket + 1) * count // BUCKETS)
        finite_values = [float(v) for i in span if finite(v := curve.values[i]) and v is not None]
        middle = sum(steps[i] for i in span) / len(span)
        if finite_values:
            mean = sum(finite_values) / len(finite_values)
            yield middle, mean, min(finite_values), max(finite_values)
        else:
            yield None


def _runs_without_gaps(rows: Sequence[Row | None]) -> Iterator[list[Row]]:
    run: list[Row] = []
    for row in [*rows, None]:
        if row is not None:
            run.append(row)
        elif run:
            yield run
            run = []


def _point_circles(curve: Curve, x: Axis, y: Axis) -> Iterator[str]:
    """Circles joined by a thin line; a ring around the lowest one of each name."""
    for number, (name, row) in enumerate((curve.points or {}).items()):
        finite_points = [(step, value) for step, value in row if finite(value)]
        places = [f"{x.at(step):.1f},{y.at(value):.1f}" for step, value in finite_points]
        if len(places) > 1:
            yield f'<polyline class="joined p{number % 4}" points="{" ".join(places)}"/>'
        best = min(finite_points, key=lambda point: point[1], default=None)
        for point, place in zip(finite_points, places, strict=True):
            across, down = place.split(",")
            words = f"{escape(name)}, step {point[0]:,}: {point[1]:.4f}{', the best' if point == best else ''}"
            kind = "point best" if point == best else "point"
            radius = 4.5 if point == best else 3
            yield (
                f'<circle class="{kind} p{number % 4}" cx="{across}" cy="{down}" r="{radius}">'
                f"<title>{words}</title></circle>"
            )


def _marker_triangles(curve: Curve, steps: Sequence[int], x: Axis) -> Iterator[str]:
    """A triangle below each step that is not finite, or pointed out; of very many, some."""
    odd = {
        s: f"{v}"
        for s, v in zip(steps, curve.values, strict=True)
        if v is not None and not finite(v)
    }
    title_of_step = odd | {s: f"{odd[s]}, skipped" if s in odd else "skipped" for s in curve.marked}
    chosen = sorted(title_of_step)
    for step in chosen[:: -(-len(chosen) // MARKERS) or 1]:
        at = x.at(step)
        place = f"M{at - 4:.1f},{BOTTOM:g}h8l-4,-8z"
        yield f'<path class="odd" d="{place}"><title>step {step}: {escape(title_of_step[step])}</title></path>'
