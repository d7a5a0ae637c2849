"""Cells that tensorstore writes are read by zarr-python, and whatever is damaged is an error."""

import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import zarr

from core.dist_checkpointing.format.arrays import STORED_DTYPES
from core.dist_checkpointing.format.digest import file_crc
from core.dist_checkpointing.storage.zarr_store import Reader, Writer, _Operations
from core.parallel_state.flat import slices, whole
from tests.dist_checkpointing.places import (
    Folder,
    Memory,
    cell_files,
    described,
    flipped,
    random_array,
    write,
    write_json,
)

KEY = "model/decoder.layers.x"
LAYOUTS = {"plain": ((4, 8), None), "sharded": ((4, 8), (2, 8)), "deep": ((4, 8), (1, 4))}


def read_all(place, metadata, **options):
    reader = Reader(place, metadata, **options)
    out = {}
    for key, value in metadata.items():
        out[key] = np.empty(value["shape"], value["data_type"])
        reader.read(key, whole(value["shape"]), out[key])
    reader.finish()
    return out


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", STORED_DTYPES)
def test_zarr_python_reads_the_same_bits(dtype, layout, tmp_path):
    """Every type, an array without dims, a ragged edge; by the consolidated tree and by each array's own file."""
    cell, inner = LAYOUTS[layout]
    arrays = {KEY: random_array((11, 16), dtype), "optimizer/step": random_array((), dtype, 1)}
    metadata = {
        KEY: described(arrays[KEY], cell, inner, dtype),
        "optimizer/step": described(arrays["optimizer/step"], (), None, dtype),
    }
    write(Folder(tmp_path), arrays, metadata)
    write_json(tmp_path, metadata, {"paracore": {"format": 1}})
    assert all(same_bits(array, arrays[key]) for key, array in read_all(Folder(tmp_path), metadata).items())
    root = zarr.open_group(tmp_path, mode="r")
    assert root.metadata.consolidated_metadata is not None
    for group in (root, zarr.open_group(tmp_path, mode="r", use_consolidated=False)):
        assert all(same_bits(np.asarray(group[key][...]), array) for key, array in arrays.items())


def test_the_tree(tmp_path):
    x = random_array((4, 8), "bfloat16")
    metadata = {key: described(x, (4, 8), dtype="bfloat16") for key in (KEY, "model/y", "optimizer/exp_avg/y", "z")}
    write(Folder(tmp_path), dict.fromkeys(metadata, x), metadata)
    write_json(tmp_path, metadata, {"paracore": {"format": 1}})
    for group in (zarr.open_group(tmp_path, mode="r"), zarr.open_consolidated(tmp_path)):
        assert group.attrs["paracore"] == {"format": 1}
        assert sorted(group.group_keys()) == ["model", "optimizer"]
        assert list(group.array_keys()) == ["z"]
        assert sorted(group["model"].array_keys()) == ["decoder.layers.x", "y"]
        assert sorted(name for name, _ in group.members(max_depth=None)) == sorted(
            [*metadata, "model", "optimizer", "optimizer/exp_avg"]
        )
        assert group[KEY].attrs["torch_dtype"] == "bfloat16"
        assert same_bits(np.asarray(group[KEY]).view(ml_dtypes.bfloat16), x.view(ml_dtypes.bfloat16))


def everything(path):
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_the_same_values_are_the_same_bytes(tmp_path):
    """Other orders, other limits, other strides."""
    arrays = {"a": random_array((11, 16), "float32"), "b": random_array((6, 8), "bfloat16", 1)}
    metadata = {
        "a": described(arrays["a"], (4, 8), (2, 8)),
        "b": described(arrays["b"], (4, 8), (1, 4), "bfloat16"),
    }
    strided = {key: np.asfortranarray(array) for key, array in arrays.items()}
    spread = {key: np.repeat(array, 2, axis=1)[:, ::2] for key, array in arrays.items()}
    for name, values, options in (
        ("one", arrays, {}),
        ("two", strided, {"backwards": True, "budget_bytes": 1}),
        ("three", spread, {"durable": False, "budget_bytes": 200}),
    ):
        write(Folder(tmp_path / name), values, metadata, **options)
    assert len(everything(tmp_path / "one")) == 8
    assert everything(tmp_path / "one") == everything(tmp_path / "two") == everything(tmp_path / "three")


@pytest.mark.parametrize("value", [0.0, np.nan])
def test_cells_of_zeros_and_of_the_fill_value_are_files(value, tmp_path):
    array = np.full((8, 8), value, "float32")
    metadata = {"x": described(array, (4, 8), (2, 8))}
    write(Folder(tmp_path), {"x": array}, metadata)
    assert len(everything(tmp_path)) == 2
    assert same_bits(read_all(Folder(tmp_path), metadata)["x"], array)


