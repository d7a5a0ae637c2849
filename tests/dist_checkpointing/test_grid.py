"""The grid: canonical, bounded, cut where tensor parallelism cuts."""

from math import prod

import numpy as np
import pytest
import zarr
from hypothesis import example, given
from hypothesis import strategies as st

from core.dist_checkpointing.format.arrays import ArrayInfo
from core.dist_checkpointing.format.grid import (
    MAX,
    MIN,
    cell_name,
    cell_of,
    cell_shape,
    cells,
    inner_shape,
    read_bytes,
)
from core.parallel_state.flat import volume, whole
from tests.dist_checkpointing.meshes import GPT_7B, GPT_70B, GPT_124M, Mesh

DIMS = st.integers(0, 4)
LARGE = st.one_of(st.integers(1, 70), st.sampled_from([768, 1003, 4096, 11008, 50257, 128257, 131071]))


@st.composite
def arguments(draw, sizes=LARGE, dims=DIMS):
    shape = tuple(draw(sizes) for _ in range(draw(dims)))
    stacked = bool(shape) and draw(st.booleans())
    of_layer = range(int(stacked), len(shape))
    tp_dim = draw(st.sampled_from([None, *of_layer]))
    return shape, tp_dim, stacked, tp_dim is not None and draw(st.booleans())


