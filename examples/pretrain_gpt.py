"""Pretrain a GPT on real text, over tensor and data parallel ranks, on CPUs or accelerators.

    python examples/pretrain_gpt.py --help      # one process
    torchrun --standalone --nproc-per-node 4 examples/pretrain_gpt.py --parallel.tensor 2 --model.num-layers 8

Without data of your own it reads the interpreter's standard library.
"""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import tyro
from torch import Tensor

from core import parallel_state
from core.autograd import apply_recompute
from core.data_parallel import PerParameterGradSync
from core.models.gpt import GPTModel
from core.optimizer import AdamW, OptimizerConfig
from core.parallel_state import ParallelConfig, ParallelState
from core.pipeline import SingleStage
from core.training import DataConfig, ModelConfig, TrainingConfig, check_run, evaluate_bits_per_byte, train
from core.training.compare import first_step_alone
from core.training.console import Console
from core.training.data import Corpus, open_corpus
from core.training.generate import generate
from core.training.metrics import MetricsLog, flops_per_token
from core.training.report import write_report

STEPS = 260


@dataclass(frozen=True)
class Run:
    """Everything a run is told."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=lambda: TrainingConfig(train_steps=STEPS))
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(
            lr=2e-3, min_lr=2e-4, lr_schedule="cosine", lr_warmup_steps=20, lr_decay_steps=STEPS, weight_decay=0.1
        )
    )
    device: str | None = None  # cpu, cuda, npu, xpu; default: the accelerator if there is one


def describe(model: GPTModel, corpus: Corpus, console: Console) -> None:
    """Who holds what."""
    ps = model.parallel
    console.say(f"{ps.config.world_size} ranks on {ps.device.type}, sequence parallel: {ps.config.sequence_parallel}")
    console.say(ps.grid.table())
    here = sum(p.numel() for p in model.parameters())
    console.say(f"parameters: {model.num_parameters():,} in all, {here:,} on each rank (with padding)")
    console.say(f"text: {corpus.train.num_tokens:,} tokens to train on, {corpus.valid.num_tokens:,} to validate")


def pretrain(run: Run, ps: ParallelState) -> None:
    """Train, validate, sample, report, and check the first step against one process."""
    console = Console(ps.rank, run.training.train_steps)
    corpus = open_corpus(run.data, ps)
    batches, valid = corpus.batches(run.data, run.training), corpus.validation(run.data, run.training)
    config, vocab, s = run.model.transformer(), corpus.tokenizer.vocab_size, run.data.sequence_length
    tied, rank, size = run.model.tie_embeddings, ps.index("dp"), ps.size("dp")
    model = GPTModel(
        config, run.model.spec(), vocab, s, share_embeddings_and_output_weights=tied, parallel=ps, seed=run.model.seed
    )
    apply_recompute(model, run.training.recompute, stage=model.stage)
    sync = PerParameterGradSync(model, ps)
    optimizer = AdamW(model, ps, run.optimizer, grad_sync=sync)
    m = run.training.global_batch_size // size // run.training.micro_batch_size
    executor = SingleStage(model, ps=ps, num_microbatches=m, grad_sync=sync, seed=run.training.seed)
    describe(model, corpus, console)
    output = Path(run.training.output)
    log = MetricsLog(output if ps.rank == 0 else None)

    def here(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(ps.device) for name, tensor in batch.items()}

    def validate() -> float:
        rows = valid.sequential(run.training.global_batch_size, rank, size)
        return evaluate_bits_per_byte(executor, map(here, rows), corpus.valid_bytes)

    with console:
        first = train(
            executor,
            optimizer,
            lambda step: here(batches.batch(step, rank, size)),
            run.training,
            flops_per_token=flops_per_token(config, vocab, s),
            log=log,
            say=console.say,
            every_step=console.every_step if console.bar else None,
            validate=validate,
        )
    bits = validate()
    prompt = corpus.tokenizer.encode("def main():\n")[: max(1, s // 2)]
    sample = corpus.tokenizer.decode(generate(model, prompt, new_tokens=100, temperature=0.7))
    if ps.rank != 0:
        return
    lines = {"unigram": corpus.unigram, "gzip -9": corpus.gzip, "validation": bits}
    write_report(output / "report.png", log.records, bytes_per_token=corpus.bytes_per_token, baselines=lines)
    console.say(f"--- a sample ---\n{sample}\n----------------")
    console.say("bits per byte: " + ", ".join(f"{name} {value:.3f}" for name, value in lines.items()))
    console.say(f"written: {output / 'metrics.jsonl'}, {output / 'report.png'}")
    console.say(first.against(first_step_alone(run.model, run.data, run.training, batches, vocab)))


if __name__ == "__main__":
    run = tyro.cli(Run, description=__doc__)
    try:
        world = int(os.environ.get("WORLD_SIZE", 1))
        layout = check_run(run.model, run.parallel, run.data, run.training, world_size=world)
        with parallel_state.launch(run.device) as device:
            pretrain(run, ParallelState.build(layout, device=device))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
