"""Drawings of a timeline, predicted or measured: text for a terminal, SVG, a trace for Perfetto.

Standard library only.
"""

import json
from collections.abc import Iterator, Sequence
from html import escape
from math import floor, log10

from core.pipeline.schedule.timeline import Event, Timeline

MEANING = {
    "F": "forward",
    "B": "backward",
    "I": "input gradients",
    "W": "weight gradients",
    "R": "recompute",
}
# fill of the first chunk and of the last; F, I, W, R, B stay apart for colour-blind eyes as well (Okabe and Ito)
_FILL = {
    "F": ("#5aa5dc", "#bcdcf3"),
    "B": ("#dd8452", "#f5d0ba"),
    "I": ("#e6a23c", "#f9e0b4"),
    "W": ("#3fae87", "#b5e2d1"),
    "R": ("#b07cc6", "#e3cdec"),
}
_IDLE = "#f1f2f4"


def _chunks(row: Sequence[Event]) -> dict[int, int]:
    """Which of its rank's stages each stage is, 0, 1 ..."""
    return {stage: chunk for chunk, stage in enumerate(sorted({event.action.stage for event in row}))}


def _labelled(row: Sequence[Event]) -> list[tuple[Event, str]]:
    """Each event with `F3`; of the rank's second stage `f3`, of the third `F3'`."""
    chunks, cells = _chunks(row), []
    for event in row:
        kind, stage, microbatch = event.action
        letter = kind.lower() if chunks[stage] % 2 else kind
        number = "" if microbatch is None else str(microbatch)
        cells.append((event, letter + number + "'" * (chunks[stage] // 2)))
    return cells


def _unit(timeline: Timeline) -> float:
    """The time that gets room for a label: the least, but very short actions may not stretch all the others."""
    lengths = sorted(event.end - event.start for row in timeline.rows for event in row) or [0.0]
    return max(lengths[len(lengths) // 10], sum(lengths) / len(lengths) / 2) or 1.0


def draw_text(timeline: Timeline, width: int = 118) -> str:
    """One row per rank, cells like `F0 F1 I0 W0`, `.` where nothing runs; the legend is the last line.

    An action is as wide as it takes long. What is wider than `width` columns goes on below.
    """
    rows = [_labelled(row) for row in timeline.rows]
    cells = [cell for row in rows for cell in row]
    if not cells:
        return "nothing ran\n"
    unit = _unit(timeline)
    scale = (max(len(label) for _, label in cells) + 1) / unit
    lines = [_line(row, scale, _column(timeline.makespan, scale)) for row in rows]
    names = [f"rank {rank} |" for rank in range(len(lines))]
    names = [name.rjust(max(map(len, names))) for name in names]
    room = max(width - len(names[0]) - 1, 1)
    # equal panels that begin with a cell's first column where all actions are equally long
    cell = _column(unit, scale)
    room -= room % cell if room > cell else 0
    last = max(len(line.rstrip(". ")) for line in lines)  # no panel for the end of the last cell alone
    panels = [
        "".join(f"{name} {line[begin : begin + room].rstrip()}\n" for name, line in zip(names, lines, strict=True))
        for begin in range(0, last, room)
    ]
    return "\n".join([*panels, _legend(cells)])


def _column(time: float, scale: float) -> int:
    """The nearest column, halves always up (`round` goes to even ones), so that equal lengths are drawn alike."""
    return int(time * scale + 0.5 + 1e-6)


def _line(row: Sequence[tuple[Event, str]], scale: float, columns: int) -> str:
    line = ["."] * columns
    for event, label in row:
        begin = _column(event.start, scale)
        wide = max(_column(event.end, scale) - begin, 1)
        text = label[:wide].ljust(wide)
        line[begin : begin + wide] = text
    return "".join(line)[:columns]


def _legend(cells: Sequence[tuple[Event, str]]) -> str:
    kinds = {event.action.kind for event, _ in cells}
    words = [f"{kind} {meaning}" for kind, meaning in MEANING.items() if kind in kinds]
    if any(label[0].islower() for _, label in cells):
        words.append("small letters: a rank's second stage")
    if any(label.endswith("'") for _, label in cells):
        words.append("F' third, f' fourth ...")
    return ", ".join([*words, "`.` idle"]) + "\n"


def draw_svg(timeline: Timeline, title: str = "", unit: str = "") -> str:
    """A standalone picture: one lane per rank, the microbatch in each box, paler boxes for later chunks.

    The heading holds the title, the time of the step (in `unit`) and the bubble.
    """
    left, top, lane, gap = 64.0, 58.0, 26.0, 5.0
    total = timeline.makespan or 1.0
    wide = min(max(1080.0, 16 * total / _unit(timeline)), 2400.0)  # room for two digits where there are many boxes
    bottom = top + len(timeline.rows) * (lane + gap)
    body = list[str]()
    for rank, row in enumerate(timeline.rows):
        y = top + rank * (lane + gap)
        body.append(f'<text x="{left - 10}" y="{y + lane / 2 + 4}" class="a e">rank {rank}</text>')
        body.append(f'<rect x="{left}" y="{y}" width="{wide}" height="{lane}" fill="{_IDLE}"/>')
        body += _boxes(row, left, y, lane, wide / total)
    heading = f"step {timeline.makespan:.4g}{unit and ' ' + unit}, bubble {100 * timeline.bubble:.1f} %"
    height = bottom + 58
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + wide + 24:.0f} {height:.0f}" '
            'font-family="Helvetica, Arial, DejaVu Sans, sans-serif">',
            "<style>.a{font-size:12px;fill:#3c4043}.m{fill:#17212b;text-anchor:middle}"
            ".t{font-size:17px;font-weight:600;fill:#17212b}.e{text-anchor:end}.c{text-anchor:middle}</style>",
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            f'<text x="{left}" y="28" class="t">{escape(title)}</text>',
            f'<text x="{left + wide}" y="28" class="a e">{heading}</text>',
            *body,
            *_axis(left, bottom, wide, total),
            *_key(timeline, left, bottom + 36),
            "</svg>\n",
        ]
    )


def _boxes(row: Sequence[Event], left: float, y: float, lane: float, scale: float) -> Iterator[str]:
    chunks = _chunks(row)
    for event in row:
        kind, _, microbatch = event.action
        x, width = left + event.start * scale, (event.end - event.start) * scale
        fill = shade(kind, chunks[event.action.stage], len(chunks))
        line = 0.6 if width > 3 else 0
        yield (
            f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{lane}" fill="{fill}" stroke="#ffffff" '
            f'stroke-width="{line}"><title>{event.action}: {event.start:.6g} to {event.end:.6g}</title></rect>'
        )
        number = "" if microbatch is None else str(microbatch)
        size = min(11.0, (width - 3) / (0.62 * len(number))) if number else 0.0  # a digit is 0.62 of it wide
        if size >= 7:
            middle, base = x + width / 2, y + lane / 2 + 0.36 * size
            yield f'<text x="{middle:.2f}" y="{base:.2f}" class="m" font-size="{size:.1f}">{number}</text>'


def shade(kind: str, chunk: int, chunks: int) -> str:
    """The colour of a kind of action on a rank's stage number `chunk`: paler for later ones."""
    first, last = (
        tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5)) for colour in _FILL.get(kind, ("#9aa0a6",) * 2)
    )
    part = chunk / (chunks - 1) if chunks > 1 else 0.0
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in zip(first, last, strict=True))


