"""What a pipelined step cannot be faster than: its kernels and messages, bare, in the places of its schedule.

The bound has the schedule's bubble in it: the player's time of the whole step, where an action costs what its matmul
and attention kernels cost when they are called bare on both ranks in the schedule's order, and a message what a bare
exchange of its bytes costs. The optimizer, norms, activations and the loss are in the step and not in the bound.
"""

import statistics
import time
from contextlib import contextmanager

import torch
import torch.distributed as dist

from benchmarks.bound import KERNELS, Kernels
from benchmarks.harness import fused_adamw, spread, timed
from benchmarks.llama import Shape
from core.models.gpt import gpt_stages, llama_config, llama_spec
from core.parallel_state.collectives import all_gather_objects
from core.pipeline import Costs, Pipeline, play
from core.pipeline.schedule.lower import plan
from core.training import next_token_loss

METHODS = {"F": "forward", "R": "recompute", "I": "input_gradients", "W": "weight_gradients"}
MICROBATCHES = 8
ROUNDS = 20  # of a message there and back


@contextmanager
def kernels_of_actions(stages, microbatch):
    """(kind, stage) -> the kernels of that action of one microbatch, of the steps inside."""
    found = {}

    def recording(method, key):
        def run(number, *args, **kwargs):
            if number != microbatch:
                return method(number, *args, **kwargs)
            with Kernels() as found[key]:
                return method(number, *args, **kwargs)

        return run

    for index, stage in stages.items():
        for kind, name in METHODS.items():
            setattr(stage, name, recording(getattr(stage, name), (kind, index)))
    try:
        yield found
    finally:
        for stage in stages.values():
            for name in METHODS.values():
                delattr(stage, name)


class BareStep:
    """A schedule's orders with bare kernels and bare messages of `size` bytes; over two ranks."""

    def __init__(self, schedule, rank, kernels, size):
        self.order, self.kernels, self.peer = plan(schedule, rank).order, kernels, 1 - rank
        self._buffer = torch.zeros(size, dtype=torch.uint8)
        self.seconds = {}  # (kind, stage) -> of each microbatch, in the last call

    def __call__(self):
        tags = {"F": 0, "B": len(self.order)}
        receives, sends = {}, []
        for action in self.order:
            if action.kind.startswith("RECV"):
                tag = tags[action.kind[-1]] + action.microbatch
                receives[action] = dist.irecv(torch.empty_like(self._buffer), self.peer, tag=tag)
        self.seconds = {key: [] for key in self.kernels}
        for action in self.order:
            if action.kind in METHODS:
                begin = time.perf_counter()
                self.kernels[action.kind, action.stage].run()
                self.seconds[action.kind, action.stage].append(time.perf_counter() - begin)
            elif action in receives:
                receives[action].wait()
            elif action.kind.startswith("SEND"):
                sends.append(
                    dist.isend(
                        self._buffer, self.peer, tag=tags[action.kind[-1]] + action.microbatch
                    )
                )
        for work in sends:
            work.wait()


def message_seconds(rank, size):
    """Of one bare message of `size` bytes to the other one of two ranks: half of there and back, the median."""
    buffer, times = torch.zeros(size, dtype=torch.uint8), []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for sends in (rank == 0, rank == 1):
            work = dist.isend(buffer, 1 - rank) if sends else dist.irecv(buffer, 1 - rank)
            work.wait()
        times.append((time.perf_counter() - begin) / 2)
    return statistics.median(times)


def critical_path(schedule, seconds, message):
    """Seconds of the whole step, bubble included; seconds: (kind, stage) -> those of each microbatch."""
    costs = {"comm": message}
    for kind in "FIWR":
        costs[kind] = tuple(
            statistics.median(seconds.get((kind, stage), [0.0])) for stage in range(schedule.stages)
        )
    return play(schedule, Costs(**costs)).makespan


def gpt_step(ps, shape, rows, dtype):
    """(step, pipeline): 1F1B over the ranks of `ps`, `rows` sequences a microbatch, fused AdamW."""
    config = llama_config(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        ffn_hidden_size=shape.ffn,
        params_dtype=dtype,
    )
    placement = tuple(range(ps.size("pp")))
    stages = gpt_stages(
        config, llama_spec(), shape.vocab, shape.seq, placement=placement, parallel=ps, seed=1
    )
    pipeline = Pipeline(stages, ps=ps, schedule="1f1b", num_microbatches=MICROBATCHES)
    optimizer = fused_adamw(torch.nn.ModuleList(stages.values()))
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(shape.vocab, (rows * MICROBATCHES, shape.seq + 1), generator=generator)
    batch = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}

    def step():
        pipeline.step(batch, next_token_loss, loss_scale=1 / batch["tokens"].numel())
        optimizer.step()
        optimizer.zero_grad()

    return step, pipeline


def not_in_the_bound(step, rounds=3, most=8):
    """What takes most of this rank's step beside the kernels of the bound and waiting, by torch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(rounds):
            step()
    spent = {
        e.key: e.self_cpu_time_total / rounds / 1e3
        for e in profile.key_averages()
        if e.key.startswith("aten::") and not e.key.startswith(KERNELS)
    }
    largest = sorted(spent, key=spent.get, reverse=True)[:most]
    return ", ".join(f"{name.removeprefix('aten::')} {spent[name]:.1f}" for name in largest)


def over_bound(ps, quick, dtype, pairs, say):
    """Median over the pairs of a step's time over that of its bound, of a GPTModel on two ranks."""
    shape, rows = (Shape(hidden=128, ffn=352, seq=64, vocab=1024), 2) if quick else (Shape(), 2)
    step, pipeline = gpt_step(ps, shape, rows, dtype)
    for _ in range(2):
        step()
    with kernels_of_actions(pipeline.stages, microbatch=1) as kernels:
        step()
    rank, size = ps.index("pp"), rows * shape.seq * shape.hidden * dtype.itemsize
    bare = BareStep(pipeline.schedule, rank, kernels, size)
    bare()
    message = max(all_gather_objects(message_seconds(rank, size), ps.group("pp")))
    times = {"step": [], "bare": [], "bound": []}
    for pair in range(pairs):
        for name, run in (("step", step), ("bare", bare))[:: 1 if pair % 2 == 0 else -1]:
            times[name].append(timed(run))
        seconds = {}
        for theirs in all_gather_objects(bare.seconds, ps.group("pp")):
            seconds |= theirs
        times["bound"].append(critical_path(pipeline.schedule, seconds, message))
    ratios = {
        name: [s / b for s, b in zip(times["step"], times[name], strict=True)]
        for name in ("bound", "bare")
    }
    say(
        f"1F1B, 2 ranks, {shape}, {MICROBATCHES} microbatches of {rows}, {str(dtype).removeprefix('torch.')}: step "
        f"{spread(times['step'])} s, bound {spread(times['bound'])} s (messages of {size / 2**20:.2f} MiB in "
        f"{message * 1e3:.2f} ms); step/bound {spread(ratios['bound'])}, step/bare run of the same order "
        f"{spread(ratios['bare'])}"
    )
    for stage, others in enumerate(all_gather_objects(not_in_the_bound(step), ps.group("pp"))):
        say(f"  in the step and not in the bound, stage {stage}, ms: {others}")
    return statistics.median(ratios["bound"])
