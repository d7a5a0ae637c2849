"""Straight reads and writes against their twins, tensorstore's: the same values, bytes and damage."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.dist_checkpointing.format.arrays import ArrayInfo
from core.dist_checkpointing.format.digest import file_crc
from core.dist_checkpointing.format.grid import cell_name, cells
from core.dist_checkpointing.format.zarr_metadata import Chunking, array_metadata
from core.dist_checkpointing.reading import direct
from core.dist_checkpointing.reading.direct import DirectReader, fastest_reader
from core.dist_checkpointing.storage.checkpoint_dir import open_dir
from core.dist_checkpointing.storage.zarr_store import Reader, Writer
from core.dist_checkpointing.writing.direct_write import DirectWriter
from core.parallel_state.flat import slices

# shape, dtype, cell, piece: plain, sharded in rows and in columns, short last cells, no dims, one byte per element
ARRAYS = {
    "plain": ((6, 10), "float32", (3, 10), None),
    "rows": ((16, 12), "float32", (8, 12), (2, 12)),
    "columns": ((8, 24), "bfloat16", (4, 12), (4, 3)),
    "ragged": ((23, 5), "float64", (8, 5), (2, 5)),
    "deep": ((3, 4, 6), "int32", (1, 4, 6), (1, 2, 6)),
    "none": ((), "float32", (), None),
    "truth": ((9, 4), "bool", (9, 4), None),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(place, metadata, values, files) of a few arrays."""
    place = open_dir(tmp_path_factory.mktemp("direct"))
    random = np.random.default_rng(0)
    metadata = {
        k: array_metadata(ArrayInfo(shape, dtype), cell, piece) for k, (shape, dtype, cell, piece) in ARRAYS.items()
    }
    values, writer = {}, Writer(place, metadata, durable=False)
    for key, found in metadata.items():
        chunks = Chunking.from_metadata(found)
        values[key] = random.integers(0, 2 if key == "truth" else 1000, chunks.shape).astype(chunks.data_type)
        for _, box in cells(chunks.shape, chunks.cell):
            writer.write(key, box, values[key][(*slices(box), ...)])
    writer.finish()
    files = {name: file_crc(place.url + name, metadata[name.rpartition("/")[0]]) for name in place.names()}
    return place, metadata, values, files


@st.composite
def boxes(draw):
    key = draw(st.sampled_from(sorted(ARRAYS)))
    ends = [sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True))) for n in ARRAYS[key][0]]
    return key, tuple(map(tuple, ends)), draw(st.booleans())


@settings(max_examples=150, deadline=None)
@given(boxes())
def test_any_box_is_read_as_by_the_twin(saved, drawn):
    place, metadata, values, files = saved
    key, box, strided = drawn
    shape = tuple(b - a for a, b in box)
    found = []
    for reader in (
        DirectReader(place, metadata, files),
        DirectReader(objects(saved), metadata, files),
        Reader(place, metadata),
    ):
        wide = np.zeros((*shape[:-1], shape[-1] * 2) if strided and shape else shape, metadata[key]["data_type"])
        into = wide[..., ::2] if strided and shape else wide
        reader.read(key, box, into)
        reader.finish()
        found.append(into)
        if strided and shape:
            assert not wide[..., 1::2].any(), "written beside its place"
    assert (
        np.array_equal(found[0], found[2])
        and np.array_equal(found[1], found[2])
        and np.array_equal(found[0], values[key][(*slices(box), ...)])
    )


def objects(saved):
    """The same files as objects of a key-value store."""
    place, _, _, files = saved
    store = open_dir("memory://direct")
    if not store.names():
        store.write_all({name: Path(place.url, name).read_bytes() for name in files})
    return store


def all_of(reader, metadata):
    read = {key: np.zeros(found["shape"], found["data_type"]) for key, found in metadata.items()}
    for key, into in read.items():
        reader.read(key, tuple((0, n) for n in into.shape), into)
    reader.finish()
    return read


@pytest.mark.parametrize("most", [1, 7, 50])
def test_a_system_call_may_read_less(saved, monkeypatch, most):
    place, metadata, values, files = saved
    real = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda file, buffers, offset: real(file, [memoryview(buffers[0])[:most]], offset)
    )
    read = all_of(DirectReader(place, metadata, files), metadata)
    assert all(np.array_equal(read[key], values[key]) for key in values)


def test_long_cells_take_several_calls(saved, monkeypatch):
    place, metadata, values, files = saved
    monkeypatch.setattr(direct, "_MAX_BUFFERS", 2)
    read = all_of(DirectReader(place, metadata, files), metadata)
    assert all(np.array_equal(read[key], values[key]) for key in values)