def _axis(left: float, y: float, wide: float, total: float) -> Iterator[str]:
    step = 10.0 ** floor(log10(total))
    while total / step < 5:
        step /= 2
    ticks = [k * step for k in range(int(total / step + 1e-9) + 1)]
    for tick in ticks:
        x = left + wide * tick / total
        yield f'<path d="M{x:.2f} {y}v4" stroke="#9aa0a6"/>'
        yield f'<text x="{x:.2f}" y="{y + 17}" class="a c">{tick:.4g}</text>'


def _key(timeline: Timeline, x: float, y: float) -> Iterator[str]:
    kinds = {event.action.kind for row in timeline.rows for event in row}
    chunks = max((len(_chunks(row)) for row in timeline.rows), default=1)
    entries = [(kind, f"{kind} {meaning}") for kind, meaning in MEANING.items() if kind in kinds]
    for kind, text in [*entries, ("", "idle")]:
        shades = [shade(kind, c, chunks) for c in range(chunks)] if kind else [_IDLE]
        for fill in shades:
            yield f'<rect x="{x}" y="{y}" width="14" height="14" fill="{fill}"/>'
            x += 15
        yield f'<text x="{x + 5}" y="{y + 11}" class="a">{text}</text>'
        x += 5 + 6.6 * len(text) + 18
    if chunks > 1:
        yield f'<text x="{x}" y="{y + 11}" class="a">paler: later stages of a rank</text>'


def draw_trace(timeline: Timeline, microseconds: float = 1e6) -> str:
    """JSON that Perfetto (ui.perfetto.dev) and chrome://tracing open: a thread per rank, times in microseconds.

    `microseconds` is what one unit of the timeline's time is: 1e6 for seconds.
    """
    events: list[dict[str, object]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
        for rank in range(len(timeline.rows))
    ]
    for rank, row in enumerate(timeline.rows):
        for (kind, stage, microbatch), start, end in row:
            name = kind if microbatch is None else f"{kind}{microbatch}"
            times = {"ts": start * microseconds, "dur": (end - start) * microseconds}
            about = {"stage": stage, "microbatch": microbatch}
            events.append({"name": name, "cat": kind, "ph": "X", "pid": 0, "tid": rank, **times, "args": about})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
