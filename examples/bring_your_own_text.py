"""From a folder of text to a model that writes like it, in one process or under torchrun.

    python examples/bring_your_own_text.py FOLDER_OR_FILES... [--steps 200] [--output runs/own_text]

The same in two commands, for every layout: `python -m core.datasets.prepare`, then `examples/pretrain_gpt.py`.
"""

import os
import sys
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import tyro

from core import parallel_state
from core.datasets import load_tokenizer
from core.datasets.prepare import main as prepare
from core.training import initialize
from core.training.log.console import errors_as_one_line


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What this script is told."""

    inputs: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Folders and files: .txt, .md, .py, .jsonl, also .gz and .zst."""
    output: str = "runs/own_text"
    """Directory of what it makes."""
    documents: Literal["file", "paragraph", "line"] = "file"
    """Where a document ends; a single file needs paragraphs or lines, or nothing is left to validate on."""
    vocab_size: int = 1024
    """Tokens of the tokenizer that is trained on this text."""
    steps: int = 200
    """Updates of the model."""
    sequence_length: int = 128
    """Tokens per sample."""


def main(told: Arguments) -> list[float]:
    """The losses of all steps, the same on every rank."""
    prefix = f"{told.output}/text"
    if int(os.environ.get("RANK", 0)) == 0:
        words = ["--input", *told.inputs, "--output", prefix, "--documents", told.documents]
        if prepare([*words, "--train-tokenizer", str(told.vocab_size)]) != 0:
            sys.exit(1)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # the others find the files ready
    model, _, scheduler, loader = initialize(
        config={
            "data": {"train": prefix, "sequence_length": told.sequence_length},
            "model": {"num_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "ffn_hidden_size": 384},
            "training": {"train_steps": told.steps, "global_batch_size": 8, "micro_batch_size": 4},
            "optimizer": {"lr": 3e-3, "lr_schedule": "cosine", "lr_warmup_fraction": 0.05},
        }
    )
    assert loader is not None
    losses = []
    for batch in loader:
        losses.append(float(model.train_step(batch).loss))
        if model.parallel.rank == 0 and (model.global_steps == 1 or model.global_steps % 20 == 0):
            step, rate = model.global_steps, scheduler.get_last_lr()[0]
            print(f"step {step:4d}/{told.steps}  loss {losses[-1]:.3f}  lr {rate:.2e}")
    tokenizer = load_tokenizer(f"{prefix}.tokenizer.json")
    start = loader.batches.batch(0)["tokens"][0, :16].tolist()
    written = model.generate(start, 60, temperature=0.7)
    if model.parallel.rank == 0:
        print(f"--- a sample ---\n{tokenizer.decode(written)}")
    return losses


if __name__ == "__main__":
    told = tyro.cli(Arguments, description=__doc__)
    with errors_as_one_line():
        if not told.inputs:
            raise ValueError("0 folders or files given, at least 1 is needed: bring_your_own_text.py FOLDER")
        with parallel_state.launch(), errors_as_one_line():
            main(told)
