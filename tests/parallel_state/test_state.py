"""Groups, meshes and getters on real gloo ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from core import parallel_state
from core.parallel_state import ParallelConfig, ParallelState
from core.parallel_state.environment import started_processes
from tests.marks import FULL, thinned
from tests.states import state

ROOT = Path(__file__).parents[2]


def describe(tp, pp=1, cp=1):
    ps = state(tp=tp, pp=pp, cp=cp)
    at = {a: ps.coordinate[a] for a in ("pp", "dp", "cp", "tp")}
    return at, {name: g.ranks for name, g in ps.groups.items()}, ps.group("cp")


def test_groups_of_four_ranks(ranks):
    got = ranks(describe, world=4, tp=2)
    assert [tuple(at.values()) for at, _, _ in got] == [(0, 0, 0, 0), (0, 0, 0, 1), (0, 1, 0, 0), (0, 1, 0, 1)]
    assert got[3][1] == {"tp": (2, 3), "dp": (1, 3), "dp-cp": (1, 3), "edp": (0, 1, 2, 3), "shard": (1, 3)}
    assert all(cp is None for _, _, cp in got)


def same_group_once():
    ps = state(tp=2)
    assert ps.group("dp").process_group is ps.group("dp-cp").process_group, "equal rank sets are one group"
    assert ps.group("edp").process_group is dist.group.WORLD
    assert len({id(g.process_group) for g in ps.groups.values()}) == 3
    with pytest.raises(ValueError, match="unknown axis 'tensor'; known: tp, cp"):
        ps.group("tensor")


def test_groups_are_deduplicated(ranks):
    ranks(same_group_once, world=4)


def copies():
    ps = state(replicate=2)
    assert ps.group("dp-cp").process_group is dist.group.WORLD
    return ps.group("shard").ranks, ps.group("replicate").ranks, ps.index("shard"), ps.index("replicate")


def test_copies_of_shards_have_groups(ranks):
    assert ranks(copies, world=4) == [
        ((0, 1), (0, 2), 0, 0),
        ((0, 1), (1, 3), 1, 0),
        ((2, 3), (0, 2), 0, 1),
        ((2, 3), (1, 3), 1, 1),
    ]


def uneven_history():
    dist.new_group([0, 1])  # ranks 0 and 1 now have one group more than the others
    ps = ParallelState.build(ParallelConfig(tensor=2), device="cpu")
    x = torch.ones(1)
    parallel_state_all_reduce(x, ps)
    ps.destroy()
    return x.item()


def test_groups_of_the_users_own_do_not_disturb_ours(ranks):
    assert ranks(uneven_history, world=4) == [2.0] * 4


def two_grids():
    a, b = state(tp=2), state(tp=4)
    x, y = torch.ones(3), torch.ones(3)
    parallel_state_all_reduce(x, a)
    parallel_state_all_reduce(y, b)
    return x[0].item(), y[0].item()


def parallel_state_all_reduce(x, ps):
    from core.parallel_state.collectives import all_reduce

    all_reduce(x, ps.group("tp"))


def test_two_grids_live_side_by_side(ranks):
    assert ranks(two_grids, world=4) == [(2.0, 4.0)] * 4


def destroyed_after_its_world():
    parallel_state.initialize_model_parallel(2, device="cpu")
    known = dict(c10d._world.pg_map)
    c10d._world.pg_map.clear()  # what dist.destroy_process_group() of the world leaves
    try:
        parallel_state.destroy_model_parallel()
        assert not parallel_state.model_parallel_is_initialized()
    finally:
        c10d._world.pg_map.update(known)


def test_destroying_after_the_world_is_gone_forgets_the_state(ranks):
    ranks(destroyed_after_its_world, world=4)


def test_a_process_that_never_initialized_one_keeps_one_state():
    assert parallel_state.current_state() is parallel_state.current_state()


class Accelerator:
    """A machine with `count` devices of type cuda, of which device `chosen` is current."""

    def __init__(self, count, chosen=0):
        self.count, self.index = count, chosen

    def patch(self, monkeypatch, local_rank):
        names = {
            "is_available": lambda: True,
            "current_accelerator": lambda: torch.device("cuda"),
            "device_count": lambda: self.count,
            "current_device_index": lambda: self.index,
            "set_device_index": lambda i: setattr(self, "index", i),
        }
        for name, fn in names.items():
            monkeypatch.setattr(torch.accelerator, name, fn)
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))


@pytest.mark.parametrize(
    "count, chosen, local_rank, kind, expected",
    [(4, 0, 3, None, 3), (4, 2, 3, None, 2), (1, 0, 3, None, 0), (4, 0, 3, "cuda:1", 1), (4, 0, 3, "cuda", 3)],
)
def test_the_device_of_a_process(monkeypatch, count, chosen, local_rank, kind, expected):
    machine = Accelerator(count, chosen)
    machine.patch(monkeypatch, local_rank)
    assert parallel_state.local_device(kind) == torch.device("cuda", expected) and machine.index == expected
    assert parallel_state.local_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("kind, wanted", [(None, 5), ("cuda:7", 7)])
def test_a_device_beyond_the_machine_is_refused(monkeypatch, kind, wanted):
    Accelerator(2).patch(monkeypatch, 5)
    with pytest.raises(ValueError, match=f"wants device {wanted} of type cuda, this machine has 2; start fewer"):
        parallel_state.local_device(kind)


def meshes():
    from torch.distributed.fsdp import fully_shard

    ps = state(tp=2)
    assert ps.mesh.mesh_dim_names == ("dp", "tp")
    assert ps.mesh["tp"].get_group() is ps.group("tp").process_group
    assert ps.mesh_for("cp", "tp").shape == (1, 2)
    assert ps.mesh_for("cp").size() == 1 and ps.group("cp") is None
    model = fully_shard(torch.nn.Linear(8, 8, dtype=torch.float32), mesh=ps.mesh_for("dp"))
    model(torch.ones(2, 8, dtype=torch.float32)).sum().backward()
    return model.weight.grad.full_tensor().sum().item()


def test_the_mesh_serves_fully_shard_on_our_groups(ranks):
    assert ranks(meshes, world=4) == [pytest.approx(128.0)] * 4


def getters():
    ps = parallel_state.initialize_model_parallel(2, 1, device="cpu")
    try:
        with pytest.raises(ValueError, match="already initialized"):
            parallel_state.initialize_model_parallel()
        assert parallel_state.current_state() is ps and parallel_state.model_parallel_is_initialized()
        x = torch.ones(1)
        dist.all_reduce(x, group=parallel_state.get_tensor_model_parallel_group())
        dist.all_reduce(x, group=parallel_state.get_context_parallel_group())  # one rank: not the world
        sizes = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_data_parallel_world_size(with_context_parallel=True),
            parallel_state.get_pipeline_model_parallel_world_size(),
        )
        place = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_data_parallel_rank()
        assert parallel_state.is_pipeline_first_stage() and parallel_state.is_pipeline_last_stage()
        assert parallel_state.get_pipeline_model_parallel_next_rank() == dist.get_rank()
        return x.item(), sizes, place
    finally:
        parallel_state.destroy_model_parallel()


def test_megatron_getters(ranks):
    got = ranks(getters, world=4)
    assert got == [(2.0, (2, 2, 1), (r % 2, r // 2)) for r in range(4)]


def test_virtual_stages_are_the_schedules():
    """As Megatron's third argument."""
    with pytest.raises(ValueError, match=r"virtual_pipeline_model_parallel_size=2.*gpt_stages.*interop"):
        parallel_state.initialize_model_parallel(1, 2, 2)
    assert not parallel_state.model_parallel_is_initialized()


