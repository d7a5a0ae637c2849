"""How the pipeline ranks take turns."""

from dataclasses import dataclass

from core.field_names import tells_names
from core.parallel_state.config import raise_all
from core.pipeline.schedule import schedules
from core.training.functions import function_of, is_function_name

_MAX_CHUNKS = 1024  # a stage has at least one layer


@tells_names("pipeline")
@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How stages take turns where there is more than one pipeline rank.

    Raises ValueError: an unknown schedule, chunks that it does not have.
    """

    schedule: str = "1f1b"
    """A schedule by name (`python -m core.pipeline.simulate --list`); "auto": searched for the measured costs; or a
    function of your own, "package.module:function": (ranks, microbatches) -> Schedule."""

    chunks: int | None = None
    """Stages per rank; default: the schedule's own (2 for "auto")."""

    memory_limit: float | None = None
    """Bytes of activations per rank that "auto" may hold; default: no limit."""

    def __post_init__(self) -> None:
        chunks = self.chunks
        rule = (
            chunks is None or chunks <= _MAX_CHUNKS,
            f"chunks={chunks} stages per rank must be at most {_MAX_CHUNKS}",
        )
        raise_all("PipelineConfig", [rule])
        if not is_function_name(self.schedule):
            # raises for an unknown schedule, or chunks that it does not have
            self.placement(1)
        elif chunks is not None:
            raise ValueError(
                f"PipelineConfig: chunks={chunks} is for named schedules; {self.schedule} places its stages itself"
            )

    def generator(self) -> str | schedules.Generator:
        """The schedule as `Pipeline` takes it: a name, or the function. Raises ValueError: no such function."""
        if is_function_name(self.schedule):
            return function_of(self.schedule)
        return self.schedule

    def placement(self, ranks: int) -> tuple[int, ...]:
        """The pipeline rank of each stage. Raises ValueError: no such function, what it makes is no schedule."""
        return schedules.placement(self.generator(), ranks, self.chunks)
