"""What a run reports before and after: who holds what, the loss against simple baselines, the last step drawn."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from core.parallel_state import ParallelState
from core.pipeline import Pipeline, SingleStage, Timeline
from core.pipeline.draw.draw import MEANING, draw_text, shade
from core.training.config import Loaded, RunConfig
from core.training.doctor.environment import environment
from core.training.log.metrics import MetricsLog, StepRecord
from core.training.log.page import write_page
from core.training.log.sinks import open_sinks
from core.training.run.build import count_parameters
from core.training.run.data import Corpus


def last_step(executor: SingleStage | Pipeline) -> dict[str, Timeline]:
    """title -> timeline of a pipeline's last step, and of what the simulator predicts for its times. Collective."""
    if isinstance(executor, SingleStage):
        return {}
    # played with the measured times: the difference is what the schedule does not know (messages, jitter)
    measured = executor.timeline()
    return {"predicted for these times": executor.predicted(measured).timeline, "last step, measured": measured}


def headline(title: str, timeline: Timeline) -> str:
    """`title: 120 ms, bubble 6%`."""
    return f"{title}: {1e3 * timeline.makespan:.0f} ms, bubble {timeline.bubble:.0%}"


def configuration(loaded: Loaded, ps: ParallelState, say: Callable[[str], None]) -> None:
    """Say every setting that differs from its default, and write all of them to `run.toml` of the output."""
    path = Path(loaded.run.training.output) / "run.toml"
    if ps.rank == 0:
        loaded.to_toml(path)
    lines = loaded.lines()
    say(f"{len(lines)} settings differ from their defaults (the complete configuration is in {path}):")
    for line in lines:
        say(f"  {line}")


def open_log(run: RunConfig, start: int, ps: ParallelState) -> MetricsLog:
    """Where records go: metrics.jsonl, and TensorBoard or W&B if the run has them; written by rank 0.

    start: steps that a resumed run does not make again. Raises ImportError, on every rank: a missing extra.
    """
    output = Path(run.training.output)
    sinks = open_sinks(
        output,
        tensorboard=run.training.tensorboard,
        wandb_project=run.training.wandb_project,
        config=run.resolved(),
        start=start,
        rank=ps.rank,
    )
    directory = output if ps.rank == 0 else None
    return MetricsLog(directory, start, sinks)


def describe(stages: Mapping[int, nn.Module], ps: ParallelState, corpus: Corpus, say: Callable[[str], None]) -> None:
    """Who holds what, before a run. All-gather over pp."""
    say(f"{ps.config.world_size} ranks on {ps.device.type}, sequence parallel: {ps.config.sequence_parallel}")
    say(ps.grid.table())
    total, local = count_parameters(stages, ps)
    say(f"parameters: {total:,} in all, {local:,} on rank 0 (with padding)")
    train_tokens, valid_tokens = corpus.num_tokens
    say(f"text: {train_tokens:,} tokens to train on, {valid_tokens:,} to validate")


def tell(
    loaded: Loaded,
    records: Sequence[StepRecord],
    corpus: Corpus,
    validation: float | None,
    timelines: Mapping[str, Timeline],
    sample: str,
    ps: ParallelState,
    say: Callable[[str], None],
) -> None:
    """After a run: `report.html` and `report.png`, the last step drawn, a sample, bits per byte of the `validation`
    text (None: there is none) beside the baselines."""
    # what needs no model: how far the run got is seen against these
    output = Path(loaded.run.training.output)
    baselines = dict(corpus.baselines)
    if validation is not None:
        baselines["validation"] = validation
    write_report(output / "report.png", records, corpus.bytes_per_token, baselines=baselines, timelines=timelines)
    write_page(
        output / "report.html",
        records,
        run=loaded.run.resolved(),
        origin=loaded.origin,
        environment=environment(ps.device),
        baselines=baselines,
        timelines=timelines,
        sample=sample,
        bytes_per_token=corpus.bytes_per_token,
        title=str(output),
    )
    for title, timeline in timelines.items():
        say(f"{headline(title, timeline)}\n{draw_text(timeline)}\n")
    say(f"--- a sample ---\n{sample}\n----------------")
    if baselines:
        say("bits per byte: " + ", ".join(f"{name} {value:.3f}" for name, value in baselines.items()))
    names = ("run.toml", "metrics.jsonl", "report.html", "report.png")
    say("written: " + ", ".join(str(output / name) for name in names))


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
        raise ImportError("report.png needs matplotlib: pip install matplotlib") from error
    timelines = dict(timelines or {})
    # two plots of fixed height, then one lane per rank and timeline (in inches)
    heights = [0.35 * len(timeline.rows) + 0.6 for timeline in timelines.values()]
    # without pyplot, which would look for a display
    figure = Figure(figsize=(9, 6 + sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    loss_axes, norm_axes, *timeline_axes = figure.subplots(2 + len(timelines), 1, height_ratios=(4.2, 1.4, *heights))
    loss_axes.sharex(norm_axes)
    loss_axes.tick_params(labelbottom=False)
    steps = [record.step for record in records]
    bits_per_nat = 1 / math.log(2)
    scale = bits_per_nat / bytes_per_token  # nats per token to bits per byte
    loss_axes.plot(steps, [record.loss * scale for record in records], label="training", color="tab:blue")
    colours = ("tab:red", "tab:green", "tab:orange", "tab:purple")
    for (name, value), color in zip(baselines.items(), colours, strict=False):
        loss_axes.axhline(value, label=f"{name} {value:.3f}", color=color, linestyle="--", linewidth=1)
    loss_axes.set_ylabel("bits per byte")
    loss_axes.legend()
    norm_axes.plot(steps, [record.grad_norm for record in records], color="tab:gray")
    norm_axes.set_ylabel("gradient norm")
    norm_axes.set_xlabel("step")
    for axes, (title, timeline) in zip(timeline_axes, timelines.items(), strict=True):
        _draw_timeline(axes, title, timeline)
    figure.savefig(path, dpi=110)


def _draw_timeline(axes: Any, title: str, timeline: Timeline) -> None:
    """One lane per rank, a colour per kind of action, white where the rank is idle."""
    colour_of_kind: dict[str, str] = {}  # for the legend
    for rank, row in enumerate(timeline.rows):
        stages = sorted({event.action.stage for event in row})
        for action, start, end in row:
            colour = shade(action.kind, stages.index(action.stage), len(stages))
            colour_of_kind.setdefault(action.kind, shade(action.kind, 0, 1))
            axes.broken_barh([(1e3 * start, 1e3 * (end - start))], (rank - 0.42, 0.84), color=colour, linewidth=0)
    axes.set_yticks(range(len(timeline.rows)), [f"rank {rank}" for rank in range(len(timeline.rows))])
    axes.invert_yaxis()
    axes.set_xlim(0, 1e3 * timeline.makespan)
    axes.set_title(headline(title, timeline), fontsize=9)
    handles = []
    for kind, meaning in MEANING.items():
        if kind in colour_of_kind:
            handles.append(axes.barh(0, 0, color=colour_of_kind[kind], label=meaning))
    axes.legend(handles=handles, fontsize=7, ncols=len(handles), loc="upper center", bbox_to_anchor=(0.5, -0.25))
