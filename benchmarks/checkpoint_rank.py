"""What one rank measures; `benchmarks.checkpoint` starts it under torchrun. Rank 0 prints one JSON line."""

import gc
import itertools
import json
import os
import shutil
import sys
import time
from unittest import mock

import numpy as np
import tensorstore as ts
import torch
import torch.distributed as dist

from benchmarks.checkpoint_sides import (
    Dcp,
    Ours,
    Raw,
    State,
    counter,
    drop_cache,
    fresh,
    reset_peak,
)
from core.dist_checkpointing import CheckpointManager
from core.dist_checkpointing.format.arrays import ArrayInfo
from core.dist_checkpointing.format.zarr_metadata import array_metadata
from core.dist_checkpointing.publish.checkpoint_root import step_name
from core.dist_checkpointing.reading import direct


def timed(call, before=lambda: None):
    """Seconds of the slowest rank."""
    before()
    os.sync()
    gc.collect()
    dist.barrier()
    begin = time.perf_counter()
    call()
    seconds = torch.tensor([time.perf_counter() - begin])
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def turns(calls, pairs, before=None):
    """name -> seconds of each round; the order rotates, so that drift hits all alike; the first does not count."""
    times = {name: [] for name in calls}
    names = list(calls)
    for number in range(pairs + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            seconds = timed(calls[name], before or (lambda: None))
            if number:
                times[name].append(seconds)
    return times


def warm(sides, path):
    """Everything that is imported or built at first use: a tiny save and load by each side."""
    os.makedirs(path, exist_ok=True)
    for side in sides:
        fresh(f"{path}/warm")
        side.save(f"{path}/warm")
        if hasattr(side, "load"):
            side.load(f"{path}/warm")


def save_and_load(path, size, dtype, pairs):
    """Durable saves of ours, DCP (one and four threads) and plain files; loads under the same layout."""
    tiny = State("toy", dtype)
    warm([Ours(tiny), Dcp(tiny), Raw(tiny)], path)
    state = State(size, dtype)
    sides = {
        "ours": Ours(state),
        "dcp": Dcp(state),
        "dcp_4_threads": Dcp(state, threads=4),
        "raw": Raw(state),
    }

    saves = {name: [] for name in sides}
    last = {}
    for number in range(pairs + 1):
        for name in list(sides)[number % 4 :] + list(sides)[: number % 4]:
            # a new directory each time: what removing the last one leaves to the disk would fall on whoever follows
            last[name] = f"{path}/{name}-{number}"
            seconds = timed(lambda name=name: sides[name].save(last[name]))
            if number:
                saves[name].append(seconds)
    loads = turns(
        {
            "ours": lambda: sides["ours"].load(last["ours"]),
            "unverified": lambda: sides["ours"].load(last["ours"], verify=False),
            "dcp": lambda: sides["dcp"].load(last["dcp"]),
        },
        pairs,
    )
    if dist.get_rank() == 0:
        for name in ("ours", "dcp"):
            shutil.rmtree(f"{path}/{name}", ignore_errors=True)
            os.rename(last[name], f"{path}/{name}")
        for name in sides:
            for number in range(pairs + 1):
                shutil.rmtree(f"{path}/{name}-{number}", ignore_errors=True)
    return {"save": saves, "load": loads, "bytes": state.nbytes * state.tp}


def reshard_load(path, size, dtype, pairs):
    """Read what two tensor ranks wrote on four; warm, and with the page cache dropped; bytes read for bytes asked."""
    state = State(size, dtype, zeros=True)
    sides = {"ours": Ours(state), "dcp": Dcp(state)}
    tiny = State("toy", dtype)
    warm([Ours(tiny), Dcp(tiny)], f"{path}/tiny")
    calls = {name: lambda name=name: sides[name].load(f"{path}/{name}") for name in sides}

    def cold():
        if dist.get_rank() == 0:
            for name in sides:
                drop_cache(f"{path}/{name}")

    read = {}
    for name, call in calls.items():
        begin = counter("io", "rchar")
        call()
        read[name] = counter("io", "rchar") - begin
    totals = torch.tensor([read["ours"], read["dcp"], needed(state)], dtype=torch.float64)
    dist.all_reduce(totals)
    ours, peer, asked = totals.tolist()
    return {
        "warm": turns(calls, pairs),
        "cold": turns(calls, pairs, cold),
        "amplification": {"ours": ours / asked, "dcp": peer / asked},
    }


def needed(state):
    """Bytes of this rank's state that a checkpoint holds: derived weights are read from their main parameters."""
    return sum(
        t.nbytes
        for (kind, _), t in state.tensors.items()
        if kind != "model" or t.dtype == torch.float32
    )


def replicas(path, size, dtype, pairs):
    """Bytes of cells that four replicas read, over the state; times when they share the reading, and when not."""
    state = State(size, dtype, replicas=True)
    ours, read, before = Ours(state), [], direct._read_all

    def counted(descriptor, buffers, offset):
        read.append(sum(map(len, buffers)))  # in several threads
        before(descriptor, buffers, offset)

    fresh(f"{path}/replicas")
    ours.save(f"{path}/replicas")
    with mock.patch.object(direct, "_read_all", counted):
        ours.load(f"{path}/replicas")
    total = torch.tensor([sum(read)], dtype=torch.float64)
    dist.all_reduce(total)
    shares = {"shared": True, "each": False}
    calls = {
        name: lambda on=on: ours.load(f"{path}/replicas", share_reads=on)
        for name, on in shares.items()
    }
    times = turns(calls, pairs)
    fresh(f"{path}/replicas")
    return {"over_state": total.item() / needed(state), **times}


def memory(path, size, dtype, pairs):
    """MiB beyond the state itself, at the peak of a save and of a load."""
    tiny = State("toy", dtype)
    warm([Ours(tiny)], path)
    state = State(size, dtype)
    ours = Ours(state)
    found = {}
    for name, call in {"save": ours.save, "load": ours.load}.items():
        if name == "save":
            fresh(f"{path}/rss")
        gc.collect()
        reset_peak()
        begin = counter("status", "VmRSS")
        call(f"{path}/rss")
        extra = torch.tensor([(counter("status", "VmHWM") - begin) / 1024])
        dist.all_reduce(extra, dist.ReduceOp.MAX)
        found[name] = extra.item()
    fresh(f"{path}/rss")
    return found


def stall(path, size, dtype, pairs):
    """What an asynchronous save costs the loop, first one included, over copying the same bytes to warm memory."""
    state = State(size, dtype)
    sharded = state.sharded()
    with_copy = {
        n: np.zeros(t.shape, np.float32)
        for n, t in state.tensors.items()
        if t.dtype == torch.float32
    }

    def copy():
        begin = time.perf_counter()
        for name, target in with_copy.items():
            np.copyto(target, state.tensors[name].numpy())
        return time.perf_counter() - begin

    fresh(f"{path}/steps")
    manager = CheckpointManager(f"{path}/steps", keep_last=1, ps=state.ps)
    manager.prepare(sharded)
    copy()
    stalls, copies, beside = [], [], []
    for step in range(1, pairs + 1):
        copies.append(copy())
        handle = manager.save_async(step, sharded)
        stalls.append(handle.stats.stall_ms / 1e3)
        beside.append(copy())
        handle.wait()
    manager.close()
    fresh(f"{path}/steps")
    return {"stall": stalls, "copy": copies, "beside": beside}


def many_steps(path, size, dtype, pairs):
    """Small saves into a directory of one step, and into one of 1,000 that are all kept."""
    sharded, calls, steps = State("toy", dtype).sharded(), {}, itertools.count(1000)
    for name, count in (("one", 1), ("many", 1000)):
        root = f"{path}/{name}"
        manager = CheckpointManager(
            root, keep_last=3, keep_every=1, keep_hours=1.0, keep_best="loss"
        )
        manager.save(0, sharded, {"loss": 0.0})
        for step in range(1, count):
            shutil.copytree(f"{root}/{step_name(0)}", f"{root}/{step_name(step)}")
        calls[name] = lambda manager=manager: manager.save(next(steps), sharded, {"loss": 1.0})
    times = turns(calls, pairs)
    for name in times:
        fresh(f"{path}/{name}")
    return times


def write(path, size, dtype, pairs):
    """One checkpoint, for others to work on."""
    state = State(size, dtype)
    Ours(state).save(f"{path}/large")
    return {"bytes": state.nbytes}


def checksums(path, size, dtype, pairs):
    """Durable saves of one array in shards with checksums behind each MiB, and of the same without."""
    whole = torch.randn(64, 4 << 20).numpy()
    times = turns(
        {
            kind: lambda kind=kind: write_shards(f"{path}/{kind}", whole, kind)
            for kind in ("with", "without")
        },
        pairs,
    )
    for kind in times:
        fresh(f"{path}/{kind}")
    return times


def write_shards(path, whole, kind):
    shutil.rmtree(path, ignore_errors=True)
    metadata = array_metadata(ArrayInfo(whole.shape, "float32"), (1, 4 << 20), (1, 1 << 18))
    inner = metadata["codecs"][0]["configuration"]
    inner["codecs"] = inner["codecs"][: None if kind == "with" else 1]
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": path + "/"},
        "metadata": metadata,
    }
    context = ts.Context({"file_io_concurrency": {"limit": 32}, "file_io_sync": True})
    store = ts.open(spec, context=context, open=True, assume_metadata=True).result()
    running = [
        store[i : i + 1].write(whole[i : i + 1], can_reference_source_data_indefinitely=True)
        for i in range(64)
    ]
    for write in running:
        write.result()


def main():
    role, path, size, dtype, pairs = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = globals()[role](path, size, getattr(torch, dtype), int(pairs))
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