def uninitialized():
    with pytest.raises(ValueError, match="2 processes but no parallel state"):
        parallel_state.current_state()
    with pytest.raises(ValueError, match="world size 2 is not a multiple of tensor"):
        parallel_state.initialize_model_parallel(4)
    assert not parallel_state.model_parallel_is_initialized()
    with pytest.raises(ValueError, match=r"device meta is not served by .*cpu.*gloo"):
        ParallelState.build(ParallelConfig(tensor=2), device="meta")


def test_errors_come_before_any_group(ranks):
    ranks(uninitialized, world=2)


def test_a_single_process_creates_no_group():
    assert not dist.is_initialized()
    ps = parallel_state.initialize_model_parallel()
    try:
        assert ps.groups == {} and ps.world is None and ps.mesh is None and not dist.is_initialized()
        assert parallel_state.get_tensor_model_parallel_world_size() == 1
        assert parallel_state.get_data_parallel_group() is None
    finally:
        parallel_state.destroy_model_parallel()
    with pytest.raises(ValueError, match="world size 1 is not a multiple of tensor"):
        parallel_state.initialize_model_parallel(2)


@pytest.mark.parametrize("make", ["launch", "single", "build", "initialize"])
def test_a_device_that_is_not_there_is_refused(make):
    here = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "none"
    start = {
        "launch": lambda kind: parallel_state.launch(kind).__enter__(),
        "single": ParallelState.single,
        "build": lambda kind: ParallelState.build(device=kind),
        "initialize": lambda kind: parallel_state.initialize_model_parallel(device=kind),
    }[make]
    for kind in ("xpu" if here == "cuda" else "cuda", "warp"):
        message = f"device '{kind}' asked for, but this machine's accelerator is: {here}; use device='cpu'"
        with pytest.raises(ValueError, match=message):
            start(kind)
    assert not parallel_state.model_parallel_is_initialized()


