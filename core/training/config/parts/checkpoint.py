"""When a run is saved, and what it starts from."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from core import dist_checkpointing
from core.field_names import tells_names
from core.parallel_state.config import raise_all
from core.training.config.messages.huggingface import HUGGINGFACE

# of a run that continues
CHANGES = ("data", "batch", "optimizer", "model")


# stored with the checkpoints of a run
METRICS = ("validation.bits_per_byte", "loss")


@tells_names("checkpoint", HUGGINGFACE)
@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the run's state is saved, how much of it is kept, and what a run starts from.

    Raises ValueError with every rule that is broken.
    """

    directory: str | None = None
    """Where all checkpoints of the run lie, as step-00001000; default: nothing is saved, also not on SIGTERM."""

    every: int = 0
    """Steps between two checkpoints; 0: at the end only."""

    keep_last: int = 3
    """How many of the newest checkpoints are kept."""

    keep_every: int = 0
    """Checkpoints of steps that are multiples of this are kept for ever; 0: none."""

    keep_hours: float | None = None
    """One checkpoint per so many hours is kept for ever."""

    keep_best: str | None = None
    """A metric, by which the best checkpoints are kept: validation.bits_per_byte, where validation and a save fall
    on one step, or loss."""

    keep_best_count: int = 1
    """How many of them."""

    keep_best_mode: Literal["min", "max"] = "min"
    """Whether small or large values are good."""

    stale_seconds: float = 60.0
    """How long a job may be silent before another one takes over its directory, or waits no more for its writers."""

    on_failure: Literal["retry", "raise", "warn"] = "retry"
    """After a save that failed: "retry" warns and saves the next due step, "raise" ends the run at once, "warn" never
    does. A second failure in a row ends a run that retries."""

    export_huggingface: str | None = None
    """Folder that is made at the end of the run: the model and its tokenizer, as transformers loads them."""

    resume: Literal["must", "auto", "never"] = "auto"
    """From the newest checkpoint that verifies: "auto" if there is one, "must" (or it is an error), or "never"."""

    load: str | None = None
    """One checkpoint to start from, of any layout, wherever it lies; goes before `resume`."""

    weights: str | None = None
    """One checkpoint whose weights, and nothing else, a run begins with at step 0, whatever its data, batch, sequence
    length or optimizer were; a run that goes on from its own `directory` reads them no more."""

    change: tuple[str, ...] = ()
    """What a checkpoint that continues may have had otherwise: data (its text, order, sequence length), batch (its
    size), optimizer (its kind; the states begin anew)."""

    share_reads: bool | None = None
    """What several ranks load is read from storage by one of them and sent to the others; false: each reads for
    itself; None: shared where ranks are on several hosts, or the store is an object store."""

    asynchronous: bool = True
    """Save beside the next steps instead of waiting."""

    def __post_init__(self) -> None:
        raise_all("CheckpointConfig", self._rules())

    def _rules(self) -> Iterator[tuple[bool, str]]:
        for name, minimum in (("every", 0), ("keep_last", 1), ("keep_every", 0)):
            yield (
                getattr(self, name) >= minimum,
                f"{name}={getattr(self, name)} must be at least {minimum}",
            )
        # what is kept, and by which metric
        hours = self.keep_hours
        mode = self.keep_best_mode
        failure = self.on_failure
        yield hours is None or hours > 0, f"keep_hours={hours} must be above 0"
        yield self.stale_seconds > 0, f"stale_seconds={self.stale_seconds} must be above 0"
        yield (
            self.keep_best_count >= 1,
            f"keep_best_count={self.keep_best_count} must be at least 1",
        )
        yield mode in ("min", "max"), f"unknown keep_best_mode {mode!r}; known: min, max"
        yield (
            self.keep_best in (None, *METRICS),
            f"keep_best={self.keep_best!r} is no metric of a run; known: {', '.join(METRICS)}",
        )
        yield (
            failure in ("retry", "raise", "warn"),
            f"unknown on_failure {failure!r}; known: retry, raise, warn",
        )
        yield (
            self.load is None or self.weights is None,
            f"load={self.load} goes on with a run and weights={self.weights} begins one; give one of them",
        )
        for name in self.change:
            yield name in CHANGES, f"change names {name!r}; known: {', '.join(CHANGES)}"
        yield (
            self.resume in ("must", "auto", "never"),
            f"unknown resume {self.resume!r}; known: must, auto, never",
        )
        yield (
            self.directory is not None or (self.every == 0 and self.resume != "must"),
            f"every={self.every} and resume={self.resume} need a directory; give one, or every=0 "
            "(and no resume) to save nothing",
        )

    def resumes(self) -> bool:
        """Whether a run of these settings goes on from a checkpoint instead of beginning; asks the directory."""
        if self.load is not None:
            return True
        if self.directory is None or self.resume == "never":
            return False
        return bool(dist_checkpointing.CheckpointRoot(self.directory).steps())
