"""Every way to write where a checkpoint lies: right, or a ValueError with the remedy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from core.dist_checkpointing import load, save
from core.dist_checkpointing.publish.checkpoint_root import CheckpointRoot
from core.dist_checkpointing.storage.address import NAME_BYTES, below, check_name, parse_address, root_and_name
from core.dist_checkpointing.storage.checkpoint_dir import PosixCheckpointDir, open_dir

HERE = "{here}"  # the working directory
PATHS = {
    "/": "/",
    "//": "/",
    "/name": "/name",
    "//name": "/name",
    "/a//b///": "/a/b",
    "a/b": f"{HERE}/a/b",
    ".": HERE,
    "./~/x": f"{HERE}/~/x",
    "a/./b": f"{HERE}/a/b",
    "a/../b": f"{HERE}/b",
    "link/../b": f"{HERE}/far/b",  # as the system sees it: link is far/away
    "a/~": f"{HERE}/a/~",
    "100%20x": f"{HERE}/100%20x",
    "a b/c,d=1@(é)": f"{HERE}/a b/c,d=1@(é)",
    "a/gs://b": f"{HERE}/a/gs:/b",
    Path("/a/b"): "/a/b",
    Path("a b"): f"{HERE}/a b",
    "file:///name": "/name",
    "file:///a/b/": "/a/b",
    "file://localhost/a": "/a",
    "file:///a%20b/%C3%A9%25": "/a b/é%",
    "file:///~/x": "/~/x",
    "file:///": "/",
    "gs://bucket/run/": "gs://bucket/run",
    "s3://bucket/run/7": "s3://bucket/run/7",
    "memory://a%20b": "memory://a%20b",
    "s3://bucket/run/?endpoint=https://host:9000": "s3://bucket/run?endpoint=https://host:9000",
    "s3://bucket?region=eu-west-1&endpoint=http://h&profile=a%26b": (
        "s3://bucket?endpoint=http://h&profile=a%26b&region=eu-west-1"
    ),
    "s3://bucket/run?conditional_write=true": "s3://bucket/run?conditional_write=true",
    "gs://bucket/run?user_project=p": "gs://bucket/run?user_project=p",
    "/a?b=c": "/a?b=c",
}
NONE = {
    "": "is no path; give a str or pathlib.Path",
    b"/a": "is no path; give a str or pathlib.Path",
    "a\0b": "is no path; give a str or pathlib.Path",
    "~": r"~ is not expanded here; give os.path.expanduser\('~'\), or './~'",
    "~/x": r"~ is not expanded here; give os.path.expanduser\('~/x'\), or './~/x'",
    "~me/x": "~ is not expanded here",
    "file://host/p": "'host' stands where a host does; .* three slashes, file:///p",
    "file://rel": "'rel' stands where a host does; .* three slashes, file:///rel",
    "file://": "'' stands where a host does",
    "file:///a?b": "write %3F and %23",
    "file:///a#b": "write %3F and %23",
    "file:///a%2zb": "'%2z' is no character of a name; write %25",
    "file:///a%2Fb": "'%2F' is no character of a name; write %25",
    "file:///a%": "'%' is no character of a name; write %25",
    "file:///a%00": "'%00' is no character of a name; write %25",
    Path("file:///a"): "is no URL, .* give the URL as str, file://a",
    Path("s3://bucket/x"): "is no URL, .* give the URL as str, s3://bucket/x",
    "gs:/bucket/x": "is no URL, .* give the URL as str, gs://bucket/x",
    "ftp://x/y": "not a path, file://, gs://, s3:// or memory://",
    "http://x/y": "not a path, file://, gs://, s3:// or memory://",
    "s3://b/x?secret_key=hush&region=r": (
        "^s3://b/x: 'secret_key' is no option; s3:// knows endpoint, region, profile, conditional_write$"
    ),
    "gs://b/x?endpoint=http://h": "'endpoint' is no option; gs:// knows user_project",
    "memory://x?region=r": "'region' is no option; memory:// knows no options",
    "s3://b/x?region=": "'region' has no value, or two",
    "s3://b/x?region=a&region=b": "'region' has no value, or two",
    "s3://b/x?endpoint=host:9000": "'endpoint' is no server; write endpoint=https://host:9000",
    "s3://b/x?endpoint=https://key:secret@host": "^s3://b/x: 'endpoint' is no server; write endpoint=https://host:9000$",
    "s3://b/x?endpoint=https://h?a": "'endpoint' is no server",
    "s3://b/x?conditional_write=yes": "'conditional_write' must be true or false",
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("far/away")
    return str(tmp_path)


@pytest.mark.parametrize("where", PATHS, ids=repr)
def test_what_an_address_means(where, here):
    meant = PATHS[where].replace(HERE, here)
    assert parse_address(where) == meant
    if meant.startswith("/"):
        place = open_dir(where)
        assert isinstance(place, PosixCheckpointDir) and place.path == meant
        assert place.below("x").path == meant.rstrip("/") + "/x"


@pytest.mark.parametrize("where", NONE, ids=repr)
def test_what_is_no_address(where, here):
    with pytest.raises(ValueError, match=NONE[where]):
        parse_address(where)
    with pytest.raises(ValueError, match=NONE[where]):
        CheckpointRoot(where)
    with pytest.raises(ValueError, match=NONE[where]):
        save({"a": 1}, where)
    assert os.listdir(here) == ["link"]


@pytest.mark.parametrize(
    "where, root, name",
    [
        ("/ckpt", "/", "ckpt"),
        ("file:///ckpt", "/", "ckpt"),
        ("/a/b/", "/a", "b"),
        ("x", HERE, "x"),
        ("gs://bucket/x", "gs://bucket", "x"),
        ("memory://a/b/", "memory://a", "b"),
        ("s3://bucket/a/x?endpoint=https://h:1/y", "s3://bucket/a?endpoint=https://h:1/y", "x"),
        ("/a?b/c?d", "/a?b", "c?d"),
    ],
)
def test_root_and_name(where, root, name, here):
    assert root_and_name(where) == (root.replace(HERE, here), name)
    assert below(*root_and_name(where)) == parse_address(where)


@pytest.mark.parametrize(
    "where", ["/", ".", "..", "a/..", "a/.", "file:///", "gs://bucket", "memory://", "memory://x", "s3://b?region=r"]
)
def test_no_name(where, here):
    with pytest.raises(ValueError, match="names no checkpoint; give a directory that is to be made"):
        root_and_name(where)


def test_a_checkpoint_in_the_root_directory():
    """Nothing is written there: the directory is there already."""
    root = CheckpointRoot("/")
    assert root.url == "/" and root.temporary("x", "0" * 32).path == f"/.tmp-x-{'0' * 32}"
    code = "from core.dist_checkpointing.publish.checkpoint_root import CheckpointRoot as Root\n"
    code += "Root('/')._strategy.prepare(); print('prepared')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "prepared\n"


NAMES = [
    "epoch=1,loss=2.0",
    "v1@main",
    "étape-1",
    "a (copy)",
    "100% - [x] {y} #1 ?",
    "日本",
    "-",
    "12:30",
    "é" * (NAME_BYTES // 2),
    "n" * NAME_BYTES,
]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name[:20])
def test_names_of_directories(name, tmp_path, single):
    """Saved twice: the first one is replaced, swept and gone."""
    for value in (1, 2):
        save({"a": value}, tmp_path / name, ps=single)
    assert load({"a": 0}, tmp_path / name, ps=single) == {"a": 2}
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("name", ["n" * (NAME_BYTES + 1), "n" * 255, "é" * 107])
def test_names_that_are_too_long(name, tmp_path, single):
    with pytest.raises(
        ValueError, match=rf"has \d+ bytes; the name of a checkpoint has at most {NAME_BYTES}: shorten"
    ):
        save({"a": 1}, tmp_path / name, ps=single)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["a b", "a,b", "a@b", "é", "a%20b", "a?b"])
def test_names_in_object_stores_are_what_urls_take_as_they_are(name):
    with pytest.raises(ValueError, match=r"is no name of a checkpoint: letters, digits, _\.=\+-"):
        check_name(name, local=False)
