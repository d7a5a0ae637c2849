"""Trainers that do nothing but save, in processes of their own: to be killed, traced, or left without a disk."""

import os
import resource
import sys
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import torch

from core.dist_checkpointing import CheckpointManager
from core.dist_checkpointing.publish.checkpoint_root import CheckpointRoot
from core.dist_checkpointing.storage.fs import Fs
from core.parallel_state import ParallelConfig, ParallelState
from core.parallel_state.collectives.groups import init_world
from tests.dist_checkpointing import small

TIMEOUT_S = 4.0  # of a rank that waits for another


def join(rank, world, folder):
    """This rank of a world whose ranks meet in a file."""
    if world > 1:
        init_world("gloo", TIMEOUT_S, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    return ParallelState.build(ParallelConfig(tensor=world), device="cpu", timeout_s=TIMEOUT_S)


def run(victim, told, rank, world, folder, **arguments):
    """The process: `victim` until it is killed, or has an error, which is told."""
    try:
        ps = join(rank, world, folder)
        victim(ps, lambda *message: told.send(message), f"{folder}/root", **arguments)
    except Exception as error:
        told.send(("raised", f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from None


def saving(ps, tell, root, replaces=False):
    """Saves state after state, each as a step of its own or all as one."""
    manager = CheckpointManager(root, ps=ps, keep_last=2, timeout_s=TIMEOUT_S)
    for seed in count(1):
        tell("begins", seed)
        manager.save(7 if replaces else seed, small.state(seed, ps.rank, ps.config.world_size))
        tell("saved", seed)


def saving_beside(ps, tell, root, replaces=False):
    """The same by the writer program; goes on after a failure."""
    manager = CheckpointManager(root, ps=ps, keep_last=2, timeout_s=TIMEOUT_S)
    manager.prepare(small.state(0, ps.rank, ps.config.world_size))
    for seed in count(1):
        tell("begins", seed)
        handle = manager.save_async(7 if replaces else seed, small.state(seed, ps.rank, ps.config.world_size))
        tell("handed", seed)
        tell("writer", manager._writer._process.pid)
        try:
            handle.wait()
            tell("saved", seed)
        except RuntimeError as error:
            tell("failed", str(error))


def retaining(ps, tell, root):
    """Mostly removes old steps."""
    manager = CheckpointManager(root, ps=ps, keep_last=100, timeout_s=TIMEOUT_S)
    for seed in count(1):
        tell("begins", seed)
        manager.save(seed, small.state(seed))
        tell("saved", seed)
        if seed % 4 == 0:
            tell("retains", seed)
            CheckpointRoot(root).retain(keep_last=1)


def filling(ps, tell, root, *, beside, hidden=False, limit=None):
    """One save that fits, one that does not, one that does. `hidden`: the disk says that there is space. `limit`:
    bytes that a file may have meanwhile, on the last rank."""
    if hidden:
        Fs.free_bytes = lambda self, path: 1 << 40
    world = ps.config.world_size
    # half: a rank that failed at once waits in the next save for one that still waits for its receipt
    manager = CheckpointManager(root, ps=ps, timeout_s=TIMEOUT_S / 2)
    manager.save(1, large(1, ps.rank, world))
    try:
        with files_limited_to(limit if ps.rank == world - 1 else None):
            if beside:
                manager.save_async(2, large(2, ps.rank, world)).wait()
            else:
                manager.save(2, large(2, ps.rank, world))
    except (OSError, RuntimeError) as error:
        tell("failed", (type(error).__name__, str(error), getattr(error, "needed", None)))
    manager.save(3, small.state(3, ps.rank, world))
    manager.close()
    tell("saved", 3)


@contextmanager
def files_limited_to(size):
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited if size is None else (size, unlimited[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)


def large(seed, rank=0, world=1):
    """4.7 MiB in six arrays, each of another size, so that every rank writes some."""
    wholes = {f"model/{n}": torch.full((160 + 16 * n, 1024), seed + n / 8) for n in range(6)}
    return {"arrays": {key: small.part(key, value, rank, world) for key, value in wholes.items()}}


def tale(top):
    """Everything that changes a directory of checkpoints, once; `marks/1.2`: from here on the newest is 1 or 2."""

    def mark(*seeds):
        os.mkdir(top / "marks" / ".".join(map(str, seeds)))

    mark(0)  # none
    manager = CheckpointManager(top / "root", keep_last=2)
    for seed, step in ((1, 1), (2, 2), (3, 2)):  # the same step again
        mark(seed - 1, seed)
        manager.save(step, small.state(seed))
        mark(seed)
    manager.close()
    manager = CheckpointManager(top / "root", keep_last=2)
    for seed, step in ((4, 3), (5, 3)):  # the first has a step to remove
        mark(seed - 1, seed)
        manager.save_async(step, small.state(seed)).wait()
        mark(seed)
    manager.close()


if __name__ == "__main__":
    tale(Path(sys.argv[1]))
