"""A GPT-shaped training state on one tensor rank, and who saves it: ours, torch's DCP, plain files."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from core import dist_checkpointing
from core.dist_checkpointing import ShardedTensor
from core.parallel_state import ParallelConfig, ParallelState


def shapes(hidden, layers, vocab, groups):
    """name -> (shape, tensor-parallel dim); layers by their number."""
    h, d = hidden, hidden // groups
    layer = {
        "input_layernorm.weight": ((h,), None),
        "self_attention.linear_qkv.weight": ((groups, 3, d, h), 0),
        "self_attention.linear_qkv.bias": ((groups, 3, d), 0),
        "self_attention.linear_proj.weight": ((h, h), 1),
        "self_attention.linear_proj.bias": ((h,), None),
        "pre_mlp_layernorm.weight": ((h,), None),
        "mlp.linear_fc1.weight": ((1, 4 * h, h), 1),
        "mlp.linear_fc1.bias": ((1, 4 * h), 1),
        "mlp.linear_fc2.weight": ((h, 4 * h), 1),
        "mlp.linear_fc2.bias": ((h,), None),
    }
    found = {"embedding.weight": ((vocab, h), 0)}
    found |= {f"layers.{i}.{name}": of for i in range(layers) for name, of in layer.items()}
    return found | {"final_layernorm.weight": ((h,), None)}


SIZES = {
    "124m": {"hidden": 768, "layers": 12, "vocab": 50304, "groups": 12},
    "quick": {"hidden": 384, "layers": 4, "vocab": 3072, "groups": 12},
    "toy": {"hidden": 64, "layers": 4, "vocab": 1024, "groups": 4},
    "large": {"hidden": 1536, "layers": 12, "vocab": 12288, "groups": 12},  # 4.2 GiB of fp32 states
}


class State:
    """(kind, name) -> tensors of this tensor rank: weights, two moments, main parameters beside 16-bit weights.

    replicas: all ranks hold everything.
    """

    def __init__(self, size, dtype, *, zeros=False, replicas=False):
        self.layers = SIZES[size]["layers"]
        spread = dist.is_initialized() and not replicas
        self.rank, self.tp = (dist.get_rank(), dist.get_world_size()) if spread else (0, 1)
        self.ps = ParallelState.build(ParallelConfig(tensor=self.tp), device="cpu")
        self.shapes = shapes(**SIZES[size])
        self.tensors = {}
        for number, (name, (shape, dim)) in enumerate(self.shapes.items()):
            local = [n // self.tp if d == dim else n for d, n in enumerate(shape)]
            generator = torch.Generator().manual_seed(
                number * 64 + (0 if dim is None else self.rank)
            )
            for kind in ("main", "exp_avg", "exp_avg_sq"):
                value = (
                    torch.zeros(local) if zeros else torch.empty(local).normal_(generator=generator)
                )
                self.tensors[kind, name] = value
            main = self.tensors["main", name]
            if dtype == torch.float32:
                self.tensors["model", name] = self.tensors.pop(("main", name))
            else:
                self.tensors["model", name] = main.to(dtype)

    @property
    def nbytes(self):
        return sum(t.nbytes for t in self.tensors.values())

    def sharded(self):
        """For ours: layers stacked."""
        found = {}
        for (kind, name), tensor in self.tensors.items():
            shape, dim = self.shapes[name]
            group = "model" if kind == "model" else f"optimizer/{kind}"
            offset = [self.rank * n if d == dim else 0 for d, n in enumerate(tensor.shape)]
            stacked = name.startswith("layers.")
            row = int(name.split(".")[1]) if stacked else 0
            key = "layers." + name.split(".", 2)[2] if stacked else name
            found[f"{kind}.{name}"] = ShardedTensor(
                f"{group}/{key}",
                tensor,
                ((self.layers,) if stacked else ()) + tuple(shape),
                ((row,) if stacked else ()) + tuple(offset),
                prepend_axis_num=int(stacked),
                tp_dim=None if dim is None else dim + stacked,
            )
        return found

    def dtensors(self, mesh):
        """For DCP."""

        def wrap(name, tensor):
            dim = self.shapes[name][1]
            return DTensor.from_local(
                tensor, mesh, [Replicate() if dim is None else Shard(dim)], run_check=False
            )

        return {
            f"{kind}.{name}": wrap(name, tensor) for (kind, name), tensor in self.tensors.items()
        }


class Ours:
    """Durable always; `load` verifies."""

    name = "ours"

    def __init__(self, state):
        self._state, self._sharded = state, state.sharded()

    def save(self, path):
        dist_checkpointing.save(self._sharded, path, ps=self._state.ps)

    def load(self, path, verify=True, share_reads=True):
        ps = self._state.ps
        dist_checkpointing.load(self._sharded, path, ps=ps, verify=verify, share_reads=share_reads)


class Dcp:
    """torch.distributed.checkpoint with its defaults, and fsync."""

    name = "dcp"

    def __init__(self, state, threads=1):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self._dtensors, self._threads = state.dtensors(mesh), threads

    def save(self, path):
        writer = dcp.FileSystemWriter(path, sync_files=True, thread_count=self._threads)
        dcp.save(self._dtensors, storage_writer=writer)
        if dist.get_rank() == 0:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

    def load(self, path):
        dcp.load(self._dtensors, checkpoint_id=path)


class Raw:
    """The same bytes in plain files of 16 MiB, eight at a time, each fsynced: what the machine can do."""

    name = "raw"

    def __init__(self, state):
        pieces = [tensor.view(-1).view(torch.uint8).numpy() for tensor in state.tensors.values()]
        chunks = [
            piece[i : i + (16 << 20)] for piece in pieces for i in range(0, piece.size, 16 << 20)
        ]
        small = [chunk for chunk in chunks if chunk.size < 1 << 20]
        self._chunks = [chunk for chunk in chunks if chunk.size >= 1 << 20] + [
            np.concatenate(small)
        ]
        self._rank = state.rank

    def save(self, path):
        os.makedirs(path, exist_ok=True)

        def write(item):
            number, chunk = item
            with open(f"{path}/{self._rank}-{number}", "wb", buffering=0) as file:
                file.write(chunk.data)
                os.fsync(file.fileno())

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(write, enumerate(self._chunks)))
        if dist.is_initialized():
            dist.barrier()


def fresh(path):
    """Rank 0 removes what a former save left; all wait."""
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
    dist.barrier()


def drop_cache(path):
    """Evict a tree from the page cache, without being root."""
    for folder, _, names in os.walk(path):
        for name in names:
            descriptor = os.open(os.path.join(folder, name), os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def counter(file, key):
    """A number of this process: counter("io", "rchar") bytes, counter("status", "VmHWM") KiB."""
    with open(f"/proc/self/{file}") as f:
        return next(int(line.split()[1]) for line in f if line.startswith(key + ":"))


def reset_peak():
    """Let VmHWM start from now."""
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")