def round_up(n, unit):
    return -(-n // unit) * unit


def names_of(arrays):
    return [cell_name(index) for info in arrays.values() for index, _ in cells(info.shape, cell_of(info))]


def test_cells_of_real_models_are_those_of_the_prototype():
    assert len(names_of(GPT_7B.arrays())) == 2371
    assert len(names_of(GPT_70B.arrays())) == 19075


@pytest.mark.parametrize(
    ("shape", "tp_dim", "stacked", "expected"),
    [
        ((80, 8192), None, True, (80, 8192)),  # 2.5 MiB of norms: one file, not 80
        ((12, 12, 3, 64, 768), 1, True, (1, 3, 3, 64, 768)),  # 12 heads: 4 parts, so that 2 and 4 ranks fit
        ((12, 768, 768), 2, True, (1, 768, 192)),  # 8 parts would be smaller than 512 KiB
        ((32, 2, 11008, 4096), 2, True, (1, 1, 688, 4096)),  # gate and up share no cell; 1376 rows are too many
        ((32, 4096, 11008), 2, True, (1, 2048, 1376)),  # columns in 8, rows until 16 MiB
        ((2, 256, 512), 1, False, (2, 256, 512)),  # cut at dim 1, gate and up apart: too small
        ((100, 200_000), None, True, (20, 200_000)),  # layers per cell divide the stack
        ((), None, False, ()),
    ],
)
def test_rules(shape, tp_dim, stacked, expected):
    assert cell_shape(shape, tp_dim, stacked=stacked) == expected


@given(arguments(sizes=st.integers(1, 9)), st.data())
def test_cells_partition_the_array_and_a_box_finds_those_it_touches(args, data):
    shape = args[0]
    cell = tuple(data.draw(st.integers(1, n + 1)) for n in shape)
    box = tuple(
        (start, data.draw(st.integers(start + 1, n))) for n in shape for start in [data.draw(st.integers(0, n - 1))]
    )
    count, touched = np.zeros(shape, int), set()
    for index, found in cells(shape, cell):
        at = tuple(slice(*interval) for interval in found)
        assert all(start == i * size for i, size, (start, _) in zip(index, cell, found, strict=True))
        inside = np.zeros(shape, bool)
        inside[tuple(slice(*interval) for interval in box)] = True
        count[at] += 1
        if inside[at].any():
            touched.add((index, found))
    assert (count == 1).all()
    assert set(cells(shape, cell, box)) == touched


@given(arguments())
@example(((128257, 4096), None, False, False))  # a prime number of rows
@example(((10_000_019,), None, False, False))
@example(((8 * 16001, 4096), 0, False, False))
def test_cells_are_bounded_from_both_sides(args):
    shape, tp_dim, stacked, ragged = args
    cell = cell_shape(shape, tp_dim, stacked=stacked, ragged=ragged)
    assert len(cell) == len(shape) and all(size >= 1 for size in cell)
    assert prod(cell) <= MAX
    layer = prod(shape[stacked:])
    if layer >= MIN:
        assert not stacked or cell[0] == 1
        assert prod(cell) >= MIN // 2
    else:
        assert prod(cell[stacked:]) >= layer
    if inner := inner_shape(cell):
        assert prod(cell) > MIN and prod(inner) <= MIN
        assert all(size % part == 0 for size, part in zip(cell, inner, strict=True))
        strides = [prod(cell[dim + 1 :]) for dim in range(len(cell))]
        assert sum((part - 1) * stride for part, stride in zip(inner, strides, strict=True)) + 1 == prod(inner)
    else:
        assert prod(cell) <= MIN


@given(st.integers(0, 2), st.sampled_from([64, 512, 1024, 4096]), st.sampled_from([32, 768, 4096]), st.booleans())
def test_edges_of_2_4_and_8_ranks_are_edges_of_cells(kind, n, other, stacked):
    shape, tp_dim = [((n, other), 0), ((other, n), 1), ((2, n, other), 1)][kind]
    cell = cell_shape((6, *shape) if stacked else shape, tp_dim + stacked, stacked=stacked)[stacked:]
    sizes = [tp for tp in (1, 2, 4, 8) if prod(shape) >= tp * MIN * (2 if kind == 2 else 1)]
    for tp in sizes:
        assert n // tp % cell[tp_dim] == 0
        assert tp == 1 or kind != 2 or cell[0] == 1


@given(st.integers(1, 3000), st.sampled_from([64, 1024, 4096]))
def test_a_ragged_dim_that_divides_is_an_ordinary_one(eighths, width):
    shape = (128 * eighths, width)
    assert cell_shape(shape, 0, ragged=True) == cell_shape(shape, 0)


@pytest.mark.parametrize("width", [768, 4096])
@pytest.mark.parametrize("rows", [32000, 49152, 50257, 100277, 128256, 256000, 262144])
def test_padded_shards_of_a_vocabulary_end_where_cells_end(rows, width):
    cell = cell_shape((rows, width), 0, ragged=True)
    eighth = round_up(-(-rows // 8), 16)
    assert cell[1] == width and all(8 * eighth // tp % cell[0] == 0 for tp in (1, 2, 4, 8))


def test_a_vocabulary_whose_eighth_does_not_divide_has_few_files_all_the_same():
    rows, width = 151936, 4096  # 8 * 16 * 1187: cells of 16 rows would be 9496 files
    assert cell_shape((rows, width), 0, ragged=True) == (1008, width)


def test_the_vocabulary_of_gpt2():
    assert cell_shape((50257, 768), 0, ragged=True) == (3144, 768)  # half of 6288 = roundup(50257 / 8, 16)
    assert cell_shape((50257, 768), 0, ragged=True, tp_sizes=3) == (4192, 768)
    assert cell_shape((1003, 64), 0, ragged=True) == (1008, 64)


@pytest.mark.parametrize(("shape", "tp_dim"), [((50257, 32), 0), ((3, 40, 700), 2), ((7, 300), None), ((), None)])
def test_names_are_those_of_zarr(shape, tp_dim):
    cell = cell_shape(shape, tp_dim, stacked=len(shape) == 3, ragged=shape == (50257, 32))
    store = zarr.storage.MemoryStore()
    inner = inner_shape(cell)
    array = zarr.create_array(
        store,
        shape=shape,
        dtype="uint8",
        chunks=inner or cell,
        shards=cell if inner else None,
        chunk_key_encoding={"name": "default", "separator": "."},
    )
    array[...] = np.ones(shape, "uint8")
    assert {key for key in store._store_dict if key != "zarr.json"} == {cell_name(i) for i, _ in cells(shape, cell)}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (((4, 0, 3), None, False), r"dim 1 of \(4, 0, 3\) has size 0.*leave"),
        (((4, 3), 2, False), r"dim 2 does not fit the shape \(4, 3\) without a stack axis"),
        (((4, 3), 0, True), r"dim 0 does not fit the shape \(4, 3\) with a stack axis"),
        (((), None, True), r"does not fit the shape \(\) with a stack axis"),
    ],
)
def test_refusals(args, message):
    shape, tp_dim, stacked = args
    with pytest.raises(ValueError, match=message):
        cell_shape(shape, tp_dim, stacked=stacked)


def test_reading_counts_each_piece_once():
    info = ArrayInfo((4, 1024, 1024), "bfloat16", 1, True)  # in eight parts of 512 KiB
    assert cell_of(info) == (1, 128, 1024) and inner_shape(cell_of(info)) is None
    box = ((1, 3), (125, 130), (0, 1))
    assert read_bytes(info, [box]) == (2 * 5 * 2, 4 * 128 * 1024 * 2)
    assert read_bytes(info, [box, box]) == (2 * 2 * 5 * 2, 4 * 128 * 1024 * 2)
    whole_array = [whole(info.shape)]
    assert read_bytes(info, whole_array) == (volume(*whole_array) * 2,) * 2
    sharded = ArrayInfo((2048, 1024), "float32")
    assert inner_shape(cell_of(sharded)) == (256, 1024)
    assert read_bytes(sharded, [((255, 257), (0, 1024))]) == (2 * 4096, 2 * 2**20)


def amplification(model, mesh):
    arrays = model.arrays()
    figures = [read_bytes(arrays[key], boxes) for held in mesh.holdings(model) for key, boxes in held.items()]
    needed, read = map(sum, zip(*figures, strict=True))
    return read / needed


@pytest.mark.parametrize("model", [GPT_124M, GPT_7B])
def test_equal_cuts_of_buckets_read_little_more_than_they_need(model):
    assert 1 < amplification(model, Mesh(dp=8, zero=True)) <= 1.10


@pytest.mark.parametrize(("model", "most"), [(GPT_124M, 1.01), (GPT_7B, 1.0)])
def test_tensor_parallel_shards_read_what_they_need(model, most):
    """At 124M the attention's output is too small for 4 parts, so 4 ranks read it twice; the rest is exact, but for
    the vocabulary's last piece, which is stored in full."""
    assert amplification(model, Mesh(tp=2)) < 1.001
    assert 1 <= amplification(model, Mesh(tp=4)) <= most
