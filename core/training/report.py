"""`report.png`: the loss curve against the baselines that need no model."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from core.training.metrics import StepRecord


def write_report(
    path: str | Path, records: Sequence[StepRecord], *, bytes_per_token: float, baselines: Mapping[str, float]
) -> None:
    """Training loss in bits per byte over steps, a line per baseline, and the gradient norm below.

    Raises ImportError with the remedy when matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("report.png needs matplotlib: pip install 'paracore[train]'") from error
    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
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
    figure.savefig(path, dpi=110)
