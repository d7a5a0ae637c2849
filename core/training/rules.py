"""Rules between the parts of a run: pure, told all at once, before any process group exists."""

from collections.abc import Iterator

from core.parallel_state import ParallelConfig
from core.parallel_state.config import divisors, raise_all
from core.training.config import DataConfig, ModelConfig, TrainingConfig
from core.transformer.rules import layout_rules


def run_rules(
    model: ModelConfig, parallel: ParallelConfig, data: DataConfig, training: TrainingConfig
) -> Iterator[tuple[bool, str]]:
    """(holds, message) of every rule; `parallel` knows its data size."""
    yield from layout_rules(model.transformer(), parallel)
    assert parallel.data is not None
    step = training.micro_batch_size * parallel.data
    batch = training.global_batch_size
    valid = [d for d in divisors(batch) if batch % (d * parallel.data) == 0]
    yield (
        batch % step == 0,
        f"global_batch_size={batch} is not a multiple of micro_batch_size={training.micro_batch_size} x "
        f"data({parallel.data}) = {step}; use {-(-batch // step) * step}, or a micro_batch_size of "
        f"{', '.join(map(str, valid)) or 'none: the batch does not divide over the data axis'}",
    )
    s, tp = data.sequence_length, parallel.tensor
    yield (
        not parallel.sequence_parallel or s % tp == 0,
        f"sequence_length={s} does not divide over tensor={tp}, as sequence_parallel needs; use {-(-s // tp) * tp}",
    )
    yield (
        (data.train is None) == (data.valid is None) == (data.tokenizer is None),
        "give train, valid and tokenizer together, or none of them for the default corpus",
    )
    yield (
        parallel.pipeline == 1 and parallel.context == 1 and parallel.expert == 1,
        f"pipeline={parallel.pipeline}, context={parallel.context}, expert={parallel.expert}: this loop trains over "
        "tensor and data ranks; use 1 for the others",
    )


def check_run(
    model: ModelConfig, parallel: ParallelConfig, data: DataConfig, training: TrainingConfig, *, world_size: int
) -> ParallelConfig:
    """The layout with its data size, or one ValueError with everything that does not fit together."""
    parallel = parallel.for_world(world_size)
    raise_all("this run", run_rules(model, parallel, data, training))
    return parallel
