"""Pretrain a GPT on real text, over tensor, pipeline and data parallel ranks, on CPUs or accelerators.

    python examples/pretrain_gpt.py --help      # one process
    torchrun --standalone --nproc-per-node 4 examples/pretrain_gpt.py --parallel.tensor 2 --parallel.pipeline 2

Without data of your own it reads the interpreter's standard library.
"""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from core import parallel_state
from core.optimizer import OptimizerConfig
from core.parallel_state import ParallelConfig, ParallelState
from core.training import (
    CheckpointConfig,
    DataConfig,
    DataParallelConfig,
    ModelConfig,
    PipelineConfig,
    TrainingConfig,
    check_run,
    train,
)
from core.training.build import build_executor, build_sharded, build_stages
from core.training.checkpoint import Checkpoints
from core.training.compare import comparisons
from core.training.console import Console
from core.training.data import moved_to, open_corpus
from core.training.evaluate import evaluate_bits_per_byte
from core.training.generate import generate
from core.training.memory import MemoryReport
from core.training.metrics import MetricsLog, flops_per_token
from core.training.summary import describe, last_step, tell

STEPS = 200


@dataclass(frozen=True)
class Run:
    """Everything a run is told."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    data_parallel: DataParallelConfig = field(default_factory=DataParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=lambda: TrainingConfig(train_steps=STEPS))
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(
            lr=2e-3, min_lr=2e-4, lr_schedule="cosine", lr_warmup_steps=20, lr_decay_steps=STEPS, weight_decay=0.1
        )
    )
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    device: str | None = None  # cpu, cuda, npu, xpu; default: the accelerator if there is one


def pretrain(run: Run, ps: ParallelState) -> None:
    """Train, validate, sample, report, and check the first step against one process."""
    console = Console(ps.rank, run.training.train_steps)
    corpus = open_corpus(run.data, ps)
    batches, valid = corpus.batches(run.data, run.training), corpus.validation(run.data, run.training)
    vocab, s, rank, size = corpus.tokenizer.vocab_size, run.data.sequence_length, ps.index("dp"), ps.size("dp")
    stages = build_stages(run.model, run.pipeline, vocab, s, ps)
    describe(stages, ps, corpus, console.say)
    memory = MemoryReport(stages, ps, say=console.say)
    shard, optimizer = build_sharded(stages, run.data_parallel, run.optimizer, ps, memory)
    executor = build_executor(stages, run.pipeline, run.training, ps, shard)
    memory.watch(executor)
    checkpoints = Checkpoints(run.checkpoint, optimizer, ps, run.data, run.training, console.say)
    start, output, here = checkpoints.resume(), Path(run.training.output), moved_to(ps.device)
    log = MetricsLog(output if ps.rank == 0 else None, start)

    def validate() -> float:
        rows = valid.sequential(run.training.global_batch_size, rank, size)
        return evaluate_bits_per_byte(executor, map(here, rows), corpus.valid_bytes)

    with console, checkpoints:
        first = train(
            executor,
            optimizer,
            lambda step: here(batches.batch(step, rank, size)),
            run.training,
            flops_per_token=flops_per_token(run.model.transformer(), vocab, s),
            log=log,
            say=console.say,
            every_step=console.every_step if console.bar else None,
            validate=validate,
            checkpoints=checkpoints,
            start=start,
        )
    if checkpoints.stopped:
        return
    steps, bits = last_step(executor), validate()
    prompt = corpus.tokenizer.encode("def main():\n")[: s // 2 or 1]
    tokens = generate(stages[min(stages)], prompt, new_tokens=100, temperature=0.7, executor=executor)
    if ps.rank != 0:
        return
    tell(output, log.records, corpus, bits, steps, corpus.tokenizer.decode(tokens), console.say)
    for line in comparisons(
        first if start == 0 else None, log.records, run.model, run.data, run.training, batches, vocab
    ):
        console.say(line)


if __name__ == "__main__":
    run = tyro.cli(Run, description=__doc__)
    try:
        parts = run.model, run.parallel, run.data, run.training, run.pipeline, run.checkpoint
        layout = check_run(*parts, run.data_parallel, run.optimizer, world_size=int(os.environ.get("WORLD_SIZE", 1)))
        with parallel_state.launch(run.device) as device:
            pretrain(run, ParallelState.build(layout, device=device))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
