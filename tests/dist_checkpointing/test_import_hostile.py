"""Directories that `import` must not trust: pickles that run code, damage, sizes that are not there."""

import ast
import io
import random
import tracemalloc
import zipfile
from pathlib import Path

import pytest
import torch

from core.dist_checkpointing import lazy_tensors
from core.dist_checkpointing.__main__ import main
from tests.dist_checkpointing import dcp_files
from tests.dist_checkpointing.dcp_files import VALUE, rows, whole

ROOM = Path(__file__).parents[2] / "core" / "dist_checkpointing"
OF_OTHERS = {*(ROOM / "tools" / "foreign").glob("*.py")}  # read files of other programs


def test_pickles_are_read_by_nobody_else():
    """By an unpickler that knows no code, and `weights_only`; and by nobody but `import`."""
    assert len(OF_OTHERS) > 8
    for path in OF_OTHERS:
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        called = [(ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}) for node in calls]
        assert not {f"pickle.{f}" for f in ("load", "loads", "Unpickler", "_Unpickler")} & {
            function for function, _ in called
        }
        loads = [options for function, options in called if function == "torch.load"]
        assert all(options["weights_only"] == "True" for options in loads)
        assert len(loads) == (path.name == "dcp_shards.py")
    for path in {*ROOM.rglob("*.py")} - OF_OTHERS - {ROOM / "tools" / "importing.py"}:
        assert "dist_checkpointing.tools.foreign" not in path.read_text(), path


