"""report.png: the curves of report.html as one picture, in its colours."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from core.pipeline import Timeline
from core.pipeline.draw.draw import MEANING, shade
from core.training.log.charts import LIGHT, Curve, finite, legend, value_axis
from core.training.log.metrics import StepRecord
from core.training.log.page import curves
from core.training.log.validation import ValidationRecord


def headline(title: str, timeline: Timeline) -> str:
    """`title: 120 ms, bubble 6%`."""
    return f"{title}: {1e3 * timeline.makespan:.0f} ms, bubble {timeline.bubble:.0%}"


def write_report(
    path: str | Path,
    records: Sequence[StepRecord],
    bytes_per_token: float,
    *,
    baselines: Mapping[str, float],
    timelines: Mapping[str, Timeline] | None = None,
    validations: Sequence[ValidationRecord] = (),
) -> None:
    """Loss over steps with validations and baselines, the gradient norm below; then timelines.

    timelines: title -> what each pipeline rank did in a step, in seconds.
    Raises ImportError with the remedy when matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("report.png needs matplotlib: pip install matplotlib") from error
    timelines = dict(timelines or {})
    # two plots of fixed height, then one lane per rank and timeline (in inches)
    heights = [0.35 * len(timeline.rows) + 0.6 for timeline in timelines.values()]
    # without pyplot, which would look for a display
    figure = Figure(figsize=(9, 6 + sum(heights)), layout="constrained", facecolor=LIGHT["paper"])
    FigureCanvasAgg(figure)
    loss_axes, norm_axes, *timeline_axes = figure.subplots(
        2 + len(timelines), 1, height_ratios=(4.2, 1.4, *heights)
    )
    loss_axes.sharex(norm_axes)
    loss_axes.tick_params(labelbottom=False)
    steps = [record.step for record in records]
    drawn = list(curves(records, baselines, bytes_per_token, validations))
    for axes, curve in zip((loss_axes, norm_axes), drawn, strict=False):
        _draw_curve(axes, curve, steps)
    norm_axes.set_xlabel("step")
    for axes, (title, timeline) in zip(timeline_axes, timelines.items(), strict=True):
        _draw_timeline(axes, title, timeline)
    figure.savefig(path, dpi=110)


def _draw_curve(axes: Any, curve: Curve, steps: Sequence[int]) -> None:
    """As the page draws it: the same axis, levels and points in the same colours."""
    axes.set_title(f"{curve.title}  {curve.unit}", fontsize=10, loc="left", color=LIGHT["ink"])
    axes.set_facecolor(LIGHT["card"])
    axes.grid(color=LIGHT["grid"], linewidth=0.8)
    axes.tick_params(colors=LIGHT["soft"], labelsize=8, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(LIGHT["edge"])
    axis = value_axis(curve)
    if axis.logarithmic:
        axes.set_yscale("log")
    axes.set_ylim(axis.low, axis.high)
    heights = [value if finite(value) else None for value in curve.values]
    axes.plot(steps, heights, label="training", color=LIGHT["line"], linewidth=1.6)
    for number, (name, row) in enumerate((curve.points or {}).items()):
        finite_points = [point for point in row if finite(point[1])]
        if finite_points:
            colour = LIGHT[f"l{(number + 2) % 4}"]
            label = f"{name} {finite_points[-1][1]:.3f}"
            axes.plot(
                *zip(*finite_points, strict=True),
                label=label,
                color=colour,
                marker="o",
                markersize=4,
                linewidth=0.8,
            )
            axes.plot(
                # a ring around the best
                *min(finite_points, key=lambda point: point[1]),
                color=colour,
                marker="o",
                markersize=8,
                fillstyle="none",
            )
    for number, ((name, value), (_, words)) in enumerate(
        zip((curve.levels or {}).items(), legend(curve), strict=True)
    ):
        style = {
            "label": f"{name} {words}",
            "color": LIGHT[f"l{number % 4}"],
            "linestyle": "--",
            "linewidth": 1,
        }
        axes.axhline(value, **style)
    if curve.levels or curve.points:
        axes.legend(fontsize=8, frameon=False, labelcolor=LIGHT["soft"], loc="upper right")


def _draw_timeline(axes: Any, title: str, timeline: Timeline) -> None:
    """One lane per rank, a colour per kind of action, white where the rank is idle."""
    colour_of_kind: dict[str, str] = {}  # for the legend
    axes.set_facecolor(LIGHT["card"])
    axes.tick_params(colors=LIGHT["soft"], labelsize=8, length=0)
    for spine in axes.spines.values():
        spine.set_color(LIGHT["edge"])
    for rank, row in enumerate(timeline.rows):
        stages = sorted({event.action.stage for event in row})
        for action, start, end in row:
            colour = shade(action.kind, stages.index(action.stage), len(stages))
            colour_of_kind.setdefault(action.kind, shade(action.kind, 0, 1))
            axes.broken_barh(
                [(1e3 * start, 1e3 * (end - start))], (rank - 0.42, 0.84), color=colour, linewidth=0
            )
    axes.set_yticks(
        range(len(timeline.rows)), [f"rank {rank}" for rank in range(len(timeline.rows))]
    )
    # rank 0 on top, as in every drawing of a schedule
    axes.invert_yaxis()
    axes.set_xlim(0, 1e3 * timeline.makespan)
    axes.set_title(headline(title, timeline), fontsize=10, loc="left", color=LIGHT["ink"])
    handles = []
    for kind, meaning in MEANING.items():
        if kind in colour_of_kind:
            # a bar without extent, only for its entry in the legend
            handles.append(axes.barh(0, 0, color=colour_of_kind[kind], label=meaning))
    axes.legend(
        handles=handles,
        fontsize=7,
        ncols=len(handles),
        loc="upper center",
        bbox_to_anchor=(0.5, -0.25),
    )
