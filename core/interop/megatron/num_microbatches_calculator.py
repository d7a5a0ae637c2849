"""How many microbatches a rank's share of the global batch is, constant or while the batch grows.

The calculator is the script's one, as in Megatron; it ends with the parallel state's process, or with
`destroy_num_microbatches_calculator`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from core.interop.megatron.absent import absent_names


@dataclass
class _Calculator:
    """rampup: (first global batch, increment, samples over which it grows), or None."""

    global_batch_size: int
    micro_batch_size: int
    data_parallel_size: int
    decreases: bool
    rampup: tuple[int, int, int] | None
    current: int = 0

    def __post_init__(self) -> None:
        for name in ("global_batch_size", "micro_batch_size", "data_parallel_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.rampup is not None:
            first, increment, samples = self.rampup
            between = self.global_batch_size - first
            if first < 1 or increment < 1 or samples < 0 or between < 0 or between % increment:
                raise ValueError(
                    f"rampup_batch_size={list(self.rampup)}: from {first} (at least 1) by steps of {increment} the "
                    f"batch must come to global_batch_size={self.global_batch_size}, in at least 0 samples"
                )
        self.update(0, checks=self.rampup is None)
        if self.microbatches < 1:
            raise ValueError(
                f"global_batch_size={self.current} is below micro_batch_size={self.micro_batch_size} times "
                f"data_parallel_size={self.data_parallel_size}: 0 microbatches; make one of them smaller"
            )

    @property
    def samples_per_round(self) -> int:
        """One microbatch of every data rank."""
        return self.micro_batch_size * self.data_parallel_size

    @property
    def microbatches(self) -> int:
        return self.current // self.samples_per_round

    @property
    def running(self) -> int:
        """The batch that is run: with `decreases` the largest multiple that fits."""
        return self.microbatches * self.samples_per_round if self.decreases else self.current

    def update(self, consumed_samples: int, *, checks: bool) -> None:
        """Raises ValueError: a batch that data ranks and microbatches do not divide."""
        current = self.global_batch_size
        if self.rampup is not None:
            first, increment, samples = self.rampup
            steps = (self.global_batch_size - first) // increment
            if steps and consumed_samples <= samples:
                # samples of one size, which need not be whole
                current = (
                    first + int(consumed_samples / (samples / steps)) * increment
                    if samples
                    else first
                )
        if checks and not self.decreases and current % self.samples_per_round:
            raise ValueError(
                f"global_batch_size={current} does not divide by micro_batch_size={self.micro_batch_size} times "
                f"data_parallel_size={self.data_parallel_size}; make it a multiple of {self.samples_per_round}, or "
                "say decrease_batch_size_if_needed=True"
            )
        self.current = current


# the roof's: nothing in `core` reads it
_calculators: list[_Calculator] = []


def _current() -> _Calculator:
    if not _calculators:
        raise ValueError(
            "0 calculators: call init_num_microbatches_calculator(rank, rampup_batch_size, global_batch_size, "
            "micro_batch_size, data_parallel_size) first"
        )
    return _calculators[0]


def init_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: Sequence[int] | None,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
    decrease_batch_size_if_needed: bool = False,
) -> None:
    """rampup_batch_size: [first global batch, increment, samples over which it grows]. rank: is not read.

    Raises ValueError: there is one already; sizes that do not divide.
    """
    if _calculators:
        raise ValueError(
            f"there is a calculator of global_batch_size={_calculators[0].global_batch_size} already; call "
            "destroy_num_microbatches_calculator() first, or reconfigure_num_microbatches_calculator(...)"
        )
    reconfigure_num_microbatches_calculator(
        rank,
        rampup_batch_size,
        global_batch_size,
        micro_batch_size,
        data_parallel_size,
        decrease_batch_size_if_needed,
    )


def reconfigure_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: Sequence[int] | None,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
    decrease_batch_size_if_needed: bool = False,
) -> None:
    """The same in the place of the one that is there. Raises ValueError: sizes that do not divide."""
    rampup = None
    if rampup_batch_size is not None:
        if len(rampup_batch_size) != 3:
            raise ValueError(
                f"rampup_batch_size has {len(rampup_batch_size)} numbers; give 3: the first global batch, the "
                "increment, the samples over which it grows"
            )
        first, increment, samples = (int(number) for number in rampup_batch_size)
        rampup = (first, increment, samples)
    _calculators[:] = [
        _Calculator(
            global_batch_size,
            micro_batch_size,
            data_parallel_size,
            decrease_batch_size_if_needed,
            rampup,
        )
    ]


def destroy_num_microbatches_calculator() -> None:
    """Forget it."""
    _calculators.clear()


unset_num_microbatches_calculator = destroy_num_microbatches_calculator


def get_num_microbatches() -> int:
    """Of a rank in the next step. Raises ValueError: there is no calculator."""
    return _current().microbatches


def get_current_global_batch_size() -> int:
    """Of the next step. Raises ValueError: there is no calculator."""
    return _current().current


def get_current_running_global_batch_size() -> int:
    """The samples that the next step runs. Raises ValueError: there is no calculator."""
    return _current().running


def get_micro_batch_size() -> int:
    """Raises ValueError: there is no calculator."""
    return _current().micro_batch_size


def update_num_microbatches(
    consumed_samples: int, consistency_check: bool = True, verbose: bool = False
) -> None:
    """After so many samples in all. Raises ValueError: with consistency_check, a batch that ranks do not divide."""
    _current().update(consumed_samples, checks=consistency_check)


__getattr__ = absent_names(__name__)
