"""Drawings of a timeline, predicted or measured: text for a terminal, SVG, a trace for Perfetto.

Standard library only.
"""

import json
from collections.abc import Iterator, Sequence
from html import escape
from itertools import chain
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
_OTHER_FILL = ("#9aa0a6", "#9aa0a6")
_IDLE = "#f1f2f4"

# of the SVG, in its units
_LEFT = 64.0
_TOP = 58.0
_LANE_HEIGHT = 26.0
_LANE_GAP = 5.0
_MIN_WIDTH = 1080.0
_MAX_WIDTH = 2400.0
_DIGIT_WIDTH = 0.62  # of the font size
_MAX_FONT = 11.0
_MIN_FONT = 7
_LETTER_WIDTH = 6.6  # of the key


def _chunk_of_stage(row: Sequence[Event]) -> dict[int, int]:
    """Which of its rank's stages each stage is, 0, 1 ..."""
    stages = sorted({event.action.stage for event in row})
    return {stage: chunk for chunk, stage in enumerate(stages)}


def _label_events(row: Sequence[Event]) -> list[tuple[Event, str]]:
    """Each event with `F3`; of the rank's second stage `f3`, of the third `F3'`."""
    chunk_of_stage = _chunk_of_stage(row)
    labelled = []
    for event in row:
        kind, stage, microbatch = event.action
        chunk = chunk_of_stage[stage]
        label = kind.lower() if chunk % 2 else kind
        if microbatch is not None:
            label += str(microbatch)
        labelled.append((event, label + "'" * (chunk // 2)))
    return labelled


def _label_time(timeline: Timeline) -> float:
    """The time that gets room for a label: the shortest action, unless that would stretch all others too much."""
    events = chain.from_iterable(timeline.rows)
    durations = sorted(event.end - event.start for event in events) or [0.0]
    short = durations[len(durations) // 10]
    half_of_mean = sum(durations) / len(durations) / 2
    return max(short, half_of_mean) or 1.0


def draw_text(timeline: Timeline, width: int = 118) -> str:
    """One row per rank, cells like `F0 F1 I0 W0`, `.` where nothing runs; the legend is the last line.

    An action is as wide as it takes long. What is wider than `width` columns goes on below.
    """
    # a column is so wide that every label fits into an action of the usual length
    rows = [_label_events(row) for row in timeline.rows]
    cells = list(chain.from_iterable(rows))
    if not cells:
        return "nothing ran\n"
    label_time = _label_time(timeline)
    # columns per unit of time
    scale = (max(len(label) for _, label in cells) + 1) / label_time
    lines = [_text_line(row, scale, _column(timeline.makespan, scale)) for row in rows]
    names = [f"rank {rank} |" for rank in range(len(lines))]
    names = [name.rjust(max(map(len, names))) for name in names]

    # equal panels that begin with a cell's first column where all actions are equally long
    panel_width = max(width - len(names[0]) - 1, 1)
    cell_width = _column(label_time, scale)
    if panel_width > cell_width:
        panel_width -= panel_width % cell_width
    # no panel for the end of the last cell alone
    last_column = max(len(line.rstrip(". ")) for line in lines)
    panels = []
    for begin in range(0, last_column, panel_width):
        panel = ""
        for name, line in zip(names, lines, strict=True):
            panel += f"{name} {line[begin : begin + panel_width].rstrip()}\n"
        panels.append(panel)
    return "\n".join([*panels, _legend(cells)])


def _column(time: float, scale: float) -> int:
    """The nearest column, halves always up (`round` goes to even ones), so that equal lengths are drawn alike."""
    return int(time * scale + 0.5 + 1e-6)


def _text_line(row: Sequence[tuple[Event, str]], scale: float, columns: int) -> str:
    line = ["."] * columns
    for event, label in row:
        begin = _column(event.start, scale)
        width = max(_column(event.end, scale) - begin, 1)
        line[begin : begin + width] = label[:width].ljust(width)
    return "".join(line)[:columns]


def _legend(cells: Sequence[tuple[Event, str]]) -> str:
    kinds = {event.action.kind for event, _ in cells}
    entries = [f"{kind} {meaning}" for kind, meaning in MEANING.items() if kind in kinds]
    # only what this drawing needs
    if any(label[0].islower() for _, label in cells):
        entries.append("small letters: a rank's second stage")
    if any(label.endswith("'") for _, label in cells):
        entries.append("F' third, f' fourth ...")
    return ", ".join([*entries, "`.` idle"]) + "\n"


def draw_svg(timeline: Timeline, title: str = "", unit: str = "") -> str:
    """A standalone picture: one lane per rank, the microbatch in each box, paler boxes for later chunks.

    The heading holds the title, the time of the step (in `unit`) and the bubble.
    """
    total = timeline.makespan or 1.0
    room_for_digits = 16 * total / _label_time(timeline)
    width = min(max(_MIN_WIDTH, room_for_digits), _MAX_WIDTH)
    bottom = _TOP + len(timeline.rows) * (_LANE_HEIGHT + _LANE_GAP)
    lanes = list[str]()
    for rank, row in enumerate(timeline.rows):
        y = _TOP + rank * (_LANE_HEIGHT + _LANE_GAP)
        lanes.append(
            f'<text x="{_LEFT - 10}" y="{y + _LANE_HEIGHT / 2 + 4}" class="a e">rank {rank}</text>'
        )
        lanes.append(
            f'<rect x="{_LEFT}" y="{y}" width="{width}" height="{_LANE_HEIGHT}" fill="{_IDLE}"/>'
        )
        lanes += _boxes(row, y, width / total)
    step = f"{timeline.makespan:.4g}"
    if unit:
        step += f" {unit}"
    heading = f"step {step}, bubble {100 * timeline.bubble:.1f} %"
    height = bottom + 58
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + width + 24:.0f} {height:.0f}" '
            'font-family="Helvetica, Arial, DejaVu Sans, sans-serif">',
            "<style>.a{font-size:12px;fill:#3c4043}.m{fill:#17212b;text-anchor:middle}"
            ".t{font-size:17px;font-weight:600;fill:#17212b}.e{text-anchor:end}.c{text-anchor:middle}</style>",
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            f'<text x="{_LEFT}" y="28" class="t">{escape(title)}</text>',
            f'<text x="{_LEFT + width}" y="28" class="a e">{heading}</text>',
            *lanes,
            *_axis(bottom, width, total),
            *_key(timeline, bottom + 36),
            "</svg>\n",
        ]
    )


def _boxes(row: Sequence[Event], y: float, scale: float) -> Iterator[str]:
    chunk_of_stage = _chunk_of_stage(row)
    for event in row:
        kind, stage, microbatch = event.action
        x = _LEFT + event.start * scale
        width = (event.end - event.start) * scale
        fill = shade(kind, chunk_of_stage[stage], len(chunk_of_stage))
        border = 0.6 if width > 3 else 0
        yield (
            f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_LANE_HEIGHT}" fill="{fill}" stroke="#ffffff" '
            f'stroke-width="{border}"><title>{event.action}: {event.start:.6g} to {event.end:.6g}</title></rect>'
        )
        if microbatch is None:
            continue
        number = str(microbatch)
        font_size = min(_MAX_FONT, (width - 3) / (_DIGIT_WIDTH * len(number)))
        if font_size >= _MIN_FONT:
            middle = x + width / 2
            base = y + _LANE_HEIGHT / 2 + 0.36 * font_size
            yield f'<text x="{middle:.2f}" y="{base:.2f}" class="m" font-size="{font_size:.1f}">{number}</text>'


