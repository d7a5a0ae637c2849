"""Hugging Face folders in and out beside copies of as many bytes; generation beside transformers'.

    OMP_NUM_THREADS=1 python -m benchmarks.huggingface [--parts large decoding]

import_vs_copy, export_vs_copy: time over reading and writing as many bytes (fsynced), a model of 1.7 GB; goal <= 1.5.
import_vs_copy_small, export_vs_copy_small: of 0.16 GB, where what does not grow with the bytes shows (0.2 s).
extra_rss_mib: peak of a process that loads a model of 1.7 GB, built on meta, beyond its parameters; goal <= 256.
decode_vs_hf_*: tokens per second over those of `transformers.generate`, both with their caches; goal >= 1.
decode_vs_uncached: tokens per second over those of the full prefix for each token, 256 new tokens; goal >= 8.
"""

import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
import transformers

from benchmarks.checkpoint_sides import counter, reset_peak
from benchmarks.harness import Ratio, arguments, report, take_turns
from core.models.gpt import GPTModel
from core.models.huggingface import from_huggingface, load_huggingface
from core.models.huggingface.exporting import export_huggingface
from core.models.huggingface.importing import import_huggingface
from core.parallel_state import ParallelState
from core.training.generate import generate_batch

PARTS = ("small", "large", "memory", "decoding")


def config(quick):
    shape = {
        "hidden_size": 128,
        "intermediate_size": 344,
        "num_hidden_layers": 2,
        "vocab_size": 1000,
    }
    if not quick:
        shape = {
            "hidden_size": 512,
            "intermediate_size": 1408,
            "num_hidden_layers": 8,
            "vocab_size": 16000,
        }
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 1024}
    return transformers.LlamaConfig(**shape, **heads, eos_token_id=None, bos_token_id=None)


def large_folder(path, quick):
    shape = {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 2 if quick else 32,
    }
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **heads))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)  # pages of zeros are cheaper to write
    model.save_pretrained(path)


class Writes:
    """A side that makes a directory anew each time; the last one is removed outside of its time."""

    def __init__(self, target, write):
        self.target, self.write = target, write
        self.cpu_seconds = []  # which other work on the machine does not stretch

    def prepare(self):
        shutil.rmtree(self.target, ignore_errors=True)

    def __call__(self):
        begin = time.process_time()
        self.write(self.target)
        self.cpu_seconds.append(time.process_time() - begin)


def copy(source, target):
    """Reads and writes every file, and makes it durable, as a checkpoint is."""
    target.mkdir()
    for path in source.iterdir():
        with open(path, "rb") as read, open(target / path.name, "wb") as write:
            shutil.copyfileobj(read, write, 8 << 20)
            write.flush()
            os.fsync(write.fileno())


def folders(result, folder, suffix, pairs):
    path = folder.parent
    checkpoint = path / "ckpt"
    import_huggingface(folder, str(checkpoint))
    sides = {
        f"import_vs_copy{suffix}": Writes(
            path / "in", lambda target: import_huggingface(folder, str(target))
        ),
        f"export_vs_copy{suffix}": Writes(
            path / "out", lambda target: export_huggingface(checkpoint, target, folder)
        ),
    }
    for key, ours in sides.items():
        peer = Writes(path / "copy", lambda target: copy(folder, target))
        turns = take_turns(ours, peer, pairs=pairs, warmup=1)
        slower = Ratio(turns.peer, turns.ours)  # ours over the copy
        print(slower.row(key).replace("ours", "copy").replace("peer", "ours"), flush=True)
        result[key] = statistics.median(slower.each)
        cpu, of_copy = (statistics.median(side.cpu_seconds[1:]) for side in (ours, peer))
        print(f"{key:44s} on the processor: ours {cpu:.3f} s, copy {of_copy:.3f} s", flush=True)
        for side in (ours, peer):
            side.prepare()
    shutil.rmtree(checkpoint)


def _loaded(folder, pipe):
    """Peak memory of this process beyond what it holds before, and beyond the parameters."""
    arguments = from_huggingface(folder).arguments()
    with torch.device("meta"):
        model = GPTModel(**arguments, parallel=ParallelState.single("cpu"), seed=0)
    reset_peak()  # imports had one of their own
    before = counter("status", "VmRSS")
    model.to_empty(device="cpu")
    load_huggingface(model, folder)
    pipe.send(
        (counter("status", "VmHWM") - before) / 2**10
        - sum(p.nbytes for p in model.parameters()) / 2**20
    )


def memory(result, folder):
    # a process of its own, where nothing else was loaded before
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_loaded, args=(folder, there))
    process.start()
    there.close()  # so that a child that fails ends the waiting
    result["extra_rss_mib"] = here.recv()
    process.join()
    print(f"extra_rss_mib {result['extra_rss_mib']:.0f} MiB beyond the parameters", flush=True)


def decoding(result, quick, pairs):
    prompt, new_tokens = [[1 + i % 900 for i in range(32)]], 32 if quick else 256
    for dtype, short in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        torch.manual_seed(0)
        theirs = transformers.LlamaForCausalLM(config(quick)).to(dtype).eval()
        arguments = from_huggingface(theirs.config, params_dtype=dtype).arguments()
        ours = GPTModel(**arguments, parallel=ParallelState.single("cpu")).eval()
        load_huggingface(ours, theirs.state_dict())
        options = transformers.GenerationConfig(
            do_sample=False, max_new_tokens=new_tokens, eos_token_id=None, pad_token_id=0
        )
        tokens = torch.tensor(prompt)

        def cached(ours=ours):
            generate_batch(ours, prompt, new_tokens=new_tokens)

        def uncached(ours=ours):
            generate_batch(ours, prompt, new_tokens=new_tokens, cache=False)

        def huggingface(theirs=theirs, options=options, tokens=tokens):
            theirs.generate(tokens, generation_config=options, use_cache=True)

        turns = take_turns(cached, huggingface, pairs=pairs, warmup=1)
        print(turns.row(f"decode_vs_hf_{short}"), flush=True)
        result[f"decode_vs_hf_{short}"] = turns.median
        if dtype == torch.float32:
            turns = take_turns(cached, uncached, pairs=pairs, warmup=0)
            print(turns.row("decode_vs_uncached"), flush=True)
            result["decode_vs_uncached"] = turns.median


def main():
    parser = arguments(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    parts = options.parts
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    result, pairs = {}, 2 if options.quick else 7
    with tempfile.TemporaryDirectory() as path:
        small, large = Path(path, "small"), Path(path, "large")
        if "small" in parts:
            transformers.LlamaForCausalLM(config(options.quick)).save_pretrained(small / "hf")
            folders(result, small / "hf", "_small", pairs)
        if {"large", "memory"} & set(parts):
            large_folder(large / "hf", options.quick)
        if "large" in parts:
            folders(result, large / "hf", "", pairs)
        if "memory" in parts:
            memory(result, large / "hf")
    if "decoding" in parts:
        decoding(result, options.quick, pairs)
    report(result, options.json)


if __name__ == "__main__":
    main()
