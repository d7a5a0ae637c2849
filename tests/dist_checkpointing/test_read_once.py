"""Replicas read each byte once and pass it on: the bits are those that each reads for itself; counted, and told."""

import shutil
from unittest import mock

import numpy as np
import pytest
import torch

from core.dist_checkpointing import CheckpointManager, ShardedTensor, load
from core.dist_checkpointing.format.arrays import STORED_DTYPES
from core.dist_checkpointing.planning.ranks import DamagedCheckpoint
from core.dist_checkpointing.reading import direct, loading, read_once
from core.dist_checkpointing.writing.saving import Saver
from core.parallel_state import ParallelState
from core.parallel_state.collectives import barrier
from core.parallel_state.flat import extent, slices, whole
from tests.dist_checkpointing import small
from tests.dist_checkpointing.meshes import SMALL, Mesh, random_arrays, small_cells
from tests.dist_checkpointing.test_plan import CUT, HALVES
from tests.states import state as parallel

STATES = ("optimizer/main/", "optimizer/exp_avg/")
LAYOUTS = {
    "dp 4": Mesh(dp=4),
    "dp 4, zero": Mesh(dp=4, **CUT),
    "tp 2, dp 2, zero": Mesh(tp=2, dp=2, **CUT),
    "pp 2, dp 2, zero": Mesh(dp=2, stages=HALVES, **CUT),
    "tp 2, pp 2": Mesh(tp=2, stages=HALVES),
    "tp 4": Mesh(tp=4),
}


def values():
    """Random bits in each array; no NaN, whose payload a conversion to bf16 may change."""
    return {key: np.nan_to_num(value) for key, value in random_arrays(SMALL.arrays(STATES)).items()}


def parts(prefix, held, infos, dtype, fill=None):
    return {
        f"{prefix}{key}": [
            ShardedTensor(
                f"{prefix}{key}",
                torch.full(extent(box), -1.0, dtype=dtype) if fill is None else fill[key][slices(box)].to(dtype),
                infos[key].shape,
                tuple(start for start, _ in box),
                tp_dim=infos[key].tp_dim,
            )
            for box in boxes
        ]
        for key, boxes in held.items()
    }


