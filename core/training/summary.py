"""What a run tells before and after: who holds what, the loss against baselines that need no model, the last step."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from core.models.gpt import GPTModel
from core.parallel_state import ParallelState
from core.pipeline import Pipeline, SingleStage, Timeline
from core.pipeline.draw import MEANING, draw_text, shade
from core.training.build import count_parameters
from core.training.data import Corpus
from core.training.metrics import StepRecord


def last_step(executor: SingleStage | Pipeline) -> dict[str, Timeline]:
    """title -> timeline of a pipeline's last step, and of what the player predicts for its times. Collective."""
    if isinstance(executor, SingleStage):
        return {}
    measured = executor.timeline()
    return {"predicted for these times": executor.predicted(measured).timeline, "last step, measured": measured}


def headline(title: str, timeline: Timeline) -> str:
    """`title: 120 ms, bubble 6%`."""
    return f"{title}: {1e3 * timeline.makespan:.0f} ms, bubble {timeline.bubble:.0%}"


def describe(stages: Mapping[int, GPTModel], ps: ParallelState, corpus: Corpus, say: Callable[[str], None]) -> None:
    """Who holds what, before a run. All-gather over pp."""
    say(f"{ps.config.world_size} ranks on {ps.device.type}, sequence parallel: {ps.config.sequence_parallel}")
    say(ps.grid.table())
    total, here = count_parameters(stages, ps)
    say(f"parameters: {total:,} in all, {here:,} on rank 0 (with padding)")
    say(f"text: {corpus.train.num_tokens:,} tokens to train on, {corpus.valid.num_tokens:,} to validate")


def tell(
    output: Path,
    records: Sequence[StepRecord],
    corpus: Corpus,
    validation: float,
    timelines: Mapping[str, Timeline],
    sample: str,
    say: Callable[[str], None],
) -> None:
    """After a run: `report.png`, the last step drawn, a sample, `validation` bits per byte beside the baselines."""
    baselines = {"unigram": corpus.unigram, "gzip -9": corpus.gzip, "validation": validation}
    write_report(output / "report.png", records, corpus.bytes_per_token, baselines=baselines, timelines=timelines)
    for title, timeline in timelines.items():
        say(f"{headline(title, timeline)}\n{draw_text(timeline)}\n")
    say(f"--- a sample ---\n{sample}\n----------------")
    say("bits per byte: " + ", ".join(f"{name} {value:.3f}" for name, value in baselines.items()))
    say(f"written: {output / 'metrics.jsonl'}, {output / 'report.png'}")


def write_report(
    path: str | Path,
    records: Sequence[StepRecord],
    bytes_per_token: float,
    *,
    baselines: Mapping[str, float],
    timelines: Mapping[str, Timeline] | None = None,
) -> None:
    """Training loss in bits per byte over steps, a line per baseline, the gradient norm below; then timelines.

    timelines: title -> what each pipeline rank did in a step, in seconds.
    Raises ImportError with the remedy when matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("report.png needs matplotlib: pip install 'paracore[train]'") from error
    lanes = dict(timelines or {})
    heights = [0.35 * len(timeline.rows) + 0.6 for timeline in lanes.values()]
    figure = Figure(figsize=(9, 6 + sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom, *rest = figure.subplots(2 + len(lanes), 1, height_ratios=(4.2, 1.4, *heights))
    top.sharex(bottom)
    top.tick_params(labelbottom=False)
    steps = [r.step for r in records]
    scale = 1 / (0.6931471805599453 * bytes_per_token)
    top.plot(steps, [r.loss * scale for r in records], label="training", color="tab:blue")
    for (name, value), color in zip(
        baselines.items(), ("tab:red", "tab:green", "tab:orange", "tab:purple"), strict=False
    ):
        top.axhline(value, label=f"{name} {value:.3f}", color=color, linestyle="--", linewidth=1)
    top.set_ylabel("bits per byte")
    top.legend()
    bottom.plot(steps, [r.grad_norm for r in records], color="tab:gray")
    bottom.set_ylabel("gradient norm")
    bottom.set_xlabel("step")
    for axes, (title, timeline) in zip(rest, lanes.items(), strict=True):
        _draw(axes, title, timeline)
    figure.savefig(path, dpi=110)


def _draw(axes: Any, title: str, timeline: Timeline) -> None:
    """One lane per rank, a colour per kind of action, white where the rank is idle."""
    kinds: dict[str, str] = {}
    for rank, row in enumerate(timeline.rows):
        stages = sorted({event.action.stage for event in row})
        for action, start, end in row:
            colour = shade(action.kind, stages.index(action.stage), len(stages))
            kinds.setdefault(action.kind, shade(action.kind, 0, 1))
            axes.broken_barh([(1e3 * start, 1e3 * (end - start))], (rank - 0.42, 0.84), color=colour, linewidth=0)
    axes.set_yticks(range(len(timeline.rows)), [f"rank {rank}" for rank in range(len(timeline.rows))])
    axes.invert_yaxis()
    axes.set_xlim(0, 1e3 * timeline.makespan)
    axes.set_title(headline(title, timeline), fontsize=9)
    handles = [axes.barh(0, 0, color=kinds[kind], label=MEANING[kind]) for kind in MEANING if kind in kinds]
    axes.legend(handles=handles, fontsize=7, ncols=len(handles), loc="upper center", bbox_to_anchor=(0.5, -0.25))
