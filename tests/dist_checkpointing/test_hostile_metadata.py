"""Files that somebody made, with correct checksums: refused in plain words, before anything large is allocated."""

import json
import shutil
import tracemalloc
import zlib

import pytest
import torch

from core.dist_checkpointing import CheckpointManager, load, load_common_state_dict, load_plain_tensors
from core.dist_checkpointing.format.json_files import canonical_json, seal
from core.dist_checkpointing.publish.check import check
from core.dist_checkpointing.storage.checkpoint_dir import open_checkpoint_dir
from core.dist_checkpointing.writing.saving import Saver

W = torch.arange(12.0).view(3, 4)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    from core.parallel_state import ParallelState

    root = tmp_path_factory.mktemp("saved")
    state = {"model": {"w": W, "v": W.bfloat16()}, "optimizer": {"main": {"v": W}}, "step": 3}
    Saver(str(root), ParallelState.single("cpu"), durable=False).save("x", state)
    return root / "x"


def forged(saved, tmp_path, *, group=None, manifest=None, array=None, files=None):
    """A copy in which functions changed the group's zarr.json, w's in both places, the manifest, files and what the
    manifest says of them; every crc is right again."""
    target = tmp_path / "x"
    shutil.copytree(saved, target)
    value = json.loads((target / "manifest.json").read_text())
    del value["crc"]
    root = json.loads((target / "zarr.json").read_text())
    if array is not None:
        node = root["consolidated_metadata"]["metadata"]["model/w"]
        array(node)
        put(target, value, "model/w/zarr.json", canonical_json(node))
    if group is not None:
        group(root)
    put(target, value, "zarr.json", canonical_json(root))
    if manifest is not None:
        manifest(value)
    if files is not None:
        files(target, value)
    (target / "manifest.json").write_bytes(seal(value))
    return target


def put(target, manifest, name, data):
    (target / name).write_bytes(data)
    manifest["files"][name] = [len(data), zlib.crc32(data)]


def facts(root):
    return root["attributes"]["paracore"]


def at(*path, value):
    """A change of what lies at a path of keys."""

    def change(node):
        for name in path[:-1]:
            node = node[name]
        node[path[-1]] = value

    return change


def without(*path):
    def change(node):
        for name in path[:-1]:
            node = node[name]
        del node[path[-1]]

    return change


def path_of(name):
    return lambda value: value["files"].update({name: [5, 5]})


PARACORE = ("attributes", "paracore")
MANIFESTS = {
    "up": (path_of("../../etc/passwd"), r"1 of its paths lead out of the checkpoint, '../../etc/passwd'"),
    "up within": (path_of("model/../../x"), "lead out"),
    "absolute": (path_of("/etc/passwd"), "lead out"),
    "drive": (path_of("C:\\x"), "lead out"),
    "null": (path_of("a\0b"), "lead out"),
    "newer": (at("format", value=2), "format 2, this version reads up to 1; update paracore"),
    "no number": (at("format", value="1"), "format 1, this version reads"),
    "no entry": (at("files", "zarr.json", value=[1]), r"\[1\] of zarr.json is no \[size, crc\]"),
    "negative": (at("files", "zarr.json", value=[-1, 3]), "is no"),
    "float": (at("files", "zarr.json", value=[1.5, 3]), "is no"),
    "no files": (without("files"), "one of `files`, `run`, `uuid` is missing"),
    "a list": (at("files", value=["zarr.json"]), "is missing or of a wrong type"),
    "other run": (at("run", value=3), "is missing or of a wrong type"),
}
GROUPS = {
    "newer": (at(*PARACORE, "format", value=3), "zarr.json: format 3, this version reads 2; install a newer one"),
    "not ours": (without(*PARACORE), "zarr.json: no group of a checkpoint: KeyError"),
    "no group": (at("attributes", value=3), "zarr.json: no group of a checkpoint: TypeError"),
    "objects are a list": (at(*PARACORE, "objects", value=[1]), "objects or derived arrays that no checkpoint has"),
    "derived from nowhere": (
        at(*PARACORE, "derived", "model/v", "from", value="../../x"),
        "objects or derived arrays",
    ),
    "derived from a list": (at(*PARACORE, "derived", "model/v", "from", value=["w"]), "TypeError"),
    "derived by text": (at(*PARACORE, "derived", value="model/v"), "AttributeError"),
    "derived without type": (without(*PARACORE, "derived", "model/v", "torch_dtype"), "KeyError"),
    "nothing consolidated": (without("consolidated_metadata"), "KeyError"),
    "a key that leads out": (
        lambda root: root["consolidated_metadata"]["metadata"].update(
            {"../y": root["consolidated_metadata"]["metadata"]["model/w"]}
        ),
        "array '../y': '..' cannot be a part of a key",
    ),
    "an absolute key": (
        lambda root: root["consolidated_metadata"]["metadata"].update(
            {"/etc": root["consolidated_metadata"]["metadata"]["model/w"]}
        ),
        "array '/etc': '' cannot be a part of a key",
    ),
    "a node of no type": (without("consolidated_metadata", "metadata", "model/w", "node_type"), "KeyError"),
}
CELL = ("chunk_grid", "configuration", "chunk_shape")
SHARD = {"chunk_shape": [1, 4], "codecs": [], "index_codecs": [], "index_location": "start"}
ARRAYS = {
    "as large as the sky": (
        lambda node: node.update(shape=[2**40, 4]) or at(*CELL, value=[2**30, 4])(node),
        "are too many or too large|are said to have|is said to have",
    ),
    "many cells": (lambda node: node.update(shape=[2**40, 4]), "are too many or too large"),
    "a little too large": (
        lambda node: node.update(shape=[3, 4000]),
        r"array 'model/w' is said to have 48000 bytes, its files have 52",
    ),
    "more than integers hold": (at("shape", value=[2**62, 2**62]), "larger than 2|too many"),
    "a hundred dims": (at("shape", value=[1] * 100), "dims"),
    "no dims": (at("shape", value=[]), "dims"),
    "zero": (at("shape", value=[0, 4]), "not integers from 1"),
    "negative": (at("shape", value=[-3, 4]), "not integers from 1"),
    "halves": (at("shape", value=[1.5, 4]), "not integers from 1"),
    "text": (at("shape", value="34"), "shape is '34'"),
    "true": (at("shape", value=[True, 4]), "not integers from 1"),
    "cells of nothing": (at(*CELL, value=[0, 0]), "not integers from 1"),
    "unknown codec": (at("codecs", value=[{"name": "blosc", "configuration": {}}]), "codecs"),
    "no checksum": (lambda node: node["codecs"].pop(), "codecs"),
    "no codec": (at("codecs", value=[]), "is not an array's"),
    "a strange shard": (at("codecs", value=[{"name": "sharding_indexed", "configuration": SHARD}]), "codecs"),
    "big endian": (at("codecs", 0, "configuration", "endian", value="big"), "endian is 'big'"),
    "unknown type": (at("data_type", value="complex512"), "its type is 'complex512', known are float64"),
    "a type of another width": (at("attributes", "torch_dtype", value="bfloat16"), "data_type is 'float32'"),
    "unknown torch type": (at("attributes", "torch_dtype", value="__class__"), "its type is '__class__', known are"),
    "a type that is a list": (at("attributes", "torch_dtype", value=[]), "its type is|is not an array's"),
    "a transformer": (at("storage_transformers", value=[{"name": "x"}]), "'storage_transformers' is unknown"),
    "zarr 2": (at("zarr_format", value=2), "zarr_format is 2"),
    "other keys": (at("chunk_key_encoding", "configuration", "separator", value="/"), "separator is '/'"),
}
CASES = [
    pytest.param({kind: change}, told, id=f"{kind}-{name}")
    for kind, cases in (("manifest", MANIFESTS), ("group", GROUPS), ("array", ARRAYS))
    for name, (change, told) in cases.items()
]


