"""Compares a run with one process, and with another run: a layout, or resuming, must not change the losses."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from core.data_parallel import DataParallel
from core.optimizer import OptimizerConfig, ShardedAdamW
from core.parallel_state import ParallelState
from core.pipeline import LossFn, SingleStage
from core.training.config import RunConfig, TrainingConfig
from core.training.log.metrics import StepRecord, read_metrics
from core.training.model.begin import first_stages
from core.training.preferences.loss import DPOLoss
from core.training.resume.batch_plan import BatchPlan, PlannedBatches
from core.training.run.build import freeze
from core.training.run.data import BatchSource, Corpus
from core.training.run.evaluate import next_token_loss
from core.training.run.loop import FirstStep

# of a first step that one process repeats on a CPU after the run: some GB of memory, a minute or so
MOST_PARAMETERS = 200_000_000
MOST_FLOP = 1e13


def first_step_alone(
    full_model: nn.Module,
    training: TrainingConfig,
    batches: BatchSource,
    loss_fn: LossFn = next_token_loss,
) -> FirstStep:
    """Loss and gradient norm of step 0, computed by this process by itself; the model is whole. No collectives."""
    single = ParallelState.single("cpu")
    shard = DataParallel(full_model, single)
    # for the gradient norm
    optimizer = ShardedAdamW(shard, OptimizerConfig(lr=0.0))
    batch = batches.batch(0)
    rows = len(next(iter(batch.values())))
    executor = SingleStage(
        full_model,
        ps=single,
        num_microbatches=rows // training.rows_per_sample // training.micro_batch_size,
        grad_sync=shard,
        seed=training.seed,
    )
    # the same microbatches in the same order, so that dropout draws the same masks
    result = executor.step(batch, loss_fn)
    stats = optimizer.step(num_tokens=result.num_tokens)
    return FirstStep(float(result.loss), float(stats.grad_norm))


def comparisons(
    first: FirstStep,
    start: int,
    records: Sequence[StepRecord],
    run: RunConfig,
    corpus: Corpus,
    parameters: int,
    device: torch.device,
    source: BatchSource | None = None,
) -> Iterator[str]:
    """A line for step 0 against one process (`first`: what it saw, of a run that did not resume at `start`), and one
    against `compare_with` for the steps that this run made. Raises ValueError: as `against_run`.

    parameters: of the whole model, which one process would hold: a large one, and one that trains on an accelerator
    (`device`), is compared on request only. source: the batches that it trained on; default: the corpus's.
    """
    rows = run.training.global_batch_size * run.training.rows_per_sample
    tokens = rows * run.data.sequence_length
    asked = run.training.compare_first_step
    if start or asked is False or (asked is None and device.type != "cpu"):
        pass
    elif not asked and (parameters > MOST_PARAMETERS or 6 * parameters * tokens > MOST_FLOP):
        yield (
            f"first step not compared with one process: {parameters:,} parameters, {tokens:,} tokens are too much"
        )
    else:
        single = ParallelState.single("cpu")
        stages = first_stages(run, corpus.tokenizer.vocab_size, single, resumes=False)
        freeze(stages, run.optimizer, single)
        (full_model,) = stages.values()
        plan = BatchPlan(global_batch_size=run.training.global_batch_size, ramp=run.training.ramp)
        batches = PlannedBatches(source or corpus.train, lambda: plan)
        loss_fn: LossFn = next_token_loss
        if run.training.objective == "dpo":
            loss_fn = DPOLoss(run.dpo, single)
        alone = first_step_alone(full_model, run.training, batches, loss_fn)
        yield f"{first.against(alone)}{_told_of_dropout(full_model, run)}"
    if run.training.compare_with is not None:
        own_records = [record for record in records if record.step > start]
        yield against_run(own_records, run.training.compare_with)


def _told_of_dropout(model: nn.Module, run: RunConfig) -> str:
    """What explains a difference of another size than rounding's; empty: all ranks drop what one process does."""
    config = getattr(model, "config", None)
    of_model = (getattr(config, f"{place}_dropout", 0.0) for place in ("hidden", "attention"))
    ranks = run.parallel.tensor * run.parallel.context
    if ranks == 1 or not any((*of_model, run.lora.rank is not None and run.lora.dropout)):
        return ""
    return f" (dropout: {ranks} tensor and context ranks draw other masks than one process)"


def against_run(records: Sequence[StepRecord], path: str | Path) -> str:
    """One line: how far the losses of this run are from those of the same steps in another run's `metrics.jsonl`.

    Raises ValueError: no step that both have.
    """
    other_losses = {record.step: record.loss for record in read_metrics(path)}
    common = [record for record in records if record.step in other_losses]
    if not common:
        raise ValueError(
            f"{path} has {len(other_losses)} steps, none of them among the {len(records)} of this run"
        )
    largest = max(abs(record.loss - other_losses[record.step]) for record in common)
    first = common[0].step
    last = common[-1].step
    return f"against {path}: {len(common)} steps in common, {first} to {last}, max |loss difference| {largest:.1e}"
