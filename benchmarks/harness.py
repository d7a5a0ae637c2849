"""Fair comparisons: A B A B in one process, warmed up, median of the ratios with their range, one JSON line."""

import argparse
import gc
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass
class Ratio:
    """Seconds of two sides that took turns, and how many times faster the first is."""

    ours: list
    peer: list

    @property
    def each(self):
        return [p / o for o, p in zip(self.ours, self.peer, strict=True)]

    @property
    def median(self):
        return statistics.median(self.each)

    def row(self, name):
        low, high = min(self.each), max(self.each)
        ours, peer = statistics.median(self.ours) * 1e3, statistics.median(self.peer) * 1e3
        return (
            f"{name:44s} ours {ours:8.1f} ms   peer {peer:8.1f} ms   "
            f"ratio {self.median:5.2f}  ({low:.2f} .. {high:.2f}, {len(self.each)} pairs)"
        )


def take_turns(ours, peer, *, pairs, warmup=3, before=lambda: None):
    """Time `ours` and `peer` in pairs; each pair starts with the other side, so that drift hits both alike.

    A side with a method `prepare` is prepared before each call, outside of its time.
    """
    prepare = {side: getattr(side, "prepare", lambda: None) for side in (ours, peer)}
    for _ in range(warmup):
        for side in (ours, peer):
            prepare[side]()
            side()
    gc.collect()
    gc.disable()
    times = {ours: [], peer: []}
    try:
        for pair in range(pairs):
            for side in (ours, peer) if pair % 2 == 0 else (peer, ours):
                prepare[side]()
                before()
                begin = time.perf_counter()
                side()
                before()
                times[side].append(time.perf_counter() - begin)
    finally:
        gc.enable()
    return Ratio(times[ours], times[peer])


def timed(step, together=True):
    """Seconds from the first rank's start to the last one's end; a machine's processes share the clock."""
    if together:
        dist.barrier()
    begin = time.perf_counter()
    step()
    mine = (begin, time.perf_counter())
    ends = [mine]
    if together:  # a barrier inside the clock would take milliseconds
        ends = [None] * dist.get_world_size()
        dist.all_gather_object(ends, mine)
    return max(end for _, end in ends) - min(begin for begin, _ in ends)


def in_turns(first, second, pairs):
    """Seconds of two steps that take turns, after two warm-ups each; every rank calls it alike."""
    for step in (first, second, first, second):
        step()
    times = {0: [], 1: []}
    gc.collect()
    gc.disable()
    for pair in range(pairs):
        for side in (0, 1) if pair % 2 == 0 else (1, 0):
            times[side].append(timed((first, second)[side]))
    gc.enable()
    return Ratio(times[0], times[1])


def spread(values):
    return f"{statistics.median(values):.4f} ({min(values):.4f} .. {max(values):.4f})"


