"""What is not as the manifest says is found, and named."""

import json
import os
import time

import pytest

from core.dist_checkpointing.format.json_files import canonical_json, seal
from core.dist_checkpointing.publish.check import check
from core.dist_checkpointing.publish.checkpoint_root import CheckpointRoot
from core.dist_checkpointing.publish.manifest import Manifest, read_manifest
from core.dist_checkpointing.storage.checkpoint_dir import open_checkpoint_dir
from tests.dist_checkpointing.toy import CELLS, METADATA, STORES, entry, save, store

FILES = sorted({*CELLS, *(f"{path}/zarr.json".lstrip("/") for path in METADATA)})
RECEIPTS = ["receipts/00000.json", "receipts/00001.json"]


@pytest.fixture
def place(tmp_path):
    save(CheckpointRoot(tmp_path), 1, 5)
    return open_checkpoint_dir(tmp_path / "step-00000001")


def flip(place, name, byte=-1):
    data = bytearray(place.read(name))
    data[byte] ^= 1
    place.write(name, bytes(data))


def swap(place, name):
    """With a sibling of the same size where there is one; the contents differ."""
    other = next(o for o in [*FILES, *RECEIPTS] if o != name and place.read(o) != place.read(name))
    mine, others = place.read(name), place.read(other)
    place.write(name, others)
    place.write(other, mine)


DAMAGE = {
    "flip": flip,
    "truncate": lambda place, name: place.write(name, place.read(name)[:-1]),
    "empty": lambda place, name: place.write(name, b""),
    "append": lambda place, name: place.write(name, place.read(name) + b" "),
    "delete": lambda place, name: place.remove(name),
    "swap": swap,
}


@pytest.mark.parametrize("kind", STORES)
def test_a_whole_one(kind, tmp_path):
    root = CheckpointRoot(store(kind, tmp_path))
    save(root, 1, 5)
    for depth in ({}, {"digests": True}, {"full": True}, {"full": True, "jobs": 1}):
        assert check(root.open(1), **depth) == []


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", [*FILES, *RECEIPTS, "manifest.json"])
def test_every_damage_of_every_file_is_named(place, name, damage):
    DAMAGE[damage](place, name)
    problems = check(place, digests=True)
    assert any(line.startswith(f"{place.url}{name}") for line in problems)
    assert check(place, full=True) == problems
    sizes = check(place)
    if damage in ("truncate", "empty", "append", "delete"):
        assert [line for line in sizes if name in line] and len(sizes) == 1


def test_a_payload_that_does_not_fit_its_checksum(place):
    flip(place, "model/a/c.1.0", byte=0)
    assert check(place, digests=True) == []  # a digest reads checksums only
    (problem,) = check(place, full=True)
    assert problem.startswith(f"{place.url}model/a/c.1.0: ")


def test_two_damaged_cells_are_both_named(place):
    for name in ("model/a/c.0.0", "model/a/c.1.0"):
        flip(place, name, byte=0)
    assert [line.partition(": ")[0] for line in check(place, full=True)] == [
        f"{place.url}model/a/c.0.0",
        f"{place.url}model/a/c.1.0",
    ]


def test_what_does_not_belong_is_named_by_the_full_check(place):
    place.write("model/a/c.7.0", b"x")
    assert check(place, digests=True) == []
    assert check(place, full=True) == [f"{place.url}model/a/c.7.0: is not in the manifest"]


def edit(place, **changes):
    manifest = json.loads(place.read("manifest.json"))
    manifest.pop("crc")
    place.write("manifest.json", seal(manifest | changes))


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../x", "a/../../x", "a\\b", "..\\x", "C:/x", "a//b", "", ".", "a/", "a\0b"]
)
def test_paths_that_lead_elsewhere(place, path):
    edit(place, files={path: [1, 1]})
    (problem,) = check(place)
    assert problem.startswith(f"{place.url}manifest.json: 1 of its paths lead out") and repr(path) in problem
    with pytest.raises(ValueError, match="do not trust it"):
        read_manifest(place)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"format": 2}, r"format 2, this version reads up to 1; update paracore"),
        ({"format": "1"}, "format 1, this version"),
        ({"files": []}, "is missing or of a wrong type"),
        ({"uuid": 3}, "is missing or of a wrong type"),
        ({"files": {"zarr.json": [1]}}, r"\[1\] of zarr\.json is no \[size, crc\]"),
        ({"files": {"zarr.json": [True, 0]}}, r"\[True, 0\] of zarr\.json"),
        ({"files": {"zarr.json": [-1, 0]}}, r"\[-1, 0\] of zarr\.json"),
    ],
)
def test_manifests_of_strangers(place, changes, message):
    edit(place, **changes)
    with pytest.raises(ValueError, match=message):
        read_manifest(place)
    assert len(check(place, full=True)) == 1


@pytest.mark.parametrize("text", [b"", b"[]", b"null", b"{}", b"[" * 100_000, b"\xff\xfe", b'{"crc": 1}'])
def test_manifests_that_are_none(place, text):
    place.write("manifest.json", text)
    (problem,) = check(place, full=True)
    assert problem.startswith(f"{place.url}manifest.json: ") and "use another step" in problem


def forge(place, name, data):
    """A file, and a manifest that agrees with it."""
    if place.size(name) is not None:
        place.remove(name)
    place.write_all({name: data})
    manifest = read_manifest(place)
    files = {**manifest.files, name: entry(name, data)}
    place.write("manifest.json", Manifest(manifest.uuid, files, manifest.run).to_bytes())


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [10**15, 2]},
        {"shape": [3]},
        {"shape": "3"},
        {"codecs": [{"name": "exec"}]},
        {"node_type": "link"},
        {"chunk_grid": {"configuration": {"chunk_shape": [0, 2]}}},
    ],
)
def test_metadata_of_strangers(place, changes):
    start = time.monotonic()
    forge(place, "model/a/zarr.json", canonical_json({**METADATA["model/a"], **changes}))
    assert check(place) == []
    problems = check(place, full=True)
    assert any("model/a/zarr.json: is no metadata of a checkpoint" in line for line in problems)
    assert time.monotonic() - start < 10


def test_a_manifest_that_lacks_a_cell(place):
    manifest = read_manifest(place)
    files = {path: entry for path, entry in manifest.files.items() if path != "model/a/c.1.0"}
    place.write("manifest.json", Manifest(manifest.uuid, files, manifest.run).to_bytes())
    os.unlink(place.url + "model/a/c.1.0")
    assert check(place) == []
    assert check(place, digests=True) == [
        f"{place.url}model/a/c.1.0: is not in the manifest",
        f"{place.url}zarr.json: array 'model/a' is said to have 24 bytes, its files have 20",
    ]


def test_a_file_of_no_array(place):
    forge(place, "model/d/c.0", b"12345")
    assert check(place, digests=True) == [f"{place.url}model/d/c.0: belongs to no array"]
