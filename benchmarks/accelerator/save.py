"""How long an asynchronous save stops training, against its bytes at the device's rate to the host."""

import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.accelerator.bench import GPT_1B4, TINY, Bench, Trained, batch, gpt
from benchmarks.accelerator.ceilings import bandwidth, to_host
from core.dist_checkpointing.manager import CheckpointManager
from core.optimizer import sharded_state_dict


def stall(b):
    """Seconds between the end of a step and the update that may follow, over the bytes' own time."""
    size = TINY if b.dry else GPT_1B4
    job, rows = Trained(gpt(size, torch.bfloat16, b.state()), b.state()), batch(size, b.device)
    times, held = [], 0
    with tempfile.TemporaryDirectory() as folder:
        manager = CheckpointManager(Path(folder) / "run", ps=job.ps, keep_last=1)
        for number in range(1, 3 if b.dry else 5):
            job.step(rows)
            b.sync()
            state = {
                "model": sharded_state_dict(job.shard),
                "optimizer": job.optimizer.sharded_state_dict(),
            }
            begin = time.perf_counter()
            handle = manager.save_async(number, state)
            manager.before_update()
            b.sync()
            times.append(time.perf_counter() - begin)
            handle.wait()
            held = handle.stats.bytes
        manager.close()
    rate = b.figures.get("gb_s_to_host") or b.figures["gb_s_copy"]
    b.figures["stall_over_copy"] = statistics.median(times[1:]) / (held / rate / 1e9)
    stalled, ratio = statistics.median(times[1:]), b.figures["stall_over_copy"]
    return f"{stalled * 1e3:.1f} ms for {held / 2**20:.1f} MiB, {ratio:.2f} times the copy"


def run(b: Bench):
    """The rate, then the stall."""
    b.line("save: rate", bandwidth if b.on_cpu else to_host)
    b.line("save: stall", stall)
