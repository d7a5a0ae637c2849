"""Files that are none, or claim what no disk holds, and text that a terminal would obey: a line and a status, soon,
and in little memory. Who reads them is a process of its own, for it may wait for ever, or take all there is."""

import json
import os
import shutil
import struct
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path

import google_crc32c
import pytest

from core.dist_checkpointing import load, load_common_state_dict, load_plain_tensors, load_tensors_metadata, save
from core.dist_checkpointing.__main__ import main
from core.dist_checkpointing.format.digest import file_crc
from core.dist_checkpointing.format.json_files import canonical_json, parse_json
from core.dist_checkpointing.publish.check import check
from core.dist_checkpointing.publish.checkpoint_root import CheckpointRoot
from core.dist_checkpointing.publish.manifest import min_manifest_bytes, read_manifest
from core.dist_checkpointing.reading.stored import StoredCheckpoint
from core.dist_checkpointing.storage.checkpoint_dir import open_checkpoint_dir
from core.dist_checkpointing.writing import job
from tests.dist_checkpointing.test_hostile_metadata import W, at, forged, saved  # noqa: F401

ROOT = Path(__file__).parents[2]
CELL = "model/w/c.0.0"


def replaced(name, make):
    def change(folder):
        (folder / name).unlink()
        make(folder / name)

    return change


def sparse(size):
    return lambda path: path.touch() or os.truncate(path, size)


def endless(path):
    path.symlink_to("/dev/zero")


def looped(path):
    path.symlink_to(path)


FILES = {
    f"{what} {name}": replaced(name, make)
    for name in ("manifest.json", "zarr.json", "model/w/zarr.json", CELL, "receipts/00000.json")
    for what, make in (("fifo", os.mkfifo), ("device", endless), ("loop", looped), ("8 TiB", sparse(8 << 40)))
}
OPENED = ("manifest.json", "zarr.json")  # by every reader; the others by `verify`, and by who reads values