class Evil:
    """What a pickle may do."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return exec, (f"open({str(self.path)!r}, 'w')",)


def test_pickles_that_run_code_run_none(tmp_path, capsys):
    value, trap = torch.arange(4.0), tmp_path / "trap"
    for name in ("planner_data", "storage_meta", "extra"):
        folder = dcp_files.write(
            tmp_path / name, {"w": (value, whole(value))}, change=lambda told: setattr(told, name, Evil(trap))
        )
        assert main(["import", str(folder), str(tmp_path / "ours")]) == 2
        assert "it names builtins.exec, which is no part of DCP's metadata" in capsys.readouterr().err
    folder = dcp_files.write(tmp_path / "value", {"w": (value, whole(value))}, {"x": Evil(trap), "y": 3})
    assert main(["import", str(folder), str(tmp_path / "ours")]) == 0
    told = capsys.readouterr().out
    assert "left out: x: bytes" in told and "exec" in told and "1 arrays, 1 values, 1 left out" in told
    evil = dcp_files.saved(Evil(trap))
    folder = dcp_files.write(tmp_path / "piece", {"w": (value, whole(value))}, blob=lambda name, data: evil)
    assert main(["import", str(folder), str(tmp_path / "other")]) == 2
    assert "exec" in capsys.readouterr().err
    assert not trap.exists() and not (tmp_path / "other").exists()


def long(n):
    return n.to_bytes(8, "little")


MANY = b"(" + 100 * b"N" + b"t\x94"  # a tuple of 100
RECORD = b"ctorch.distributed.checkpoint.metadata\nStorageMeta\n\x94"
BOMBS = {
    "a memo of 2 GiB": b"Nr" + long(2**28)[:4] + b".",
    "an array of 8 GiB": b"\x96" + long(2**33) + b".",
    "a text of 16 GiB": b"\x8d" + long(2**34) + b".",
    "a frame of 16 GiB": b"\x95" + long(2**34) + b".",
    "arguments again and again": MANY + RECORD + b"h\x00R.",
    "sizes again and again": b"ctorch\nSize\n" + MANY + b"\x85R.",
    "a change of what is no record": b"ctorch\nSize\n" + b"}\x94b.",
    "an attribute of what is no enumeration": b"cbuiltins\ngetattr\nctorch\nSize\n\x8c\x05count\x86R.",
    "an extension": b"\x82\x01.",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_memory_that_a_few_bytes_ask_for(bomb, tmp_path, capsys):
    (tmp_path / ".metadata").write_bytes(b"\x80\x05" + BOMBS[bomb])
    tracemalloc.start()
    try:
        assert main(["import", str(tmp_path), str(tmp_path / "ours")]) == 2
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()
    assert "not as torch's DCP writes it" in capsys.readouterr().err


def replaced(told, **facts):
    """Of the only piece."""
    (info,) = told.storage_data.values()
    vars(info).update(facts)


def huge(told):
    """4 TiB in its file of some bytes."""
    told.state_dict_metadata["w"] = dcp_files.facts(torch.empty(1).expand(2**40), [((0, 2**40),)])
    told.storage_data = {dcp_files.dcp.MetadataIndex("w", [0]): info for info in told.storage_data.values()}


DAMAGES = {
    "no piece there": (lambda told: told.storage_data.clear(), "w: where its piece at (0, 0) lies is not said"),
    "outside": (lambda told: replaced(told, relative_path="../x"), "w lies outside, in '../x'"),
    "short": (lambda told: replaced(told, length=500), "bytes 0 to 500 of"),
    "past the end": (lambda told: replaced(told, offset=10**6), "the file ends at"),
    "negative": (lambda told: replaced(told, offset=-3), "w lies at -3"),
    "another file": (lambda told: replaced(told, relative_path="__7_0.distcp"), "No such file"),
    "compressed": (lambda told: replaced(told, transform_descriptors=["zstd"]), "written through ['zstd']"),
    "larger": (
        lambda told: told.state_dict_metadata.update(w=dcp_files.facts(torch.empty(3, 5), whole(VALUE))),
        "have 12",
    ),
    "huge": (lambda told: huge(told), "a piece of 4398046511104 bytes is said to lie in"),
    "a dtype": (
        lambda told: told.state_dict_metadata.update(w=dcp_files.facts(VALUE.double(), whole(VALUE))),
        "holds torch.float32 of (3, 4) where float64 of (3, 4) should be",
    ),
    "no stored form": (
        lambda told: vars(told.state_dict_metadata["w"].properties).update(dtype=torch.float8_e4m3fnuz),
        "w (1 such) is of float8_e4m3fnuz, which has no stored form",
    ),
    "a number": (lambda told: told.state_dict_metadata.update(w=3), "int stands where TensorStorageMetadata should"),
    "nothing": (lambda told: told.state_dict_metadata.clear(), "holds nothing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_told_and_nothing_is_left(damage, tmp_path, capsys):
    change, said = DAMAGES[damage]
    folder = dcp_files.write(tmp_path / "dcp", {"w": (VALUE, whole(VALUE))}, change=change)
    assert main(["import", str(folder), str(tmp_path / "ours")]) == 2
    told = capsys.readouterr()
    assert said in told.err and told.err.count("\n") == 1 and not told.out
    assert "mistake of this program" not in told.err
    assert [path.name for path in tmp_path.iterdir()] == ["dcp"]


def test_pieces_that_are_no_whole(tmp_path, capsys):
    for number, (cuts, said) in enumerate(
        (
            ([(0, 1), (2, 3)], "w: its pieces have 8 elements, its shape (3, 4) has 12"),
            ([(0, 2), (1, 2)], "w: two pieces hold ((1, 2), (0, 4))"),
        )
    ):
        folder = dcp_files.write(tmp_path / str(number), rows(*cuts))
        assert main(["import", str(folder), str(tmp_path / "ours")]) == 2
        assert said in capsys.readouterr().err and not (tmp_path / "ours").exists()


def flipped(data):
    """One bit of the last number."""
    at = data.index(VALUE.numpy().tobytes()) + 47
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_archives_that_torch_would_read(tmp_path, capsys):
    for change, said in (
        (zipped, "it is compressed, which torch.save does not do"),
        (flipped, "damaged by its CRC-32"),
    ):
        folder = dcp_files.write(
            tmp_path / change.__name__, rows((0, 3)), blob=lambda name, data, by=change: by(data)
        )
        assert torch.load(folder / "__0_0.distcp", weights_only=True).shape == VALUE.shape
        assert main(["import", str(folder), str(tmp_path / "ours")]) == 2
        assert said in capsys.readouterr().err and not (tmp_path / "ours").exists()


def zipped(data):
    """The same archive with its entries compressed, which may be made much larger than it is."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as one, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as other:
        for name in one.namelist():
            other.writestr(name, one.read(name))
    return file.getvalue().ljust(len(data), b"\0")


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_any_byte_may_be_wrong(name, tmp_path, capsys):
    """Told in one line, or nothing is lost by it: no other numbers, no mistake of ours."""
    folder = dcp_files.write(tmp_path / "dcp", rows((0, 3)), {"n": [1, 2.5]})
    rng, data = random.Random(3), (folder / name).read_bytes()
    for number in range(12):
        damaged = bytearray(data)
        damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        (folder / name).write_bytes(damaged)
        code = main(["import", str(folder), str(tmp_path / f"{number}")])
        told = capsys.readouterr()
        assert code in (0, 2) and "mistake of this program" not in told.err, told.err
        assert told.err.count("\n") == (code == 2)
        if code == 0 and name != ".metadata":
            assert torch.equal(lazy_tensors(tmp_path / f"{number}")["w"][...], VALUE)
