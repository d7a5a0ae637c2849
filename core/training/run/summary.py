"""What a run tells before and after: who holds what, the loss against baselines that need no model, the last step."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from core.models.gpt import GPTModel
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
    """title -> timeline of a pipeline's last step, and of what the player predicts for its times. Collective."""
    if isinstance(executor, SingleStage):
        return {}
    measured = executor.timeline()
    return {"predicted for these times": executor.predicted(measured).timeline, "last step, measured": measured}


def headline(title: str, timeline: Timeline) -> str:
    """`title: 120 ms, bubble 6%`."""
    return f"{title}: {1e3 * timeline.makespan:.0f} ms, bubble {timeline.bubble:.0%}"


def configuration(loaded: Loaded, ps: ParallelState, say: Callable[[str], None]) -> None:
    """What this run was told, once: every value that is no default; all of them in `run.toml` of its output."""
    path = Path(loaded.run.training.output) / "run.toml"
    if ps.rank == 0:
        loaded.to_toml(path)
    lines = loaded.lines()
    say(f"{len(lines)} values are not the defaults; all of them: {path}")
    for line in lines:
        say(f"  {line}")


def open_log(run: RunConfig, start: int, ps: ParallelState) -> MetricsLog:
    """Where records go: metrics.jsonl, and what the run asks for beside it; written by rank 0.

    start: steps that a resumed run does not make again. Raises ImportError, on every rank: a missing extra.
    """
    output, asked = Path(run.training.output), run.training
    sinks = open_sinks(
        output,
        tensorboard=asked.tensorboard,
        wandb_project=asked.wandb_project,
        config=run.flat(),
        start=start,
        rank=ps.rank,
    )
    return MetricsLog(output if ps.rank == 0 else None, start, sinks)


def describe(stages: Mapping[int, GPTModel], ps: ParallelState, corpus: Corpus, say: Callable[[str], None]) -> None:
    """Who holds what, before a run. All-gather over pp."""
    say(f"{ps.config.world_size} ranks on {ps.device.type}, sequence parallel: {ps.config.sequence_parallel}")
    say(ps.grid.table())
    total, here = count_parameters(stages, ps)
    say(f"parameters: {total:,} in all, {here:,} on rank 0 (with padding)")
    train, valid = corpus.num_tokens
    say(f"text: {train:,} tokens to train on, {valid:,} to validate")


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
    output = Path(loaded.run.training.output)
    baselines = corpus.baselines | ({"validation": validation} if validation is not None else {})
    write_report(output / "report.png", records, corpus.bytes_per_token, baselines=baselines, timelines=timelines)
    write_page(
        output / "report.html",
        records,
        run=loaded.run.flat(),
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
    say(
        "written: "
        + ", ".join(str(output / name) for name in ("run.toml", "metrics.jsonl", "report.html", "report.png"))
    )


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
