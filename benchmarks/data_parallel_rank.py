"""What one rank measures; `benchmarks.data_parallel` starts it under torchrun. Rank 0 prints one JSON line.

steps SETTING ENGINE,ENGINE,... ROUNDS STEPS | calls ENGINE,... | optimizer PARAMETERS ROUNDS
"""

import gc
import json
import logging
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.data_parallel_sides import COMMUNICATION, COMPUTE, LR, SIDES, Engine, python_calls
from benchmarks.harness import take_turns
from benchmarks.llama import Shape
from core.parallel_state import ParallelConfig, ParallelState

QUICK = Shape(hidden=128, layers=4, heads=4, kv_heads=4, ffn=352, seq=32, vocab=1024)
SETTINGS = {"compute": (COMPUTE, 4), "communication": (COMMUNICATION, 1), "quick": (QUICK, 2)}


def steps(setting, names, rounds, block):
    """Seconds per step of each engine in each round: blocks of `block` steps, after one step that is not timed.

    All engines live in this process. A round goes through them in order and the next one backwards, so that
    neighbours are A B, B A pairs. The clock stops when all ranks are through. `processor`: all ranks' processor
    seconds per step, gloo's threads included, of which other work on the machine takes nothing.
    """
    shape, batch = SETTINGS[setting]
    engines = {name: Engine(SIDES[name], shape, batch) for name in names.split(",")}
    for engine in engines.values():
        for _ in range(3):
            engine.step()
    times, processor = ({name: [] for name in engines} for _ in range(2))
    gc.collect()
    gc.disable()
    for number in range(int(rounds)):
        for name in list(engines) if number % 2 == 0 else list(engines)[::-1]:
            engine = engines[name]
            engine.step()  # its memory has left the caches
            dist.barrier()
            begin, used = time.perf_counter(), time.process_time()
            for _ in range(int(block)):
                engine.step()
            dist.barrier()
            times[name].append((time.perf_counter() - begin) / int(block))
            processor[name].append((time.process_time() - used) / int(block))
    gc.enable()
    losses = {name: engine.mean_losses().tolist() for name, engine in engines.items()}
    return {"seconds": times, "processor": all_ranks(processor), "losses": losses}


def all_ranks(times):
    """The sums over the ranks. One all-reduce."""
    total = torch.tensor(list(times.values()), dtype=torch.float64)
    dist.all_reduce(total)
    return dict(zip(times, total.tolist(), strict=True))


def calls(names):
    """Python function calls of one step of each."""
    return {name: python_calls(name, QUICK) for name in names.split(",")}


def optimizer(parameters, rounds):
    """Our step of a whole stage-1 shard, and torch's fused AdamW on one flat tensor, each beside one memcpy.

    AdamW reads parameter, gradient and two moments and writes three of them, 28 bytes per parameter: a memcpy that
    moves as much copies 14. Ours includes the norm, the clipping and whatever else a step does, on one rank.
    """
    width = 1024
    layers = max(1, int(parameters) // (width * (width + 1)))
    shard, ours = our_optimizer(nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))))
    count = sum(p.numel() for p in shard.module.parameters())
    target, source = torch.zeros(count * 14 // 4), torch.randn(count * 14 // 4)
    flat = nn.Parameter(torch.randn(count))
    flat.grad = torch.randn(count) * 1e-3
    inner = torch.optim.AdamW([flat], lr=LR, fused=True)

    def step():
        ours.step()

    def prepare():
        ours.zero_grad()
        sum((p * 1e-3).sum() for p in shard.module.parameters()).backward()
        shard.finish()

    def copy():
        target.copy_(source)

    def bare():
        inner.step()

    prepare()
    step.prepare = prepare
    found = {}
    for name, side in (("ours", step), ("torch", bare)):
        ratio = take_turns(side, copy, pairs=int(rounds))
        found[name] = {
            "ratio": [o / c for o, c in zip(ratio.ours, ratio.peer, strict=True)],
            "ns": statistics.median(ratio.ours) / count * 1e9,
            "memcpy_ns": statistics.median(ratio.peer) / count * 1e9,
        }
    return found


def our_optimizer(module):
    from core.data_parallel import DataParallel
    from core.optimizer import OptimizerConfig, ShardedAdamW

    shard = DataParallel(module, ParallelState.build(ParallelConfig(), device="cpu"), zero_stage=1)
    return shard, ShardedAdamW(shard, OptimizerConfig(lr=LR, weight_decay=0.0, clip_grad=1.0))


def main():
    role, *words = sys.argv[1:]
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    found = globals()[role](*words)
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
