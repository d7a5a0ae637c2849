"""Data: `prepare` beside the tokenizer alone, the loader beside memcpy, a first batch out of ten billion tokens.

    OMP_NUM_THREADS=1 python -m benchmarks.data [--quick] [--json FILE]

`prepare` takes a directory of the standard library's sources to a pair of files; its peer encodes the same texts,
already in memory, in one call of `encode_batch_fast` with as many threads as there are cores, and writes nothing.
First batches and imports are timed in processes of their own.
"""

import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.harness import arguments, report, take_turns
from core.datasets import (
    GPTBatches,
    TokenFile,
    TokenFileWriter,
    read_texts,
    standard_library,
    train_tokenizer,
)
from core.datasets.prepare import main as prepare

HEADER = struct.Struct("<9sQBQQ")


class Table:
    """Prints a row as soon as it is known; keeps the figures."""

    def __init__(self):
        self.result = {}

    def row(self, key, value, text):
        print(f"{key:28s} {value:10.3f}   {text}", flush=True)
        self.result[key] = value


def measure_prepare(table, directory, pairs, copies):
    sources = standard_library()
    texts, _ = read_texts(sources.root, sources.names)
    tokenizer = train_tokenizer(texts[::4], 4096)
    tokenizer.save(directory / "tokenizer.json")
    corpus = directory / "texts"
    for copy in range(copies):
        for number, text in enumerate(texts):
            path = corpus / str(copy) / f"{number}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())
    everything = texts * copies
    megabytes = sum(len(text.encode()) for text in everything) / 1e6
    words = [
        "--input",
        str(corpus),
        "--output",
        str(directory / "made"),
        "--tokenizer",
        str(directory / "tokenizer.json"),
    ]
    os.environ["TOKENIZERS_PARALLELISM"] = "true"

    def ours():
        assert prepare(words) == 0

    def peer():
        tokenizer._inner.encode_batch_fast(everything, add_special_tokens=False)

    ratio = take_turns(ours, peer, pairs=pairs, warmup=1)
    tokens = sum(
        len(ids) + 1 for ids in tokenizer.encode_batch(texts) if ids
    )  # empty documents are skipped
    assert TokenFile(directory / "made").num_tokens == copies * tokens
    rates = [megabytes / statistics.median(side) for side in (ratio.ours, ratio.peer)]
    print(ratio.row(f"prepare, {megabytes:.0f} MB"))
    table.row("prepare_mb_per_s", rates[0], f"MB/s, encode_batch_fast alone {rates[1]:.1f}")
    table.row("prepare_over_encode", ratio.median, "of its rate (goal 0.7)")


def measure_loader(table, directory, pairs, tokens):
    with TokenFileWriter(directory / "random", vocab_size=50_000) as writer:
        writer.add_document(np.random.default_rng(0).integers(0, 50_000, tokens, dtype=np.uint16))
    batches = GPTBatches(
        token_file=TokenFile(directory / "random"),
        sequence_length=2048,
        global_batch_size=8,
        seed=1,
    )
    rounds = min(500, batches.num_samples // 8)
    source = np.random.default_rng(0).integers(0, 50_000, (2, 8, 2048))
    target = np.empty_like(source)

    def ours():
        for step in range(rounds):
            batches.batch(step)

    def copies():
        for _ in range(rounds):
            np.copyto(target, source)

    ratio = take_turns(ours, copies, pairs=pairs)
    per_second = rounds * 8 * 2048 / statistics.median(ratio.ours)
    table.row("loader_tokens_per_s", per_second / 1e6, "million tokens/s on one core (goal 50)")
    table.row(
        "loader_fraction_of_memcpy", ratio.median, "of a memcpy of the same int64 tokens and labels"
    )


def sparse(prefix, tokens, documents):
    """A pair whose `.bin` is a hole; documents of equal length."""
    length = tokens // documents
    with open(f"{prefix}.idx", "wb") as file:
        file.write(HEADER.pack(b"MMIDIDX\x00\x00", 1, 8, documents, documents + 1))
        np.full(documents, length, "<i4").tofile(file)
        (np.arange(documents, dtype="<i8") * (2 * length)).tofile(file)
        np.arange(documents + 1, dtype="<i8").tofile(file)
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(2 * length * documents)


FIRST = """
import sys, time
from core.datasets import GPTBatches, TokenFile, split_documents
begin = time.perf_counter()
train, valid, _ = split_documents(TokenFile(sys.argv[1]), "969,30,1")
batch = GPTBatches(token_file=train, sequence_length=2048, global_batch_size=8, seed=1).batch(12345)
print(1e3 * (time.perf_counter() - begin))
assert batch["tokens"].shape == (8, 2048) and train.num_tokens > 9.6e9 * {scale}
"""
IMPORT = """
import time
begin = time.perf_counter()
import torch
middle = time.perf_counter()
{statement}
print(time.perf_counter() - middle)
"""

IMPORTS = {  # names are loaded at first use, so what is used is named
    "core": "import core",
    "model": "from core.models.gpt import GPTModel, llama_spec; from core.parallel_state import ParallelState",
    "configuration": "from core.training import RunConfig",
    "training": "from core.training import initialize",
}


def alone(code, *words):
    """The number that a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def median_of(times):
    return statistics.median(
        times
    ), f"({min(times):.3f} .. {max(times):.3f}, {len(times)} processes)"


def measure_first_batch(table, directory, rounds, scale):
    sparse(directory / "large", int(10e9 * scale), int(10e6 * scale))
    code = FIRST.replace("{scale}", str(scale))
    times = [alone(code, str(directory / "large")) for _ in range(rounds + 1)][
        1:
    ]  # the first one warms the disk
    middle, spread = median_of(times)
    table.row(
        "first_batch_ms",
        middle,
        f"ms {spread}; {scale * 10:g} G tokens, {scale * 10:g} M documents (goal 50)",
    )


def measure_imports(table, rounds):
    for name, statement in IMPORTS.items():
        times = [alone(IMPORT.replace("{statement}", statement)) for _ in range(rounds + 1)][1:]
        middle, spread = median_of(times)
        table.row(
            f"import_{name}_s",
            middle,
            f"s beyond torch {spread} {'(goal 0.2)' if name == 'core' else ''}",
        )


def main():
    told = arguments(__doc__).parse_args()
    begin, table = time.perf_counter(), Table()
    pairs = 3 if told.quick else 7
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        measure_imports(table, pairs)
        measure_loader(table, directory, pairs, 4_000_000 if told.quick else 100_000_000)
        measure_first_batch(table, directory, pairs, 0.01 if told.quick else 1)
        measure_prepare(table, directory, 2 if told.quick else 5, 1 if told.quick else 6)
    print(f"{time.perf_counter() - begin:.0f} s in all")
    report(table.result, told.json)


if __name__ == "__main__":
    main()