def test_memory_store():
    """What is read is what was there when `finish` returned, not what the memory holds since."""
    array = random_array((11, 16), "float32")
    before, place = array.copy(), Memory()
    metadata = {"x": described(array, (11, 16)), "y": described(array, (4, 8), (2, 8))}
    write(place, {"x": array, "y": array}, metadata)
    array[:] = 0
    for out in read_all(place, metadata).values():
        assert same_bits(out, before)


def test_boxes_go_into_memory_of_any_strides(tmp_path):
    array = random_array((11, 16, 6), "float32")
    metadata = {"x": described(array, (4, 8, 6), (2, 8, 3)), "y": described(array, (4, 8, 6))}
    write(Folder(tmp_path), {"x": array, "y": array}, metadata)
    for key in metadata:
        for box in (((0, 11), (0, 16), (0, 6)), ((3, 9), (5, 12), (1, 2)), ((10, 11), (0, 1), (5, 6))):
            cut = array[slices(box)]
            for order in ((0, 1, 2), (2, 0, 1)):
                whole_memory = np.full([n + 2 for n in (cut.shape[i] for i in order)], -1, "float32")
                into = whole_memory[1:-1, 1:-1, 1:-1].transpose(np.argsort(order))
                reader = Reader(Folder(tmp_path), metadata, budget_bytes=1000)
                reader.read(key, box, into)
                reader.finish()
                np.testing.assert_array_equal(into, cut)
                into[:] = -1
                assert (whole_memory == -1).all()


class TestMisuse:
    array = random_array((11, 16), "float32")
    metadata = {"x": described(array, (4, 8), (2, 8)), "s": described(random_array((), "int64"), ())}

    @pytest.mark.parametrize(
        "box",
        [
            ((0, 2), (0, 8)),
            ((1, 5), (0, 8)),
            ((0, 8), (0, 8)),
            ((0, 4), (0, 16)),
            ((8, 12), (0, 8)),
            ((12, 16), (0, 8)),
            ((0, 0), (0, 8)),
            ((-4, 0), (0, 8)),
            ((0, 4),),
        ],
    )
    def test_only_whole_cells_are_written(self, box, tmp_path):
        writer = Writer(Folder(tmp_path), self.metadata)
        with pytest.raises(ValueError):
            writer.write("x", box, np.zeros([max(0, b - a) for a, b in box], "float32"))
        writer.finish()
        assert not everything(tmp_path)

    @pytest.mark.parametrize("box", [((0, 12), (0, 16)), ((-1, 4), (0, 8)), ((0, 4),), ((4, 4), (0, 8))])
    def test_boxes_outside_are_not_read(self, box, tmp_path):
        with pytest.raises(ValueError):
            Reader(Folder(tmp_path), self.metadata).read("x", box, np.zeros([b - a for a, b in box], "float32"))

    @pytest.mark.parametrize("memory", [np.zeros((4, 8)), np.zeros((8, 4), "f4"), np.zeros(32, "f4")])
    def test_memory_that_does_not_fit(self, memory, tmp_path):
        for call in (Reader(Folder(tmp_path), self.metadata).read, Writer(Folder(tmp_path), self.metadata).write):
            with pytest.raises(ValueError, match=r"'x': float32 of shape \(4, 8\) expected"):
                call("x", ((0, 4), (0, 8)), memory)

    def test_unknown_arrays(self, tmp_path):
        with pytest.raises(ValueError, match="no array 'w'"):
            Reader(Folder(tmp_path), self.metadata).read("w", (), np.zeros(()))

    def test_metadata_are_checked(self, tmp_path):
        for kind in (Reader, Writer):
            with pytest.raises(ValueError, match="node_type is 'group'"):
                kind(Folder(tmp_path), {"x": {**self.metadata["x"], "node_type": "group"}})


def test_a_cell_that_cannot_be_written_is_told_at_finish(tmp_path):
    array = random_array((8, 8), "float32")
    metadata = {"x": described(array, (4, 8))}
    (tmp_path / "x").write_bytes(b"")
    writer = Writer(Folder(tmp_path), metadata, budget_bytes=1)
    for box in (((0, 4), (0, 8)), ((4, 8), (0, 8)), ((0, 4), (0, 8))):
        writer.write("x", box, array[slices(box)])
    with pytest.raises(OSError, match=r"the cell x/c\.0\.0 was not written"):
        writer.finish()