@pytest.mark.parametrize("change", ["flip", "cut", "longer", "empty", "gone", "swapped"])
def test_damage_is_named(saved, tmp_path, change):
    """Every cell in turn; whatever the twin refuses is refused too, and by the manifest also what it cannot see."""
    place, metadata, _, files = saved
    for name in files:
        data = Path(place.url, name).read_bytes()
        sibling = next((n for n in files if n != name and files[n][0] == files[name][0]), None)
        path = Path(place.url, name)
        if change == "swapped" and (sibling is None or files[sibling] == files[name]):
            continue
        middle = len(data) // 2
        damaged = {
            "flip": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
            "cut": data[:-1],
            "longer": data + b"x",
            "empty": b"",
            "gone": None,
            "swapped": Path(place.url, sibling).read_bytes() if sibling else None,
        }[change]
        path.unlink()
        store = open_dir("memory://damaged")
        store.remove_all()
        store.write_all({n: Path(place.url, n).read_bytes() for n in files if n != name})
        try:
            if damaged is not None:
                path.write_bytes(damaged)
                store.write(name, damaged)
            for where in (place, store):
                with pytest.raises(ValueError, match=name.replace(".", r"\.")):
                    all_of(DirectReader(where, metadata, files), metadata)
            key = name.rpartition("/c")[0]
            if change != "flip":  # of an object a small part is asked for; the index and the digest tell the rest
                corner = tuple((0, 1) for _ in metadata[key]["shape"])
                into = np.zeros([1] * len(corner), metadata[key]["data_type"])
                reader = DirectReader(store, metadata, files)
                if name == f"{key}/{cell_name((0,) * len(corner))}":
                    reader.read(key, corner, into)
                    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
                        reader.finish()
        finally:
            path.write_bytes(data)


def test_which_reader_it_is(saved, monkeypatch):
    place, metadata, _, files = saved
    assert isinstance(fastest_reader(place, metadata, files, budget_bytes=1 << 20), DirectReader)
    assert isinstance(fastest_reader(open_dir("memory://x"), metadata, files, budget_bytes=1 << 20), DirectReader)
    monkeypatch.setattr(direct, "FAST", False)
    assert isinstance(fastest_reader(place, metadata, files, budget_bytes=1 << 20), Reader)


def test_a_file_that_the_manifest_does_not_name(saved):
    place, metadata, _, files = saved
    with pytest.raises(ValueError, match=r"plain/c\.0\.0 is not in the manifest"):
        all_of(DirectReader(place, metadata, {n: e for n, e in files.items() if n != "plain/c.0.0"}), metadata)


def written(kind, place, saved, *, strided=False, durable=False):
    """Every cell of all arrays by one writer, from memory in one stretch or in columns."""
    _, metadata, values, _ = saved
    writer = kind(place, metadata, durable=durable, budget_bytes=1 << 10)
    for key, value in values.items():
        chunks = Chunking.from_metadata(metadata[key])
        wide = np.repeat(value, 2, axis=-1)[..., ::2] if strided and value.shape else value
        for _, box in cells(chunks.shape, chunks.cell):
            writer.write(key, box, wide[(*slices(box), ...)])
    writer.finish()
    return writer


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("durable", [False, True])
def test_the_same_bytes_as_by_the_twin(saved, tmp_path, strided, durable):
    place = open_dir(tmp_path)
    writer = written(DirectWriter, place, saved, strided=strided, durable=durable)
    assert place.names() == saved[0].names()
    for name in place.names():
        assert place.read(name) == saved[0].read(name), name
    assert writer.entries.items() <= saved[3].items() and len(writer.entries) > len(saved[3]) / 2


def test_a_system_call_may_write_less(saved, tmp_path, monkeypatch):
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda file, buffers, at: real(file, [memoryview(buffers[0])[:7]], at))
    place = open_dir(tmp_path)
    written(DirectWriter, place, saved)
    assert all(place.read(name) == saved[0].read(name) for name in place.names())


def test_a_write_that_fails_is_told_at_the_end_and_ends_the_rest(saved, tmp_path, monkeypatch):
    def full(file, buffers, at):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match=r"the cell \S+ was not written: .*No space left") as error:
        written(DirectWriter, open_dir(tmp_path), saved)
    assert error.value.errno == errno.ENOSPC


def test_a_cell_is_written_once(saved, tmp_path):
    """Two ranks that both think they own it are a bug that must not pass."""
    written(DirectWriter, open_dir(tmp_path), saved)
    with pytest.raises(OSError, match="File exists"):
        written(DirectWriter, open_dir(tmp_path), saved)


@pytest.mark.parametrize("change", ["box", "shape", "dtype", "key"])
def test_what_is_no_cell_is_refused(saved, tmp_path, change):
    _, metadata, values, _ = saved
    writer = DirectWriter(open_dir(tmp_path), metadata, durable=False, budget_bytes=1 << 20)
    key, box, array = "plain", ((0, 3), (0, 10)), values["plain"][:3]
    if change == "box":
        box = ((1, 4), (0, 10))
    elif change == "shape":
        array = array.T
    elif change == "dtype":
        array = array.astype("int32")
    else:
        key = "nothing"
    with pytest.raises(ValueError):
        writer.write(key, box, array)
    writer.finish()