def commands(folder, out):
    """(directory, command) -> (status, what it said)."""
    out.mkdir()
    words = [sys.executable, "-m", "tests.dist_checkpointing.hostile", str(folder), str(out)]
    done = subprocess.run(words, cwd=ROOT, stdout=-1, stderr=subprocess.STDOUT, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "Traceback" not in done.stdout
    found = {}
    for part in done.stdout.split("== ")[1:]:
        title, _, said = part.partition("\n")
        said, _, status = said.rpartition("status ")
        found[tuple(title.split(": "))] = int(status), said
    assert len(found) == 5 * len(os.listdir(folder))
    return found


def every_reader(folder):
    """What loads refuses, too."""
    for name in sorted(os.listdir(folder)):
        path = f"{folder}/{name}"
        for call in (
            lambda path=path: load({"model": {"w": torch_zeros()}}, path, strict=False),
            lambda path=path: load_plain_tensors(path),
            lambda path=path: load_common_state_dict(path),
            lambda path=path: load_tensors_metadata(path),
        ):
            try:
                call()
            except ValueError as error:
                assert path in str(error) and len(str(error)) < 2000
            else:
                assert name.split(" ")[-1] not in OPENED, name


def torch_zeros():
    import torch

    return torch.zeros(3, 4)


def test_what_is_no_file(saved, tmp_path, ranks):  # noqa: F811
    folder = tmp_path / "all"
    for name, change in FILES.items():
        target = folder / name.replace("/", "-")
        shutil.copytree(saved, target)
        change(target)
    told = commands(folder, tmp_path / "out")
    for (name, command), (status, said) in told.items():
        if command.startswith("verify"):
            assert status == 1 and name.partition(" ")[2].split("-")[-1] in said, (name, said)
        elif name.split(" ")[-1] in OPENED or ("export" in command and "c.0.0" in name):
            assert status == 2 and len(said.splitlines()) == 1 and said.startswith("error: "), (name, command, said)
        else:
            assert status == 0, (name, command, said)
    ranks(every_reader, str(folder), world=1, timeout=60)
    steps = tmp_path / "steps"  # a directory of such steps: retention reads them all
    steps.mkdir()
    for step, name in enumerate(sorted(os.listdir(folder))):
        (steps / f"step-{step:08d}").symlink_to(folder / name)
    assert CheckpointRoot(steps).surplus(1) == [] and CheckpointRoot(steps).latest() is not None


def claims(pieces, piece_bytes, held=1):
    """The array w as one shard of so many pieces, of which its file, a sparse one, holds the first."""
    size = piece_bytes // 4

    def array(node):
        codecs = node["codecs"]
        shard = {"chunk_shape": [1, size], "codecs": codecs, "index_codecs": codecs, "index_location": "end"}
        node["codecs"] = [{"name": "sharding_indexed", "configuration": shard}]
        node["shape"] = node["chunk_grid"]["configuration"]["chunk_shape"] = [pieces, size]

    def write(target, manifest):
        stride = piece_bytes + 4
        index = b"".join(struct.pack("<2Q", i * stride, stride) for i in range(held)) + b"\xff" * 16 * (pieces - held)
        crc = google_crc32c.value(bytes(piece_bytes)).to_bytes(4, "little") if held > 1 else bytes(4)
        with open(target / CELL, "wb") as file:
            for i in range(held):
                file.seek(i * stride + piece_bytes)
                file.write(crc)
            file.write(index + google_crc32c.value(index).to_bytes(4, "little"))
        node = parse_json((target / "model/w/zarr.json").read_bytes(), "")
        manifest["files"][CELL] = list(file_crc(target / CELL, node))

    return array, write


def test_shards_that_claim_terabytes(saved, tmp_path):  # noqa: F811
    """Their files and digests are right: only what they should hold is not there."""
    folder = tmp_path / "all"
    folder.mkdir()
    for name, pieces, size in (("16 GiB", 2**16, 2**18), ("64 TiB", 2**16, 2**30)):
        array, write = claims(pieces, size)
        target = forged(saved, folder, array=array, files=write)
        target.rename(folder / name)
    for (name, command), (status, said) in commands(folder, tmp_path / "out").items():
        assert status == (1 if command.startswith("verify") else 2), (name, command, said)
        assert "array 'model/w' is said to have" in said, (name, command, said)


def test_a_cell_larger_than_ours(saved, tmp_path):  # noqa: F811
    """All of it is there: it verifies, a part at a time."""
    array, write = claims(256, 1 << 20, held=256)
    place = open_checkpoint_dir(forged(saved, tmp_path, array=array, files=write))
    tracemalloc.start()
    try:
        assert check(place, full=True) == []
        assert tracemalloc.get_traced_memory()[1] < 160 << 20
    finally:
        tracemalloc.stop()


ESCAPE = "\x1b]0;owned\x07\x9b2J\u202e\nforged: line"
SPOKEN = {
    "object": {"group": at("attributes", "paracore", "objects", value={ESCAPE: ESCAPE, "step": 3})},
    "run": {"manifest": at("run", value={ESCAPE: ESCAPE, "layout": {ESCAPE: ESCAPE}, "time": 1e300})},
    "derived": {"group": lambda root: root["attributes"]["paracore"]["derived"].update({f"model/{ESCAPE}": DERIVED})},
    "path": {"manifest": lambda manifest: manifest["files"].update({ESCAPE: [1, 1]})},
}
DERIVED = {"from": "model/w", "torch_dtype": "bfloat16"}


@pytest.mark.parametrize("where", SPOKEN)
def test_what_a_terminal_would_obey(saved, tmp_path, capsys, where):  # noqa: F811
    target = forged(saved, tmp_path, **SPOKEN[where])
    (target / f"x{ESCAPE.replace('/', '')}").write_text("a file of that name")
    good = where in ("object", "run")
    for words, status in ((["verify"], 1), (["inspect"], 0), (["inspect", "--json"], 0), (["diff", saved], 1)):
        expected = status if good or words == ["verify"] else 2
        expected = 0 if where == "run" and words[0] == "diff" else expected
        assert main([*map(str, words), str(target)]) == expected
        told = capsys.readouterr()
        text = told.out + told.err
        assert "owned" in text or words[0] == "diff"
        assert all(c.isprintable() or c == "\n" for c in text), text
        assert not any(line.startswith("forged") for line in text.splitlines())
    if where == "object":
        main(["inspect", "--json", str(target)])
        assert json.loads(capsys.readouterr().out)["objects"] == {ESCAPE: ESCAPE, "step": 3}


def test_derived_as_what_is_no_dtype(saved, tmp_path, capsys):  # noqa: F811
    change = at("attributes", "paracore", "derived", "model/v", "torch_dtype", value="object")
    target = forged(saved, tmp_path, group=change)
    for words in (["export", str(target), str(tmp_path / "out")], ["inspect", str(target)]):
        assert main(words) == 2
        assert "objects or derived arrays that no checkpoint has" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["3e999", "-3e999", "NaN", "Infinity"])
