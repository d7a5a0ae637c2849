"""What the data ranks divide among themselves."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from core.field_names import tells_names
from core.optimizer.state.offload import Offload
from core.parallel_state.config import raise_all
from core.training.model.config import DTYPES


@tells_names("data_parallel")
@dataclass(frozen=True, kw_only=True)
class DataParallelConfig:
    """What the data ranks divide among themselves, and where optimizer states live.

    Raises ValueError with every rule that is broken.
    """

    zero_stage: Literal[0, 1, 2, 3] = 1
    """0: nothing is divided; 1: optimizer states; 2: gradients too, summed in every microbatch; 3: weights too."""

    offload: Literal["none", "optimizer"] = "none"
    """optimizer: float32 copies and moments live in host memory, or in files that are mapped into it."""

    offload_fraction: float = 1.0
    """Share of the elements whose states are offloaded, from 0 (nothing) to 1 (all)."""

    offload_directory: str | None = None
    """Directory of the files that hold offloaded states; default: they lie in host memory."""

    grad_dtype: str | None = None
    """In which gradients are added up; default: float32 for 16-bit weights, else the weights'."""

    reduce_dtype: str | None = None
    """To which gradients are rounded to be sent; default: grad_dtype."""

    bucket_size: int | None = None
    """Elements that are sent together; default: by the device."""

    shard_units: str = "layer"
    """What stage 3 gathers at once: "layer", or a name or pattern of modules."""

    overlap: bool | None = None
    """Send while computing; default: where that pays."""

    check_replicas_every: int = 0
    """Steps between two comparisons of all replicas; 0: never."""

    def __post_init__(self) -> None:
        raise_all("DataParallelConfig", self._rules())

    def _rules(self) -> Iterator[tuple[bool, str]]:
        yield (
            self.zero_stage in (0, 1, 2, 3),
            f"zero_stage={self.zero_stage} is unknown; known: 0, 1, 2, 3",
        )
        yield (
            self.offload in ("none", "optimizer"),
            f"unknown offload {self.offload!r}; known: none, optimizer",
        )
        yield (
            0 <= self.offload_fraction <= 1,
            f"offload_fraction={self.offload_fraction} must be between 0 (nothing) and 1 (all)",
        )
        yield (
            self.offload_directory is None or self.offload != "none",
            f"offload_directory={self.offload_directory} holds nothing with offload=none; use offload=optimizer",
        )
        for name in ("grad_dtype", "reduce_dtype"):
            value = getattr(self, name)
            yield (
                value is None or value in DTYPES,
                f"unknown {name} {value!r}; known: {', '.join(DTYPES)}",
            )
        size = self.bucket_size
        yield size is None or size >= 1, f"bucket_size={size} must be at least 1 element"
        every = self.check_replicas_every
        yield every >= 0, f"check_replicas_every={every} must be at least 0 (never)"

    def arguments(self) -> dict[str, Any]:
        """The keywords of `DataParallel(module, ps, ...)`."""
        return {
            "zero_stage": self.zero_stage,
            "bucket_size": self.bucket_size,
            "grad_dtype": DTYPES[self.grad_dtype] if self.grad_dtype is not None else None,
            "reduce_dtype": DTYPES[self.reduce_dtype] if self.reduce_dtype is not None else None,
            "shard_units": self.shard_units,
            "overlap": self.overlap,
            "check_replicas_every": self.check_replicas_every,
        }

    def offload_policy(self) -> Offload | None:
        """Where the optimizer's states live: the `offload` of `build_optimizer(shard, config, offload=...)`."""
        if self.offload == "none":
            return None
        kind = "cpu" if self.offload_directory is None else "disk"
        return Offload(kind=kind, fraction=self.offload_fraction, directory=self.offload_directory)