def template(layout, rank):
    """What one rank of a layout loads into: weights whole, states as ZeRO cuts them."""
    infos = SMALL.arrays(STATES)
    held = layout.holdings(SMALL, STATES)[rank]
    weights = Mesh(tp=layout.tp, dp=layout.dp, stages=layout.stages).holdings(SMALL)[rank]
    return {
        "states": parts("", held, infos, torch.float32),
        "weights": parts("model/", weights, SMALL.arrays(), torch.bfloat16),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with the checkpoint `x` in many small cells, which nobody changes."""
    root, found, infos = tmp_path_factory.mktemp("once"), values(), SMALL.arrays(STATES)
    tensors = {key: torch.from_numpy(value) for key, value in found.items()}
    held = {key: (whole(info.shape),) for key, info in infos.items()}
    weights = {key: (whole(info.shape),) for key, info in SMALL.arrays().items()}
    mains = {key: tensors[STATES[0] + key] for key in weights}
    state = {"states": parts("", held, infos, torch.float32, tensors)}
    state["weights"] = parts("model/", weights, SMALL.arrays(), torch.bfloat16, mains)
    with small_cells():
        Saver(str(root), ParallelState.single("cpu"), durable=False).save("x", state)
    return root


class Count:
    """Bytes that this process reads of cells, in several threads, by the reader of local files."""

    def __init__(self):
        self.sizes, self._read = [], direct._read_all

    def __call__(self, descriptor, buffers, offset):
        self.sizes.append(sum(map(len, buffers)))  # a sum would lose what two threads add at once
        self._read(descriptor, buffers, offset)


def tensors_of(made):
    return [(part.key, part.box, part.data) for kind in made.values() for held in kind.values() for part in held]


def load_both(root, layout, fast):
    """Both ways on one rank: bytes read by each. The bits are those that were saved."""
    world = layout.size()
    ps, expected, read = parallel(tp=layout.tp, pp=max(1, len(layout.stages))), values(), {}
    assert ps.config.world_size == world
    for share in (True, False):
        made, count = template(layout, ps.rank), Count()
        with mock.patch.object(direct, "FAST", fast), mock.patch.object(direct, "_read_all", count):
            load(made, f"{root}/x", ps=ps, share_reads=share)
        read[share] = sum(count.sizes)
        for key, box, data in tensors_of(made):
            if key.startswith("model/"):
                main = torch.from_numpy(expected[STATES[0] + key.removeprefix("model/")][slices(box)])
                assert torch.equal(data.view(torch.int16), main.to(torch.bfloat16).view(torch.int16)), (key, box)
            else:
                assert data.numpy().tobytes() == np.ascontiguousarray(expected[key][slices(box)]).tobytes()
    return read[True], read[False]


def state_bytes():
    return sum(value.nbytes for value in values().values())


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(m, id=n, marks=[] if n in ("dp 4, zero", "tp 2, pp 2") else pytest.mark.full)
        for n, m in LAYOUTS.items()
    ],
)
@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.full)])
def test_the_same_bits_as_when_each_reads_for_itself(ranks, saved, layout, fast):
    found = ranks(load_both, str(saved), layout, fast, world=layout.size())
    if fast and direct.FAST:
        once, each = map(sum, zip(*found, strict=True))
        assert once <= 1.1 * state_bytes() and once < each


@pytest.mark.skipif(not direct.FAST, reason="what is counted is the reader of local files")
def test_replicas_read_the_state_once(ranks, saved):
    """Eight of them: `test_read_plan`."""
    found = ranks(load_both, str(saved), Mesh(dp=4), True, world=4)
    once, each = map(sum, zip(*found, strict=True))
    state = state_bytes()
    assert state <= once <= 1.1 * state
    assert each >= 4 * state
    assert max(one for one, _ in found) <= 1.5 * state / 4, "evenly"


def different(root):
    """Rank 0 wants an array whole and a part of another, rank 1 two of its parts, one in the other, rank 2 none."""
    ps, expected = parallel(tp=3), values()
    up = STATES[0] + "up"
    shape = expected[up].shape
    boxes = {
        0: {STATES[1] + "norm": [whole(expected[STATES[1] + "norm"].shape)], up: [((0, 3), *whole(shape[1:]))]},
        1: {up: [((2, 5), *whole(shape[1:])), ((2, 4), (0, 1), *whole(shape[2:]))]},
        2: {},
    }[ps.rank]
    made = parts("", boxes, SMALL.arrays(STATES), torch.float32)
    state, report = load(made, f"{root}/x", ps=ps, strict="report", share_reads=True)
    for held in made.values():
        for part in held:
            wanted = np.ascontiguousarray(expected[part.key][slices(part.box)])
            assert part.data.numpy().tobytes() == wanted.tobytes(), (part.key, part.box)
    return len(report.unexpected), sorted(state)


def test_ranks_that_want_different_things(ranks, saved):
    found = ranks(different, str(saved), world=3)
    assert len({unexpected for unexpected, _ in found}) == 1
    assert [len(keys) for _, keys in found] == [2, 1, 0]


def damaged(root, fast):
    ps = parallel()
    with mock.patch.object(direct, "FAST", fast), pytest.raises(DamagedCheckpoint) as told:
        load(template(Mesh(dp=4, **CUT), ps.rank), f"{root}/x", ps=ps, share_reads=True)
    return str(told.value)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


def exchange_with_another(path):
    """Both valid by themselves: the manifest alone tells."""
    other = next(p for p in sorted(path.parent.glob("c.*")) if p != path and p.stat().st_size == path.stat().st_size)
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("harm", [flip, exchange_with_another, pytest.param(lambda path: path.unlink(), id="delete")])
def test_what_one_rank_finds_damaged_is_told_to_all(ranks, saved, tmp_path, harm, fast):
    """By the rank that read it: no other one touches that file, and none waits."""
    shutil.copytree(saved / "x", tmp_path / "x")
    cell = sorted((tmp_path / "x" / STATES[0] / "embedding").glob("c.*"))[1]
    harm(cell)
    found = ranks(damaged, str(tmp_path), fast, world=4)
    assert all(f"{STATES[0]}embedding/c." in text for text in found), found
    if harm is flip:  # of two files exchanged there may be two readers
        (guilty,) = [n for n, text in enumerate(found) if not text.startswith("rank ")]
        assert all(text == f"rank {guilty}: {found[guilty]}" for n, text in enumerate(found) if n != guilty)


def every_dtype():
    """Random bits as tensors of every dtype that can be stored, one without dims among them."""
    found = {}
    for name in STORED_DTYPES:
        dtype = getattr(torch, name)
        bits = np.random.default_rng(0).integers(0, 2 if name == "bool" else 256, 6 * dtype.itemsize, np.uint8)
        found[name] = torch.from_numpy(bits).view(dtype).reshape(2, 3)
        found[f"{name} alone"] = found[name][0, 0].clone()
    return found


def loads_every_dtype(root):
    expected = every_dtype()
    found = {name: torch.zeros_like(value) for name, value in expected.items()}
    load(found, f"{root}/x", ps=parallel(tp=2), share_reads=True)
    return [name for name in found if bits_of(found[name]) != bits_of(expected[name])]


def bits_of(tensor):
    return tensor.reshape(-1).view(torch.uint8).tolist()


def test_every_dtype_travels_as_it_is(ranks, tmp_path, single):
    Saver(str(tmp_path), single, durable=False).save("x", every_dtype())
    assert ranks(loads_every_dtype, str(tmp_path), world=2) == [[], []]


def own_directory(root):
    """Each rank has another checkpoint under what may be one name on two hosts."""
    ps = parallel(tp=2)
    path, made = f"{root}/{ps.rank}", {"w": torch.zeros(3)}
    Saver(path, ParallelState.single("cpu"), durable=False).save("x", {"w": torch.full((3,), ps.rank + 1.0)})
    with pytest.raises(DamagedCheckpoint, match=r"rank 0 opened the checkpoint .*, rank 1 .*share_reads=False"):
        load(made, f"{path}/x", ps=ps)
    assert not made["w"].any()
    assert load(made, f"{path}/x", ps=ps, share_reads=False)["w"].tolist() == [ps.rank + 1.0] * 3


def test_ranks_that_open_different_checkpoints(ranks, tmp_path):
    ranks(own_directory, str(tmp_path), world=2)


def by_default(root):
    """Whether ranks on one host, and on two, read for each other."""
    ps, shared = parallel(tp=2), []
    if ps.rank == 0:
        Saver(root, ParallelState.single("cpu"), durable=False).save("x", {"w": torch.ones(3)})
    barrier(ps.world)
    for hosts in ("abc", "abc"), ("abc", "def"):
        with (
            mock.patch.object(loading.socket, "gethostname", lambda name=hosts[ps.rank]: name),
            mock.patch.object(loading, "read_once", lambda *told, h=hosts, **more: shared.append(h)),
        ):
            load({"w": torch.zeros(3)}, f"{root}/x", ps=ps)
    return shared


def test_one_host_s_page_cache_reads_for_all_its_ranks(ranks, tmp_path):
    assert ranks(by_default, str(tmp_path), world=2) == [[("abc", "def")]] * 2


def by_a_manager(root):
    ps, shared = parallel(tp=2), []
    real = read_once.read_once
    for share in (True, False):
        manager = CheckpointManager(root, ps=ps, share_reads=share)
        if share:
            manager.save(1, small.state(1, ps.rank, 2))
        with mock.patch.object(
            loading, "read_once", lambda *told, **more: shared.append(share) or real(*told, **more)
        ):
            for act in (manager.load_latest, lambda made, m=manager: m.load(1, made)):
                made = small.state(1, ps.rank, 2, empty=True)
                act(made)
                small.assert_holds(made, 1)
        manager.close()
    return shared


def test_a_manager_shares_unless_it_is_told_not_to(ranks, tmp_path):
    assert ranks(by_a_manager, str(tmp_path), world=2) == [[True, True]] * 2


def test_a_single_process_reads_as_ever(saved, single):
    made = template(Mesh(), 0)
    with mock.patch("core.dist_checkpointing.reading.loading.read_once") as never:
        load(made, saved / "x", ps=single, share_reads=True)
    assert not never.called
    assert all((data != -1).any() for _, _, data in tensors_of(made))
