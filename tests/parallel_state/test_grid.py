"""The layout of ranks is integer arithmetic: every size is tested without a process."""

import itertools
import time

import pytest

from core.parallel_state import Grid, ParallelConfig
from core.parallel_state.grid import GROUPS


def grid(world, **kw):
    return Grid(ParallelConfig(**kw).for_world(world))


CASES = [
    (8, {"tensor": 2, "pipeline": 2}),
    (16, {"tensor": 2, "pipeline": 2, "context": 2, "expert": 4}),
    (24, {"tensor": 3, "pipeline": 2, "expert": 6}),
    (16, {"tensor": 2, "pipeline": 4, "order": ("dp", "pp", "cp", "tp"), "expert": 2}),
    (12, {"tensor": 2, "context": 3, "order": ("tp", "cp", "dp", "pp")}),
    (24, {"tensor": 2, "replicate": 3, "order": ("tp", "dp", "cp", "pp")}),
]


@pytest.mark.parametrize("world, kw", CASES)
@pytest.mark.parametrize("group", GROUPS)
def test_every_group_partitions_the_world(world, kw, group):
    groups = grid(world, **kw).all_groups(group)
    assert sorted(itertools.chain(*groups)) == list(range(world))


@pytest.mark.parametrize("world, kw", CASES)
def test_axes_are_orthogonal_and_coordinates_invert(world, kw):
    g = grid(world, **kw)
    for rank in range(world):
        at = g.coordinate(rank)
        assert g.rank_at(**{a: at[a] for a in g.config.order}) == rank
        for a, b in itertools.combinations(g.config.order, 2):
            assert set(g.members(rank, a)) & set(g.members(rank, b)) == {rank}
        for axis in (*g.config.order, "ep", "edp"):
            assert g.members(rank, axis).index(rank) == at[axis]


def test_known_layout():
    g = grid(8, tensor=2, pipeline=2)
    assert g.all_groups("tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert g.all_groups("dp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert g.all_groups("pp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert g.members(0, "embedding") == (0, 4)


def test_expert_view_folds_the_ranks_of_one_stage():
    g = grid(16, tensor=2, pipeline=2, expert=4)
    assert g.all_groups("ep") == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]
    assert g.members(5, "edp") == (1, 5)


def test_middle_stages_have_no_embedding_group():
    g = grid(4, pipeline=4)
    assert [g.members(r, "embedding") for r in range(4)] == [(0, 3), (1,), (2,), (0, 3)]


@pytest.mark.parametrize("world, kw", CASES)
def test_copies_and_shards_divide_the_data_axis(world, kw):
    g = grid(world, **kw)
    copies = kw.get("replicate", 1)
    for rank in range(world):
        data, shard, replicas = (g.members(rank, name) for name in ("dp-cp", "shard", "replicate"))
        assert set(shard) & set(replicas) == {rank}
        assert sorted(r for s in shard for r in g.members(s, "replicate")) == list(data)
        assert len(replicas) == copies
        assert copies > 1 or shard == data, "one copy: no group of its own"


def test_known_copies():
    g = grid(8, replicate=2)
    assert g.all_groups("shard") == [(0, 1, 2, 3), (4, 5, 6, 7)], "the ranks of one copy are neighbours"
    assert g.all_groups("replicate") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert g.groups_of(1).keys() == {"dp", "dp-cp", "edp", "shard", "replicate"}


@pytest.mark.parametrize(
    "kw",
    [
        {"tensor": 8, "pipeline": 8, "context": 2, "expert": 16},
        {"tensor": 8, "pipeline": 16},
        {"tensor": 8, "pipeline": 8, "expert": 16, "replicate": 4},
    ],
)
def test_16384_ranks_stay_small_and_fast(kw):
    begin = time.perf_counter()
    g = grid(16384, **kw)
    for rank in (0, 5, 4097, 16383):
        groups = g.groups_of(rank)
        assert len(set(groups.values())) <= 8
        assert groups["tp"] == tuple(range(rank // 8 * 8, rank // 8 * 8 + 8)), "tensor ranks share a node"
    assert time.perf_counter() - begin < 5


def test_table_names_every_rank():
    assert grid(4, tensor=2).table() == "pp 0  dp 0  cp 0  tp 0..1: ranks 0, 1\npp 0  dp 1  cp 0  tp 0..1: ranks 2, 3"


@pytest.mark.parametrize(
    "kw, world, message",
    [
        (
            {"tensor": 4},
            6,
            r"world size 6 is not a multiple of tensor\(4\) .* = 4; the nearest world sizes are 4 or 8; "
            r"with 6 ranks tensor may be 1, 2, 3, 6",
        ),
        ({"tensor": 8}, 4, "nearest world sizes are 8"),
        ({"tensor": 2}, 1, "torchrun --standalone --nproc-per-node 2 starts that many"),
        ({"tensor": 2, "data": 3}, 8, r"data=3 x 2 model ranks is not the world size 8; leave data out or use 4"),
        ({"tensor": 2, "replicate": 3}, 8, r"replicate=3 does not divide data\(4\); valid: 1, 2, 4"),
        ({"expert": 3}, 4, r"expert=3 does not divide .* = 4; valid: 1, 2, 4"),
    ],
)
def test_a_world_that_does_not_fit_is_refused_with_the_remedy(kw, world, message):
    with pytest.raises(ValueError, match=message):
        ParallelConfig(**kw).for_world(world)


def test_all_mistakes_are_told_at_once():
    with pytest.raises(ValueError, match=r"tensor=0.*expert=-1.*order="):
        ParallelConfig(tensor=0, expert=-1, order=("pp", "tp"))


def test_copies_beside_context_parallelism_are_refused():
    with pytest.raises(
        ValueError, match=r"replicate=2 with context=2 would need more than 8 groups.*use replicate=1"
    ):
        ParallelConfig(context=2, replicate=2)
