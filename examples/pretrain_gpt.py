"""Pretrain a GPT on real text, over tensor and data parallel ranks, on CPUs or accelerators.

    python examples/pretrain_gpt.py                                             # one process
    torchrun --standalone --nproc-per-node 4 examples/pretrain_gpt.py --parallel.tensor 2
    ... --parallel.sequence-parallel --model.hidden-size 512 --optimizer.lr 1e-3 --help

Without data of your own it reads the standard library of the running interpreter.
"""

import os
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import tyro

from core import parallel_state
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


@dataclass(frozen=True)
class Run:
    """Everything a run is told."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(lr=3e-3, min_lr=3e-4, lr_warmup_steps=20, weight_decay=0.1)
    )
    device: str | None = None  # cpu, cuda, npu, xpu; default: the accelerator if there is one
    long: bool = False  # six times the steps: ends below gzip


def describe(model: GPTModel, ps: ParallelState, corpus: Corpus, console: Console) -> None:
    console.say(f"ranks {ps.config.world_size}, sequence parallel {ps.config.sequence_parallel}, on {ps.device}")
    console.say(ps.grid.table())
    here = sum(p.numel() for p in model.parameters())
    console.say(f"parameters: {model.num_parameters():,} in all, {here:,} on each rank (padding included)")
    console.say(
        f"text: {corpus.train.num_tokens:,} training tokens; validation {corpus.valid.num_tokens:,} tokens, "
        f"{corpus.valid_bytes:,} bytes, of files never trained on"
    )


def pretrain(run: Run, ps: ParallelState) -> None:
    console = Console(ps.rank, run.training.train_steps)
    corpus = open_corpus(run.data, ps)
    batches = corpus.batches(run.data, run.training)
    vocab, tied, s = corpus.tokenizer.vocab_size, run.model.tie_embeddings, run.data.sequence_length
    config = run.model.transformer()
    model = GPTModel(
        config, run.model.spec(), vocab, s, share_embeddings_and_output_weights=tied, parallel=ps, seed=run.model.seed
    )
    sync = PerParameterGradSync(model, ps)
    optimizer = AdamW(model, ps, run.optimizer, grad_sync=sync)
    rank, size = ps.index("dp"), ps.size("dp")
    rows = run.training.global_batch_size // size
    executor = SingleStage(
        model, ps=ps, num_microbatches=rows // run.training.micro_batch_size, grad_sync=sync, seed=run.training.seed
    )
    describe(model, ps, corpus, console)

    output = Path(run.training.output)
    log = MetricsLog(output if ps.rank == 0 else None)

    def on_device(batch: dict) -> dict:
        return {name: tensor.to(ps.device) for name, tensor in batch.items()}

    with console:
        first = train(
            executor,
            optimizer,
            lambda step: on_device(batches.batch(step, rank, size)),
            run.training,
            flops_per_token=flops_per_token(config, vocab, s),
            log=log,
            say=console.say,
            every_step=console.every_step if console.bar else None,
        )

    validation = (on_device(b) for b in batches_of_validation(run, corpus, rank, size))
    bits = evaluate_bits_per_byte(executor, validation, corpus.valid_bytes)
    prompt = "def main():\n"
    text = corpus.tokenizer.decode(generate(model, corpus.tokenizer.encode(prompt), new_tokens=100, temperature=0.7))
    if ps.rank != 0:
        return
    baselines = {"unigram": corpus.unigram, "gzip -9": corpus.gzip, "validation": bits}
    write_report(output / "report.png", log.records, bytes_per_token=corpus.bytes_per_token, baselines=baselines)
    console.say(f"--- a sample ---\n{text}\n----------------")
    console.say(f"validation {bits:.3f} bits per byte | unigram {corpus.unigram:.3f} | gzip -9 {corpus.gzip:.3f}")
    console.say(f"written: {output / 'metrics.jsonl'}, {output / 'report.png'}")
    alone = first_step_alone(run.model, run.data, run.training, batches, vocab)
    assert first is not None
    console.say(
        f"first step against one process: loss {first.loss:.6f} and {alone.loss:.6f}, grad norm {first.grad_norm:.6f} "
        f"and {alone.grad_norm:.6f}, max |difference| "
        f"{max(abs(first.loss - alone.loss), abs(first.grad_norm - alone.grad_norm)):.2e}"
    )
