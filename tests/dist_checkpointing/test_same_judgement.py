"""`verify` takes what `load` takes, and nothing else, whatever a forger makes whose checksums are right."""

import functools
import json
import random
import shutil

import pytest
import torch

from core.dist_checkpointing import load_plain_tensors
from core.dist_checkpointing.__main__ import main
from core.dist_checkpointing.format import contents
from core.dist_checkpointing.format.json_files import canonical_json, seal
from core.dist_checkpointing.publish import check as checking
from core.dist_checkpointing.publish.check import check
from core.dist_checkpointing.reading import stored
from core.dist_checkpointing.storage.checkpoint_dir import open_checkpoint_dir
from tests.dist_checkpointing.test_hostile_metadata import W, forged, put, saved  # noqa: F401
from tests.marks import PRODUCT


def own(change):
    """A change of w's own zarr.json, and not of what the root's says of it."""

    def made(target, manifest):
        node = json.loads((target / "model/w/zarr.json").read_text())
        change(node)
        put(target, manifest, "model/w/zarr.json", canonical_json(node))

    return made


def copied(name):
    """w once more, under another name, which the root's zarr.json does not say."""

    def made(target, manifest):
        shutil.copytree(target / "model/w", target / name)
        for file in ("zarr.json", "c.0.0"):
            manifest["files"][f"{name}/{file}"] = manifest["files"][f"model/w/{file}"]

    return made


def nodes(root):
    return root["consolidated_metadata"]["metadata"]


FORGED = {
    "another shape": ({"files": own(lambda node: node.update(shape=[4, 3]))}, "model/w/zarr.json says otherwise"),
    "another attribute": ({"files": own(lambda node: node["attributes"].update(x=1))}, "model/w/zarr.json says"),
    "not consolidated": ({"files": copied("model/x")}, "model/x/zarr.json is of no array or group in it"),
    "dropped": (
        {"group": lambda root: nodes(root).pop("model/w")},
        "'model' is unknown, by the arrays in it",
    ),
    "no files": (
        {"group": lambda root: nodes(root).update({"model/x": nodes(root)["model/w"]})},
        "'model/x' is said to have 48 bytes, its files have 0",
    ),
    "inside another": (
        {
            "files": copied("model/w/x"),
            "group": lambda root: nodes(root).update({"model/w/x": nodes(root)["model/w"]}),
        },
        "'model/w/x' lies inside the array 'model/w'",
    ),
    "a group too few": ({"group": lambda root: nodes(root).pop("model")}, "'model' is missing"),
    "a group too many": (
        {"group": lambda root: nodes(root).update({"other": nodes(root)["model"]})},
        "'other' is unknown",
    ),
    "derived and stored": (
        {"group": lambda root: root["attributes"]["paracore"]["derived"].update({"model/w": DERIVED})},
        "objects or derived arrays that no checkpoint has",
    ),
}
DERIVED = {"from": "optimizer/main/v", "torch_dtype": "bfloat16"}


def judged(target):
    """Whether it loads, every value of it, and verifies: the same."""
    problems = check(open_checkpoint_dir(target), full=True)
    try:
        load_plain_tensors(target)
    except ValueError as error:
        return str(error), problems
    return None, problems


@pytest.mark.parametrize("case", FORGED)
def test_forged(saved, tmp_path, case):  # noqa: F811
    change, told = FORGED[case]
    refused, problems = judged(forged(saved, tmp_path, **change))
    assert refused is not None and told in refused, refused
    assert any(told in line for line in problems), problems


def test_metadata_of_equal_checksums(saved, tmp_path, monkeypatch):  # noqa: F811
    """A CRC-32 can be made to fit: `verify` reads what another reader would, too."""
    for room in (checking, contents, stored):
        monkeypatch.setattr(room, "json_crc", lambda data: 7)
    target = forged(saved, tmp_path)
    node = json.loads((target / "model/w/zarr.json").read_text())
    node["shape"] = node["chunk_grid"]["configuration"]["chunk_shape"] = [4, 3]
    (target / "model/w/zarr.json").write_bytes(canonical_json(node))
    manifest = json.loads((target / "manifest.json").read_text())
    del manifest["crc"]
    for file, entry in manifest["files"].items():
        entry[1] = 7 if file.endswith(".json") else entry[1]
    (target / "manifest.json").write_bytes(seal(manifest))
    assert check(open_checkpoint_dir(target), full=True) == [
        f"{target}/model/w/zarr.json: says otherwise than zarr.json says of it"
    ]


def nested(depth):
    """As deep as is read."""
    return functools.reduce(lambda inner, _: [inner], range(depth), 0)


VALUES = [
    nested(700),
    None,
    True,
    -1,
    0,
    1,
    2**40,
    2**70,
    0.5,
    1e300,
    "",
    "x",
    "../x",
    "\x1b[2J",
    [],
    [3],
    [[]],
    {},
    {"x": 1},
]


def commands_end(target, out, capsys):
    """Each with a status and, where it is 2, a line: of what it was given, and of no mistake of its own."""
    copied = ["inspect", "--json"], ["inspect"], ["verify"], ["verify", "--fast"]
    for words in (*([*words, target] for words in copied), ["diff", target, target], ["export", target, out]):
        status, told = main([*map(str, words)]), capsys.readouterr()
        assert status in (0, 2) or (status == 1 and words[0] == "verify"), words
        assert len(told.err.splitlines()) == (status == 2) and "mistake" not in told.err, told.err
        assert all(c.isprintable() or c == "\n" for c in told.out + told.err)


def mutated(value, rng):
    """A JSON value with one change somewhere inside."""
    value = json.loads(json.dumps(value))
    at = value
    while True:
        keys = list(at) if isinstance(at, dict) else range(len(at))
        if not keys:
            return value
        key = rng.choice(keys)
        inside = isinstance(at[key], dict | list) and at[key]
        if inside and rng.random() < 0.85:
            at = at[key]
            continue
        if rng.random() < 0.2:
            del at[key]
        else:
            at[key] = rng.choice(VALUES) if rng.random() < 0.8 else json.loads(json.dumps(value))
        return value


@pytest.mark.parametrize("count", [40, pytest.param(250, marks=pytest.mark.full), pytest.param(1000, marks=PRODUCT)])
def test_any_change_of_what_is_said(saved, tmp_path, count, capsys):  # noqa: F811
    """Of the root's zarr.json, of an array's in both places, of the manifest: never an exception of another kind."""
    rng, refusals = random.Random(count), 0
    for number in range(count):
        change, folder = {}, tmp_path / str(number)
        for kind in rng.sample(["group", "array", "manifest"], rng.choice([1, 1, 2])):

            def made(*values, rng=rng):
                before = values[-1]
                after = mutated(before, rng)
                before.clear()
                before.update(after)

            change[kind] = made
        folder.mkdir()
        try:
            target = forged(saved, folder, **change)
        except (KeyError, TypeError, ValueError):
            continue  # the forger could not go on
        refused, problems = judged(target)
        refusals += refused is not None
        assert bool(problems) == (refused is not None) or "receipts" in str(problems), (number, refused, problems)
        if refused is None:
            assert torch.equal(load_plain_tensors(target, keys="model/w")["model/w"], W)
        commands_end(target, folder / "out", capsys)
        shutil.rmtree(folder)
    assert count / 3 < refusals < count
