"""From a folder of text to a model that writes like it, in one process or under torchrun.

    python examples/bring_your_own_text.py FOLDER_OR_FILES... [--steps 200] [--output runs/own_text]

The same in two commands, for every layout: `python -m core.datasets.prepare`, then `python -m core.pretrain`.
"""

import argparse
import os
import sys

import torch

from core import parallel_state
from core.datasets import load_tokenizer
from core.datasets.prepare import main as prepare
from core.training import initialize
from core.training.log.console import errors_as_one_line


def arguments() -> argparse.Namespace:
    """What this script is told."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("inputs", nargs="*", help="folders and files: .txt, .md, .py, .jsonl, also .gz and .zst")
    add("--output", default="runs/own_text", help="directory of what it makes")
    add(
        "--documents",
        choices=("file", "paragraph", "line"),
        default="file",
        help="where a document ends; a single file needs paragraphs or lines, or nothing is left to validate on",
    )
    add(
        "--vocab-size",
        type=int,
        default=1024,
        help="tokens of the tokenizer that is trained on this text",
    )
    add("--steps", type=int, default=200, help="updates of the model")
    add("--sequence-length", type=int, default=128, help="tokens per sample")
    return parser.parse_args()


def main(told: argparse.Namespace) -> list[float]:
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
            "model": {
                "num_layers": 2,
                "hidden_size": 128,
                "num_attention_heads": 4,
                "ffn_hidden_size": 384,
            },
            "training": {"train_steps": told.steps, "global_batch_size": 8, "micro_batch_size": 4},
            "optimizer": {"lr": 3e-3, "lr_schedule": "cosine", "lr_warmup_fraction": 0.05},
        }
    )
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
        begins, goes_on = tokenizer.decode(start), tokenizer.decode(written[len(start) :])
        print(
            f"--- a sample: the text begins ---\n{begins}\n--- and the model goes on ---\n{goes_on}\n---"
        )
    return losses


if __name__ == "__main__":
    told = arguments()
    with errors_as_one_line():
        if not told.inputs:
            raise ValueError(
                "0 folders or files given, at least 1 is needed: bring_your_own_text.py FOLDER"
            )
        with parallel_state.launch(), errors_as_one_line():
            main(told)