@pytest.mark.parametrize("file", ["manifest.json", "zarr.json"])
def test_numbers_that_are_infinite(saved, tmp_path, single, number, file):  # noqa: F811
    """Python reads them and cannot write them."""
    target = forged(saved, tmp_path, group=at("attributes", "paracore", "objects", value={"x": 0.123}))
    if file == "manifest.json":
        text = (target / file).read_text().replace('"format":1', f'"format":{number}')
    else:
        data = (target / file).read_bytes().replace(b"0.123", number.encode())
        manifest = read_manifest(open_checkpoint_dir(target))
        (target / file).write_bytes(data)
        files = {**manifest.files, file: (len(data), zlib.crc32(data))}
        text = type(manifest)(manifest.uuid, files, manifest.run).to_bytes().decode()
    (target / "manifest.json").write_text(text)
    told = rf"{file}.*(not finite)"
    with pytest.raises(ValueError, match=told):
        load({}, target, ps=single)
    assert any(file in line and "not finite" in line for line in check(open_checkpoint_dir(target), full=True))


def test_a_giant_manifest_in_an_object_store(saved, tmp_path):  # noqa: F811
    """Which tells no sizes: it is read, but not parsed."""
    place = open_checkpoint_dir(f"memory://{tmp_path.name}")
    place.write_all({file: (saved / file).read_bytes() for file in open_checkpoint_dir(saved).names()})
    place.write("manifest.json", b"[" + b"[]," * (22 << 20) + b"[]]")
    (problem,) = check(place, full=True)
    assert problem.startswith(f"{place.url}manifest.json has ") and "69206" in problem


def test_nothing_is_written_that_is_not_read():
    text = "x" * (64 << 20)
    with pytest.raises(ValueError, match="67108866 bytes of JSON, readers take 67108864"):
        canonical_json(text)


def test_what_no_reader_takes_is_refused_before_it_is_written(saved, tmp_path, single, monkeypatch):  # noqa: F811
    stored = StoredCheckpoint.open(saved)
    cells = [f'"{path}":[{size},{crc}],' for path, (size, crc) in stored.manifest.files.items() if "/c" in path]
    least, exactly = min_manifest_bytes(stored.metadata), len("".join(cells))
    assert exactly - 20 * len(cells) < least < exactly
    monkeypatch.setattr(job, "MAX_JSON_BYTES", least - 1)
    with pytest.raises(ValueError, match=rf"x would have a manifest of {least} bytes, readers take {least - 1}"):
        save({"model": {"w": W}, "optimizer": {"main": {"v": W}}}, tmp_path / "x", ps=single)
    assert not list(tmp_path.iterdir())