@pytest.mark.parametrize(("change", "told"), CASES)
def test_refused(saved, tmp_path, single, change, told):
    target = forged(saved, tmp_path, **change)
    template = {"model": {"w": torch.full((3, 4), -1.0), "v": torch.full((3, 4), -1.0).bfloat16()}}
    tracemalloc.start()
    try:
        for call in (
            lambda: load(template, target, ps=single),
            lambda: load_plain_tensors(target),
            lambda: load_common_state_dict(target),
        ):
            with pytest.raises(ValueError, match=told) as raised:
                call()
            assert len(str(raised.value)) < 2000
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()
    assert (template["model"]["w"] == -1).all() and (template["model"]["v"] == -1).all()
    assert check(open_checkpoint_dir(target), digests=True), "what is not loaded does not verify"


def test_the_forger_alone_is_not_refused(saved, tmp_path, single):
    """So what the others are refused for is what they changed."""
    target = forged(saved, tmp_path)
    assert check(open_checkpoint_dir(target), full=True) == []
    assert torch.equal(load({"model": {"w": torch.zeros(3, 4)}}, target, ps=single, strict=False)["model"]["w"], W)


def test_a_shape_that_fits_the_template_but_not_the_files(saved, tmp_path, single):
    """Ten rows are said to be there, also by who asks: the files have three."""
    target = forged(saved, tmp_path, array=lambda node: node.update(shape=[10, 4]))
    with pytest.raises(ValueError, match="model/w"):
        load({"model": {"w": torch.zeros(10, 4)}}, target, ps=single, strict=False)


def test_a_link_out_of_the_directory_of_checkpoints_is_not_swept(tmp_path, single):
    """KeyMapping of temporaries are names: what they link to stays."""
    outside = tmp_path / "precious"
    outside.mkdir()
    (outside / "file").write_text("x")
    root = tmp_path / "root"
    root.mkdir()
    (root / f".tmp-step-00000001-{'0' * 32}").symlink_to(outside)
    (root / ".trash-x").symlink_to(outside)
    manager = CheckpointManager(root, ps=single, stale_s=0)
    manager.save(1, {"w": W})
    manager.close()
    assert (outside / "file").read_text() == "x"


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b'{"crc":0}', b"\xff\xfe", b"[" * 100_000, b"NaN"])
def test_no_manifest_at_all(saved, tmp_path, single, text):
    target = forged(saved, tmp_path)
    (target / "manifest.json").write_bytes(text)
    with pytest.raises(ValueError, match=r"manifest\.json"):
        load({"w": W}, target, ps=single)