DAMAGE = {
    "missing": lambda data: None,
    "empty": lambda data: b"",
    "one byte": lambda data: data[:1],
    "cut at the end": lambda data: data[:-1],
    "cut by the index": lambda data: data[:-68],
    "cut in half": lambda data: data[: len(data) // 2],
    "payload": lambda data: flipped(data, 5),
    "checksum": lambda data: flipped(data, -1),
    "index": lambda data: flipped(data, -30),
    "zeros": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_damage_is_an_error_that_names_the_cell(layout, damage, tmp_path):
    array = random_array((8, 16), "float32")
    metadata = {KEY: described(array, *LAYOUTS[layout])}
    write(Folder(tmp_path), {KEY: array}, metadata)
    path = cell_files(tmp_path, KEY, metadata[KEY])[2]
    before = file_crc(path, metadata[KEY])
    if (data := DAMAGE[damage](path.read_bytes())) is None:
        path.unlink()
    else:
        path.write_bytes(data)
    with pytest.raises(ValueError) as error:
        read_all(Folder(tmp_path), metadata)
    for part in (str(tmp_path), f"array '{KEY}'", f"cell {KEY}/c.1.0 cannot be read", "verify", "older step"):
        assert part in str(error.value)
    if damage not in ("missing", "payload") and (layout, damage) != ("plain", "index"):
        assert digest_or_error(path, metadata[KEY]) != before


def digest_or_error(path, metadata):
    try:
        return file_crc(path, metadata)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_exchanged_cells_have_another_digest(layout, tmp_path):
    """The one damage that no reader of zarr can see: each file is valid, at the wrong place."""
    array = random_array((8, 16), "float32")
    metadata = described(array, *LAYOUTS[layout])
    write(Folder(tmp_path), {"x": array}, {"x": metadata})
    one, two = cell_files(tmp_path, "x", metadata)[:2]
    digests = file_crc(one, metadata), file_crc(two, metadata)
    one.rename(tmp_path / "aside")
    two.rename(one)
    (tmp_path / "aside").rename(two)
    assert digests == (file_crc(two, metadata), file_crc(one, metadata))
    assert digests[0] != digests[1]


def test_after_a_failure_nothing_is_read_and_nothing_is_in_flight(tmp_path):
    array = random_array((8, 8), "float32")
    metadata = {"x": described(array, (4, 8))}
    write(Folder(tmp_path), {"x": array}, metadata)
    (tmp_path / "x" / "c.0.0").unlink()
    reader = Reader(Folder(tmp_path), metadata, budget_bytes=1)
    into = np.full((8, 8), -1, "float32")
    reader.read("x", ((0, 4), (0, 8)), into[:4])
    reader.read("x", ((4, 8), (0, 8)), into[4:])
    with pytest.raises(ValueError, match=r"c\.0\.0"):
        reader.finish()
    assert (into == -1).all()


class FakeFuture:
    def __init__(self, log, size):
        self.log, self.size = log, size
        log.append(size)

    def result(self):
        self.log.append(-self.size)


def test_the_budget():
    log, flight = [], _Operations(100)
    for size in (60, 30, 20, 250, 10):
        flight.start("x", size, lambda size=size: FakeFuture(log, size), None)
    assert log == [60, 30, -60, 20, -30, -20, 250, -250, 10]
    assert flight.finish() is None
    assert log[-1] == -10 and sum(log) == 0


READ = """
import re, sys, numpy as np
from core.dist_checkpointing.storage.zarr_store import Reader
from tests.dist_checkpointing.places import Folder, described
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) // 1024
into = np.ones((96, 1024, 256), "float32")
metadata = {"x": described(into, (1, 1024, 256), (1, 256, 256))}
reader = Reader(Folder(sys.argv[1]), metadata, budget_bytes=4 << 20)
before = peak()
reader.read("x", ((0, 96), (0, 1024), (0, 256)), into)
reader.finish()
print(peak() - before)
assert (into == 7).all()
"""


def test_reading_needs_little_more_memory_than_the_budget(tmp_path):
    """96 MiB under a budget of 4 MiB: far less than any way to read that makes memory of its own."""
    array = np.full((96, 1024, 256), 7, "float32")
    write(Folder(tmp_path), {"x": array}, {"x": described(array, (1, 1024, 256), (1, 256, 256))}, durable=False)
    command = [sys.executable, "-c", READ, str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 32


def test_disk_full_is_told(tmp_path):
    """A limit on the size of files stands for the disk; in a process of its own, for it cannot be lifted."""
    code = (
        "import sys, resource, signal, numpy as np\n"
        "from tests.dist_checkpointing.places import Folder, described, write\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "a = np.zeros((8, 100), 'float32')\n"
        "write(Folder(sys.argv[1]), {'x': a}, {'x': described(a, (4, 100))})\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert "OSError" in done.stderr and "the cell x/c.0.0 was not written" in done.stderr
    assert "File too large" in done.stderr
