"""Whether a layout of ranks computes what one rank does, and a resumed run what an unbroken one does."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from core.data_parallel import DataParallel
from core.models.gpt import GPTModel
from core.optimizer import OptimizerConfig, ShardedAdamW
from core.parallel_state import ParallelState
from core.pipeline import SingleStage
from core.training.config import DataConfig, ModelConfig, RunConfig, TrainingConfig
from core.training.log.metrics import StepRecord, read_metrics
from core.training.run.data import BatchSource, Corpus
from core.training.run.evaluate import next_token_loss
from core.training.run.loop import FirstStep


def first_step_alone(
    model: ModelConfig, data: DataConfig, training: TrainingConfig, batches: BatchSource, vocab_size: int
) -> FirstStep:
    """Loss and gradient norm of step 0 of this run, computed by this process by itself. No collectives."""
    alone = ParallelState.single("cpu")
    whole = GPTModel(
        model.transformer(),
        model.spec(),
        vocab_size,
        data.sequence_length,
        share_embeddings_and_output_weights=model.tie_embeddings,
        parallel=alone,
        seed=model.seed,
    )
    shard = DataParallel(whole, alone)
    optimizer = ShardedAdamW(shard, OptimizerConfig(lr=0.0))
    executor = SingleStage(
        whole,
        ps=alone,
        num_microbatches=training.global_batch_size // training.micro_batch_size,
        grad_sync=shard,
        seed=training.seed,
    )
    result = executor.step(batches.batch(0), next_token_loss)
    stats = optimizer.step(num_tokens=result.num_tokens)
    return FirstStep(float(result.loss), float(stats.grad_norm))


def comparisons(
    first: FirstStep, start: int, records: Sequence[StepRecord], run: RunConfig, corpus: Corpus
) -> Iterator[str]:
    """A line for step 0 against one process (`first`: what it saw, of a run that did not resume at `start`), and one
    against `compare_with` for the steps that this run made. Raises ValueError: as `against_run`.
    """
    training, vocab = run.training, corpus.tokenizer.vocab_size
    if start == 0:
        yield first.against(first_step_alone(run.model, run.data, training, corpus.train, vocab))
    if training.compare_with is not None:
        yield against_run([record for record in records if record.step > start], training.compare_with)


def against_run(records: Sequence[StepRecord], path: str | Path) -> str:
    """One line: how far the losses of this run are from those of the same steps in another run's `metrics.jsonl`.

    Raises ValueError: no step that both have.
    """
    other = {record.step: record.loss for record in read_metrics(path)}
    common = [(record.step, abs(record.loss - other[record.step])) for record in records if record.step in other]
    if not common:
        raise ValueError(f"{path} has {len(other)} steps, none of them among the {len(records)} of this run")
    return (
        f"against {path}: {len(common)} steps in common, {common[0][0]} to {common[-1][0]}, max |loss difference| "
        f"{max(difference for _, difference in common):.1e}"
    )
