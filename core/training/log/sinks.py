"""Where log records go beside `metrics.jsonl`: TensorBoard and Weights & Biases, which are extras."""

import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

SCALAR_NAMES = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/learning_rate",
    "skipped": "train/skipped",
    "spikes": "train/spikes",
    "tokens_per_s": "speed/tokens_per_s",
    "tflops_per_s": "speed/tflops_per_s",
    "step_ms": "speed/step_ms",
    "mfu": "speed/mfu",
    "memory_mib": "memory/peak_mib",
    "tokens_seen": "train/tokens_seen",
    "expert_load": "experts/busiest",
    "aux_loss": "experts/aux_loss",
    "z_loss": "experts/z_loss",
}


class LogRecord(Protocol):
    """What a sink reads of a record of a step or a validation."""

    @property
    def step(self) -> int:
        """Number of the step, from 1."""
        ...

    def scalars(self) -> dict[str, float]:
        """Name in a sink -> value, without what is not known."""
        ...


class Sink(Protocol):
    """Receives each record once, in order, on rank 0."""

    def add(self, record: LogRecord) -> None:
        """Write one more record."""
        ...

    def close(self) -> None:
        """Write what is buffered; nothing is added afterwards."""
        ...


def open_sinks(
    directory: str | Path,
    *,
    tensorboard: bool = False,
    wandb_project: str | None = None,
    config: Mapping[str, Any] | None = None,
    start: int = 0,
    rank: int = 0,
) -> tuple[Sink, ...]:
    """The sinks that a run asks for, below its output `directory`; none on ranks other than 0, which only check.

    config: flat, as W&B shows it. start: steps that a resumed run does not make again.
    Raises ImportError, on every rank alike: all extras that are missing, with the remedy.
    """
    # every rank checks, so that a missing extra ends all of them at once
    requested = {"tensorboard": tensorboard, "wandb": wandb_project is not None}
    missing = [
        name for name, is_requested in requested.items() if is_requested and not _is_installed(name)
    ]
    if missing:
        raise ImportError(
            f"{_install_hint(*missing)}, or leave {' and '.join(missing)} out of the run"
        )
    if rank != 0:
        return ()
    return tuple(_open_requested(Path(directory), tensorboard, wandb_project, config or {}, start))


def _open_requested(
    directory: Path,
    tensorboard: bool,
    wandb_project: str | None,
    config: Mapping[str, Any],
    start: int,
) -> Iterator[Sink]:
    if tensorboard:
        yield TensorBoardSink(directory / "tensorboard", start=start)
    if wandb_project is not None:
        yield WandbSink(wandb_project, directory, config)


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ValueError:
        # a module without a spec, or None in its place
        return False


def _install_hint(*names: str) -> str:
    verb = "is" if len(names) == 1 else "are"
    return f"{' and '.join(names)} {verb} not installed: pip install {' '.join(names)}"


class TensorBoardSink:
    """Event files in `directory`; `start` hides what an earlier, killed run wrote for later steps.

    Raises ImportError with the remedy.
    """

    def __init__(self, directory: str | Path, start: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(_install_hint("tensorboard")) from error
        first_new_step = start + 1 if start else None
        self._writer: Any = SummaryWriter(str(directory), purge_step=first_new_step, flush_secs=10)

    def add(self, record: LogRecord) -> None:
        """A point of each curve."""
        for name, value in record.scalars().items():
            self._writer.add_scalar(name, value, record.step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


def _wandb_mode() -> Any:
    return os.environ.get("WANDB_MODE", "offline")


class WandbSink:
    """A run of a W&B project, written below `directory`/wandb; nothing is sent unless WANDB_MODE=online says so.

    Offline runs are sent later with `wandb sync`. Runs of one directory, such as a resumed one, share a group.
    Raises ImportError with the remedy.
    """

    def __init__(self, project: str, directory: str | Path, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ImportError(_install_hint("wandb")) from error
        # offline by default: a run must not send anything that nobody asked for
        Path(directory).mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(
            project=project,
            dir=str(directory),
            group=Path(directory).resolve().name,
            config=dict(config),
            mode=_wandb_mode(),
            settings=wandb.Settings(console="off", silent=True),  # W&B must not capture the console
        )

    def add(self, record: LogRecord) -> None:
        """A point of each curve."""
        self._run.log(record.scalars(), step=record.step)

    def close(self) -> None:
        """End the run; its files are complete."""
        self._run.finish()
