"""Leaving the groups again, and the device of a world that no accelerator serves."""

import gc
import importlib
import socket
import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as functional
import torch.multiprocessing as mp
from torch.distributed import distributed_c10d as c10d

from core.parallel_state import ParallelConfig, ParallelState
from core.parallel_state.collectives import all_reduce
from core.parallel_state.state import checked_device
from tests.pool import Pool


def destroyed():
    before = set(c10d._world.pg_map)
    ps = ParallelState.build(ParallelConfig(tensor=2), device="cpu")
    own = {ps.group(axis).process_group for axis in ("tp", "dp")} | {ps.torch_group("cp").process_group}
    assert len(own) == 3 and own <= set(c10d._world.pg_map) and not own & before
    ps.destroy()
    assert set(c10d._world.pg_map) == before, "our groups are gone, and no other"
    assert ps.groups == {} and ps.group("tp") is None
    ps.destroy()  # once more is no error
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()


def test_destroy_leaves_our_groups_and_only_ours(ranks):
    assert ranks(destroyed, world=4) == [4.0] * 4


def with_accelerator(patch):
    """A machine with one accelerator, as far as torch says."""
    facts = {"is_available": True, "device_count": 1, "current_device_index": 0, "set_device_index": None}
    facts["current_accelerator"] = torch.device("cuda")
    for name, value in facts.items():
        patch.setattr(torch.accelerator, name, lambda *_, value=value: value)


def built_on_gloo():
    with pytest.MonkeyPatch.context() as patch:
        with_accelerator(patch)
        patch.setattr("core.parallel_state.state.pg.backends", lambda *_: {"cpu": "gloo", "cuda": "gloo"})
        ps = ParallelState.build(ParallelConfig(tensor=2))
    ps.destroy()
    return ps.device.type


def test_a_gloo_world_trains_on_the_cpu_whatever_the_machine_has(ranks):
    assert ranks(built_on_gloo, world=2) == ["cpu", "cpu"]


@pytest.mark.parametrize(
    "asked, served, want",
    [
        (None, {"cpu": "gloo"}, "cpu"),
        (None, {"cpu": "gloo", "cuda": "gloo"}, "cpu"),
        (None, {"cpu": "gloo", "cuda": "nccl"}, "cuda:0"),
        (None, {}, "cuda:0"),  # a single process without a group
        ("cuda", {"cpu": "gloo", "cuda": "gloo"}, "cuda:0"),  # asked for by name
        ("cpu", {"cpu": "gloo", "cuda": "nccl"}, "cpu"),
    ],
)
def test_the_device_on_a_machine_with_an_accelerator(monkeypatch, asked, served, want):
    with_accelerator(monkeypatch)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert checked_device(asked, served) == torch.device(want)


def test_an_accelerator_that_the_world_does_not_serve_is_refused(monkeypatch):
    with_accelerator(monkeypatch)
    with pytest.raises(ValueError, match=r"device cuda is not served by .*cpu.*gloo"):
        checked_device("cuda", {"cpu": "gloo"})


def test_torchruns_processes_that_never_joined_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ValueError, match=r"torchrun started 2 processes, this one sees 1: call torch\.distributed\.init"
    ):
        ParallelState.build(ParallelConfig(), device="cpu")


def missing_rank():
    ps = ParallelState.build(ParallelConfig(tensor=2), device="cpu", debug=True, timeout_s=1.0)
    if ps.rank == 0:
        with pytest.raises(RuntimeError, match=r"group tp: not every one of the ranks \(0, 1\) came to all_reduce"):
            all_reduce(torch.ones(3), ps.group("tp"))


def test_debug_mode_says_which_call_a_rank_never_came_to():
    pool = Pool()  # a pair that timed out is closed for ever: not the session's pool
    try:
        pool(missing_rank, world=2, timeout=20)
    finally:
        pool.close()


def abandoned(rank, port):
    """Nothing may hold the default group afterwards, else its connections stay open and peers wait."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    importlib.reload(functional)  # as if imported after init_process_group: its default arguments are that group
    ps = ParallelState.build(ParallelConfig(tensor=2), device="cpu")
    world = dist.group.WORLD
    ps.abandon()
    gc.collect()
    held = sys.getrefcount(world) - 2  # this frame's, and the call's own argument
    assert held == 0, f"{held} references"


def test_after_a_failure_nobody_holds_the_default_group():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.start_processes(abandoned, args=(port,), nprocs=2, start_method="forkserver")