@pytest.mark.full  # the quick start and the example run under torchrun in every `make test`
def test_launch_joins_and_leaves_under_torchrun(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        "import torch\n"
        "from core import parallel_state\n"
        "with parallel_state.launch('cpu') as device:\n"
        "    ps = parallel_state.initialize_model_parallel(2)\n"
        # a rank that has ended already is none that another, which still connects, can join
        "    torch.distributed.barrier()\n"
        # one write a line: two ranks' lines may otherwise end up in one another
        "    print(f'rank {ps.rank} tp {ps.index(\"tp\")} on {device}\\n', end='', flush=True)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert all(f"rank {r} tp {r} on cpu" in done.stdout for r in (0, 1)), done.stdout


ENTERED_BY_HAND = {
    "kept": "launched = parallel_state.launch('cpu')\nlaunched.__enter__()\n",
    # not left where the object is garbage either: the next line would find no world
    "dropped": "parallel_state.launch('cpu').__enter__()\n",
    "in a generator": "def entered():\n    with parallel_state.launch('cpu'):\n        yield\n"
    "generator = entered()\nnext(generator)\n",
}


@pytest.mark.parametrize(
    "way, ranks_of_it",
    [
        ("kept", 1),
        *thinned([(way, world) for way in ENTERED_BY_HAND for world in (2, 1)], 2, [FULL]),
    ],
)
def test_an_exception_is_the_last_word_of_a_launch_that_is_never_left(way, ranks_of_it, tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        f"from core import parallel_state\n{ENTERED_BY_HAND[way]}"
        f"parallel_state.initialize_model_parallel({ranks_of_it})\nraise KeyError('the user')\n"
    )
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *(torchrun if ranks_of_it > 1 else []), str(script)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "Exception ignored" not in done.stderr, done.stderr
    told = [line for line in done.stderr.splitlines() if "Error: " in line and "ChildFailed" not in line]
    assert told and all(line.endswith("KeyError: 'the user'") for line in told), done.stderr


@pytest.mark.parametrize("text, said", [(None, 1), ("", 1), ("4", 4), ("many", None)])
def test_how_many_processes_torchrun_started(text, said, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if text is not None:
        monkeypatch.setenv("WORLD_SIZE", text)
    if said is not None:
        assert started_processes() == said
    else:
        with pytest.raises(ValueError, match="WORLD_SIZE='many' is no number of ranks; unset it"):
            started_processes()
