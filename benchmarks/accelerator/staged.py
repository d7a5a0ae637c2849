"""Two ranks on one device: tensor parallelism, pipelines and ZeRO-3 with real kernels, messages through host memory.

On a CPU (dry) the CPU stands in the accelerator's place, so that every message takes the staged path all the same.
Beside it: one rank of the accelerator's own backend, which runs its calls.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.accelerator.bench import (
    FLOAT32,
    TINY,
    Bench,
    NotHereError,
    Trained,
    batch,
    close,
    gpt,
)
from core import parallel_state
from core.data_parallel import DataParallel
from core.models.gpt import gpt_stages, llama_spec
from core.parallel_state import ParallelConfig, ParallelState
from core.parallel_state.collectives import all_gather, all_gather_objects
from core.parallel_state.layout import layout_of
from core.pipeline import Pipeline
from core.training import next_token_loss

ROOT = Path(__file__).parents[2]
LAYOUTS = {
    "tensor parallelism": ({"tensor": 2}, 1),
    "tensor and sequence parallelism": ({"tensor": 2, "sequence_parallel": True}, 1),
    "pipeline, 1F1B": ({"pipeline": 2}, 1),
    "ZeRO-1": ({}, 1),
    "ZeRO-3": ({}, 3),
}


def stage_everything(ps):
    """On a CPU: as if gloo had no messages of its tensors."""
    for group in (ps.world, *ps.groups.values(), *ps._links.values()):
        if group is not None:
            group.staged = frozenset({ps.device.type})


def assembled(local, layouts, ps):
    """Global name -> the whole tensor, from every rank's part of it (a pipeline rank holds some names only)."""
    mine = {
        name: (layouts[name].box(ps.coordinate, ps.sizes), layouts[name].shape, local[name])
        for name in local
    }
    found = {}
    for theirs in all_gather_objects(mine, ps.world):
        for name, (box, shape, part) in theirs.items():
            target = found.setdefault(name, torch.zeros(shape))
            target[box] = part[tuple(slice(0, s.stop - s.start) for s in box)]
    return found


def summed(shard, ps):
    """The whole summed gradients: at stages 1 to 3 each data rank holds a part of every bucket."""
    local = {}
    for buffer in shard.buffers:
        flat = all_gather(buffer.own_gradients.contiguous(), buffer.ranks).cpu()
        for slot, parameter in zip(buffer.bucket.slots, buffer.parameters, strict=True):
            local[slot.name] = flat[slot.start : slot.stop].view(parameter.shape)
    layouts = {name: layout_of(parameter) for name, parameter in shard.named_parameters().items()}
    return assembled(local, layouts, ps)


def gradients(config, zero, device):
    """Whole gradients of one batch on this layout of two ranks."""
    ps = ParallelState.build(ParallelConfig(**config), device=device)
    if device.type == "cpu":
        stage_everything(ps)
    rows = {name: r.chunk(ps.size("dp"))[ps.index("dp")] for name, r in batch(TINY, device).items()}
    if ps.size("pp") == 1:
        job = Trained(gpt(TINY, torch.float32, ps, std=0.2), ps, zero=zero)
        job.gradients(rows)
        shard = job.shard
    else:
        single = gpt(TINY, torch.float32, ParallelState.single(device), std=0.2)
        stages = gpt_stages(
            single.config, llama_spec(), TINY.vocab, TINY.sequence, placement=(0, 1), parallel=ps
        )
        shard = DataParallel(stages, ps, zero_stage=0)
        pipe = Pipeline(stages, ps=ps, schedule="1f1b", num_microbatches=2, grad_sync=shard)
        pipe.step(rows, next_token_loss)
    return summed(shard, ps), ps


def rank(path):
    """One of the two processes: writes what every layout's gradients are."""
    with parallel_state.launch(os.environ["PARACORE_DEVICE"], backend="gloo") as device:
        found = {}
        for name, (config, zero) in LAYOUTS.items():
            try:
                found[name], ps = gradients(config, zero, device)
                ps.destroy()
            except Exception as error:  # the other layouts are tried all the same
                found[name] = f"{type(error).__name__}: {error}"
        if int(os.environ["RANK"]) == 0:
            torch.save(found, path)


def run(b: Bench):
    """Two processes, every layout, against one process here."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.pt"
        environment = os.environ | {"PARACORE_DEVICE": b.device.type, "PYTHONPATH": str(ROOT)}
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
        ]
        command += ["-m", "benchmarks.accelerator.staged", str(path)]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, f"two processes: {done.stderr[-600:]}"
        found = torch.load(path, weights_only=True)
    job = Trained(gpt(TINY, torch.float32, b.state(), std=0.2), b.state())
    _, expected = job.gradients(batch(TINY, b.device))
    for name in LAYOUTS:

        def compare(_, gradients=found[name]):
            assert not isinstance(gradients, str), gradients
            trimmed = {n: g[tuple(map(slice, expected[n].shape))] for n, g in gradients.items()}
            return close(trimmed, expected, FLOAT32, "two ranks")

        b.line(f"staged: {name}", compare)
    b.line("one rank of the accelerator's backend", own_backend)


def own_backend(b):
    """world_size 1 of nccl or its like: every collective is called once."""
    if b.on_cpu:
        raise NotHereError("gloo is the CPU's own")
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        try:
            x = torch.ones(8, device=b.device)
            dist.all_reduce(x)
            out = torch.empty_like(x)
            dist.all_gather_into_tensor(out, x)
            dist.reduce_scatter_tensor(out, x)
            dist.all_to_all_single(out, x)
            dist.broadcast(x, 0)
            assert torch.equal(out, torch.ones_like(out))
            return str(dist.get_backend_config())
        finally:
            dist.destroy_process_group()


if __name__ == "__main__":
    rank(sys.argv[1])
