"""Layouts tile, own exactly once, and give the same initial values on every mesh. No process."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.parallel_state import Init, Layout, mix32
from core.parallel_state.initial import fill
from core.parallel_state.layout import layout_of, set_layout, true_part


def all_coordinates(sizes):
    return [dict(zip(sizes, at, strict=True)) for at in itertools.product(*map(range, sizes.values()))]


LAYOUTS = [
    Layout((8, 6)),
    Layout((8, 6), {"tp": 0}),
    Layout((8, 4), {"tp": 1}),
    Layout((8, 6), {"cp": 0, "tp": 0}),
    Layout((3, 8, 6), {"tp": 1}),
    Layout((13, 6), {"tp": 0}, padding={0: 3}),
    Layout((5, 4), {"tp": 0}, padding={0: 11}),  # the last ranks hold padding only
    Layout((8,), partial={"tp"}),
    Layout((8, 4), {"ep": 0}),
]
SIZES = {"dp": 2, "cp": 2, "tp": 4, "ep": 2, "edp": 4, "embedding": 1}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_owners_tile_the_tensor_exactly_once(layout):
    count = torch.zeros(layout.shape, dtype=torch.int)
    expert = "ep" in layout.split
    for at in all_coordinates(SIZES):
        if expert and any(at[a] for a in ("dp", "cp", "tp")):
            continue  # the expert view covers the same ranks with its own axes
        if not expert and (at["ep"] or at["edp"]):
            continue
        if layout.owned_by(at):
            count[layout.box(at, SIZES)] += 1
    assert (count == 1).all()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_local_shape_holds_the_box(layout):
    local = layout.local_shape(SIZES)
    for at in all_coordinates(SIZES):
        assert all(s.stop - s.start <= n for s, n in zip(layout.box(at, SIZES), local, strict=True))


def test_the_last_stage_owns_what_it_does_not_repeat():
    last = {"pp": 1, "dp": 0, "cp": 0, "tp": 0, "ep": 0, "edp": 0, "embedding": 1}
    assert Layout((4,)).owned_by(last) and Layout((4, 2), {"ep": 0}).owned_by(last)
    assert not Layout((4,), partial={"embedding"}).owned_by(last)


def test_layouts_are_values():
    a, b = Layout((4, 2), {"tp": 0}, padding={0: 0}), Layout([4, 2], {"tp": 0})
    assert a == b and hash(a) == hash(b) and len({a, b}) == 1
    assert a != Layout((4, 2), {"tp": 1})


def test_gradient_groups_are_derived():
    assert Layout((4,)).gradient_groups == ("dp-cp",)
    assert Layout((4,), partial={"tp"}).gradient_groups == ("dp-cp", "tp")
    assert Layout((4,), {"ep": 0}).gradient_groups == ("edp",)
    assert layout_of(torch.zeros(3, 2)) == Layout((3, 2)), "a foreign parameter is replicated"


def test_wrong_layouts_are_refused():
    with pytest.raises(ValueError, match="cannot both split"):
        Layout((4,), {"tp": 0}, partial={"tp"})
    with pytest.raises(ValueError, match="does not exist"):
        Layout((4,), {"tp": 1})
    with pytest.raises(ValueError, match=r"dim 0 of \(6,\) does not divide over tp=4"):
        Layout((6,), {"tp": 0}).local_shape({"tp": 4})


def initial(layout, sizes, at, name="w", seed=3):
    local = torch.full(layout.local_shape(sizes), float("nan"))
    set_layout(local, layout)
    fill(local, name, Init(std=0.02, mean=1.0), seed=seed, coordinate=at, sizes=sizes)
    return local


@pytest.mark.parametrize(
    "layout",
    [
        Layout((96, 20), {"tp": 0}),
        Layout((20, 96), {"tp": 1}),
        Layout((2, 48, 10), {"tp": 1}),
        Layout((8, 5, 4, 6), {"tp": 0}),
        Layout((93, 7), {"tp": 0}, padding={0: 3}),
        Layout((16,), {"tp": 0}),
    ],
    ids=str,
)
@pytest.mark.parametrize("tp", [2, 4])
def test_initial_values_do_not_depend_on_the_layout(layout, tp, monkeypatch):
    monkeypatch.setattr("core.parallel_state.initial.DRAW_BLOCK", 64)  # many blocks, some cut by the split
    whole = torch.cat([initial(Layout(layout.shape), {"tp": 1}, {"tp": 0}).flatten()]).view(layout.shape)
    assert whole.std() > 0.005 and abs(whole.mean() - 1) < 0.01
    for rank in range(tp):
        at, sizes = {"tp": rank}, {"tp": tp}
        local = initial(layout, sizes, at)
        assert torch.equal(true_part(local, layout, at, sizes), whole[layout.box(at, sizes)])
        assert local.sum().isfinite()
    if layout.padding:
        assert (local[layout.box(at, sizes)[0].stop - layout.box(at, sizes)[0].start :] == 0).all()


def test_names_seeds_and_blocks_draw_different_values(monkeypatch):
    layout = Layout((32, 4))
    draw = [initial(layout, {}, {}, name, seed) for name in ("a", "b") for seed in (1, 2)]
    monkeypatch.setattr("core.parallel_state.initial.DRAW_BLOCK", 64)
    draw.append(initial(layout, {}, {}, "a", 1))
    assert len({t.sum().item() for t in draw}) == 5
    assert not torch.equal(draw[-1][:16], draw[-1][16:])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 2**70), min_size=1, max_size=3))
def test_mix32_fits_and_depends_on_every_part(parts):
    seed = mix32(*parts)
    assert 0 <= seed < 2**32
    assert seed == mix32(*parts)
    assert seed != mix32(*parts, 0)


def test_mix32_does_not_collide_where_packing_would():
    seeds = {mix32(1, step, m, layer) for step in range(20) for m in range(20) for layer in range(20)}
    assert len(seeds) == 8000
    assert mix32(1) != mix32(1 + 2**32)