def cpu():
    """CPU seconds of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def alternating(sides, pairs, total=lambda seconds: seconds, before=lambda: None):
    """name -> [(CPU seconds, seconds)] of calls that take turns, after one of each.

    A side with a method `inside` is called inside of that context, which is entered and left outside of its time.
    """
    times = {name: [] for name in sides}
    for turn in range(pairs + 1):
        for name in sides if turn % 2 else reversed(sides):
            with getattr(sides[name], "inside", nullcontext)():
                before()
                begin, start = time.perf_counter(), cpu()
                sides[name]()
                used = total(cpu() - start), time.perf_counter() - begin
            if turn:
                times[name].append(used)
    return times


def median(times, name, clock=0):
    """Of a side: its CPU seconds, or (clock=1) its seconds."""
    return statistics.median(used[clock] for used in times[name])


def compare_pairs(found, key, times, over, under, say=print, clock=0):
    """found[key]: the median over the pairs of `over`'s CPU seconds / `under`'s (clock=1: of time); prints both."""
    texts = []
    for number, what in enumerate(("CPU seconds", "time")):
        each = [a[number] / b[number] for a, b in zip(times[over], times[under], strict=True)]
        texts.append(
            f"{what} {statistics.median(each):.3f} ({min(each):.3f} .. {max(each):.3f}, {len(each)} pairs)"
        )
        if number == clock:
            found[key] = statistics.median(each)
    say(f"{key:36s} {'; '.join(texts)}")


def total(seconds):
    """The sum over the ranks."""
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value)
    return value.item()


def on_ranks(work, world, *options):
    """What rank 0 of `work(rank, world, store, *options, result)` writes."""
    with tempfile.TemporaryDirectory() as directory:
        result = os.path.join(directory, "result")
        mp.spawn(work, (world, os.path.join(directory, "store"), *options, result), nprocs=world)
        with open(result) as file:
            return json.load(file)


def matmul_flops(dtype, n=1024, rounds=60):
    """FLOP/s of a square matmul: what this machine can do at best in one process."""
    a, b = torch.randn(n, n).to(dtype), torch.randn(n, n).to(dtype)
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        torch.mm(a, b)
        times.append(time.perf_counter() - begin)
    return 2 * n**3 / statistics.median(times[5:])


def matmul_dtypes():
    """short name -> dtype of the whole steps: bf16 only where its matmul is not slower than float32's."""
    rates = {name: matmul_flops(dtype, n=512, rounds=12) for name, dtype in DTYPES.items()}
    if rates["bf16"] >= rates["fp32"]:
        return DTYPES
    print(
        f"bf16 steps are left out: this processor multiplies bf16 at {rates['bf16'] / 1e9:.1f} GFLOP/s, float32 at "
        f"{rates['fp32'] / 1e9:.1f}"
    )
    return {"fp32": torch.float32}


def count_calls(step):
    """Python function calls of one warm step on this rank (`sys.setprofile` 'call' events)."""
    count = 0

    def profile(frame, event, arg):
        nonlocal count
        count += event == "call"

    for _ in range(2):  # the second forward still compares what the ranks hold
        step()
    gc.collect()  # models that nobody uses any more, whose hooks every optimizer's step would call
    sys.setprofile(profile)
    step()
    sys.setprofile(None)
    return count


def kernel_seconds(step, rounds=3):
    """Seconds of a step inside matmul and attention kernels, which both sides call alike (by torch's profiler)."""
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(rounds):
            step()
    names = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_dot_product_flash")
    return (
        sum(e.self_cpu_time_total for e in profile.key_averages() if e.key.startswith(names))
        / rounds
        / 1e6
    )


def flops_per_token(shape):
    """Forward and backward matmul FLOPs per token, causal attention counted as half."""
    d = shape.hidden // shape.heads
    projections = (
        2 * shape.hidden**2 + 2 * shape.hidden * d * shape.kv_heads + 3 * shape.hidden * shape.ffn
    )
    return 6 * (
        shape.layers * (projections + shape.seq * shape.hidden) + shape.hidden * shape.vocab
    )


def fused_adamw(model, lr=3e-4):
    """The same optimizer for every side. Fused AdamW refuses to mix DTensor and Tensor: one group per type."""
    kinds = {}
    for p in model.parameters():
        kinds.setdefault(type(p.data), []).append(p)
    return torch.optim.AdamW([{"params": group} for group in kinds.values()], lr=lr, fused=True)


def arguments(doc):
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a small model and few pairs: seconds, for a smoke test",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the ratios there")
    return parser


def report(result, path=None):
    """The last line: one JSON object of the ratios."""
    line = json.dumps({key: round(value, 4) for key, value in result.items()})
    if path:
        with open(path, "w") as f:
            f.write(line + "\n")
    print(line, flush=True)


def run_parts(doc, *parts):
    """The command of a benchmark: each part is called with (quick, found) and adds its figures to found."""
    parser = arguments(doc)
    by_name = {part.__name__: part for part in parts}
    parser.add_argument("--parts", nargs="+", choices=by_name, default=list(by_name))
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for name in options.parts:
        by_name[name](options.quick, found)
    report(found, options.json)
