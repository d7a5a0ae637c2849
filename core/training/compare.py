"""The first step again, in one process: whether a layout of ranks computes what one rank does."""

from core.data_parallel import PerParameterGradSync
from core.datasets import GPTBatches
from core.models.gpt import GPTModel
from core.optimizer import AdamW, OptimizerConfig
from core.parallel_state import ParallelState
from core.pipeline import SingleStage
from core.training.config import DataConfig, ModelConfig, TrainingConfig
from core.training.evaluate import next_token_loss
from core.training.loop import FirstStep


def first_step_alone(
    model: ModelConfig, data: DataConfig, training: TrainingConfig, batches: GPTBatches, vocab_size: int
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
    sync = PerParameterGradSync(whole, alone)
    optimizer = AdamW(whole, alone, OptimizerConfig(lr=0.0), grad_sync=sync)
    executor = SingleStage(
        whole,
        ps=alone,
        num_microbatches=training.global_batch_size // training.micro_batch_size,
        grad_sync=sync,
        seed=training.seed,
    )
    result = executor.step(batches.batch(0), next_token_loss)
    stats = optimizer.step(num_tokens=result.num_tokens)
    return FirstStep(float(result.loss), float(stats.grad_norm))