def shade(kind: str, chunk: int, chunks: int) -> str:
    """The colour of a kind of action on a rank's stage number `chunk`: paler for later ones."""
    first, last = _FILL.get(kind, _OTHER_FILL)
    progress = chunk / (chunks - 1) if chunks > 1 else 0.0
    colour = "#"
    for index in (1, 3, 5):  # red, green, blue
        dark = int(first[index : index + 2], 16)
        pale = int(last[index : index + 2], 16)
        colour += f"{round(dark + (pale - dark) * progress):02x}"
    return colour


def _axis(y: float, width: float, total: float) -> Iterator[str]:
    step = 10.0 ** floor(log10(total))
    while total / step < 5:  # at least five ticks
        step /= 2
    for index in range(int(total / step + 1e-9) + 1):
        tick = index * step
        x = _LEFT + width * tick / total
        yield f'<path d="M{x:.2f} {y}v4" stroke="#9aa0a6"/>'
        yield f'<text x="{x:.2f}" y="{y + 17}" class="a c">{tick:.4g}</text>'


def _key(timeline: Timeline, y: float) -> Iterator[str]:
    kinds = {event.action.kind for event in chain.from_iterable(timeline.rows)}
    chunks = max((len(_chunk_of_stage(row)) for row in timeline.rows), default=1)
    entries = [(kind, f"{kind} {meaning}") for kind, meaning in MEANING.items() if kind in kinds]
    x = _LEFT
    for kind, text in [*entries, ("", "idle")]:
        fills = [_IDLE]
        if kind:
            fills = [shade(kind, chunk, chunks) for chunk in range(chunks)]
        for fill in fills:
            yield f'<rect x="{x}" y="{y}" width="14" height="14" fill="{fill}"/>'
            x += 15
        yield f'<text x="{x + 5}" y="{y + 11}" class="a">{text}</text>'
        x += 5 + _LETTER_WIDTH * len(text) + 18
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
            arguments = {"stage": stage, "microbatch": microbatch}
            events.append(
                {
                    "name": name,
                    "cat": kind,
                    "ph": "X",
                    "pid": 0,
                    "tid": rank,
                    **times,
                    "args": arguments,
                }
            )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
