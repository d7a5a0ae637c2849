"""The same answers of a directory and of key-value stores."""

import math
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import tensorstore as ts

from core.dist_checkpointing.publish.checkpoint_root import CheckpointRoot
from core.dist_checkpointing.storage import checkpoint_dir as checkpoint_dir_module
from core.dist_checkpointing.storage.checkpoint_dir import (
    DiskFullError,
    PosixCheckpointDir,
    free_bytes,
    open_checkpoint_dir,
    open_dir,
    space_for,
)
from core.dist_checkpointing.storage.kv_checkpoint_dir import KvCheckpointDir
from tests.dist_checkpointing.toy import PLACES, save, store, version_of


@pytest.fixture(params=PLACES)
def place(request, tmp_path):
    where = store(request.param, tmp_path)
    if isinstance(where, KvCheckpointDir):
        return where
    where.mkdir()
    return open_dir(where)


def test_files(place):
    place.write_all({"b/x": b"12345", "a": b"", "b/c/y": b"7"})
    assert place.names() == ["a", "b/c/y", "b/x"] and place.names("b") == ["b/c/y", "b/x"] and place.names("c") == []
    assert place.sizes() == {"a": 0, "b/c/y": 1, "b/x": 5}
    assert [place.size("b/x", expected) for expected in (0, 1, 4, 5, 6, 99)] == [5] * 6
    assert [place.size("a", expected) for expected in (0, 1)] == [0, 0] and place.size("z", 3) is None
    assert place.read("b/x") == b"12345" and place.read("b/x", 1, 3) == b"234" and place.read("b/x", 3) == b"45"
    assert place.read("b/x", 3, 9) == b"45" and place.read("b/x", 9) == b"" and place.read("a", 0, 4) == b""
    for arguments in ((), (1,), (0, 1)):
        with pytest.raises(FileNotFoundError):
            place.read("z", *arguments)
    place.write("b/x", b"new")
    place.remove("a")
    place.remove("a")
    assert place.read("b/x") == b"new" and place.names() == ["b/c/y", "b/x"]
    assert place.below("b").read("x") == b"new" and place.below("b").url == place.url + "b/"


def test_signs_of_life(place):
    assert place.age("beat") == math.inf
    with pytest.raises(FileNotFoundError):
        place.touch("beat")
    place.write_all({"beat": b'{"time": 1}'})
    if isinstance(place, PosixCheckpointDir):
        os.utime(place.url + "beat", (1, 1))
    assert place.age("beat") > 10**9
    place.touch("beat")
    assert -1 < place.age("beat") < 100


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_open_a_path(tmp_path, prefix):
    save(CheckpointRoot(prefix + str(tmp_path)), 1, 5)
    place = open_checkpoint_dir(prefix + str(tmp_path / "step-00000001"))
    assert version_of(place) == 5 and place.kvstore("a/") == {
        "driver": "file",
        "path": f"{tmp_path}/step-00000001/a/",
    }


def test_open_a_url():
    save(CheckpointRoot("memory://runs/7"), 1, 5)
    place = open_checkpoint_dir("memory://runs/7/step-00000001")
    assert version_of(place) == 5  # through the pointer, which is no manifest
    assert version_of(open_checkpoint_dir(place.url)) == 5
    assert open_checkpoint_dir("memory://nothing").names() == []


MINIO = {"endpoint": "https://h:9000", "aws_region": "us-east-1"}
OPTIONS = {
    "gs://bucket/a b": {"driver": "gcs"},
    "gs://bucket/a b?user_project=p": {"driver": "gcs", "gcs_user_project": {"project_id": "p"}},
    "s3://bucket/a b/": {"driver": "s3"},
    "s3://bucket/a b?endpoint=https://h:9000/": {"driver": "s3", **MINIO},
    "s3://bucket/a b?endpoint=https://h:9000&region=r": {"driver": "s3", **MINIO, "aws_region": "r"},
    "s3://bucket/a b?region=r": {"driver": "s3", "aws_region": "r"},
    "s3://bucket/a b?profile=me&conditional_write=true": {
        "driver": "s3",
        "aws_credentials": {
            "type": "profile",
            "profile": "me",
            "credentials_file": "/aws/keys",
            "config_file": "/aws/config",
        },
        "use_conditional_write": True,
    },
}


@pytest.mark.parametrize("url", OPTIONS)
def test_urls(url, monkeypatch):
    """Parsed only: opening such a store makes its client look for the user's credentials."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/aws/keys")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/aws/config")

    def opened(spec, context):
        expected = {"bucket": "bucket", "path": "a b/", **OPTIONS[url]}
        assert ts.KvStore.Spec(spec.replace(" ", "%20") if isinstance(spec, str) else spec).to_json() == expected
        raise ValueError("parsed")

    monkeypatch.setattr(
        checkpoint_dir_module, "ts", SimpleNamespace(KvStore=SimpleNamespace(open=opened, Spec=ts.KvStore.Spec))
    )
    with pytest.raises(ValueError, match=f"{re.escape(url)}: .*parsed"):
        open_dir(url)


def test_options_of_a_url_come_before_the_environment(monkeypatch):
    for name, value in (("AWS_ENDPOINT_URL", "http://a"), ("AWS_REGION", "x")):
        monkeypatch.setenv(name, value)
    found = checkpoint_dir_module._store_spec("s3://bucket/run/", {"endpoint": "http://b", "region": "y"})
    assert (found["endpoint"], found["aws_region"]) == ("http://b", "y")
    found = checkpoint_dir_module._store_spec("s3://bucket/run/", {"region": "y"})
    assert (found["endpoint"], found["aws_region"]) == ("http://a", "y")


@pytest.mark.parametrize("url", ["ftp://x/y", "gs://x"])
def test_urls_that_are_none(url):
    with pytest.raises(ValueError, match=f"{url}: not a path, file://, gs://, s3:// or memory://"):
        open_dir(url)


def test_space_is_asked_for_before(tmp_path):
    place = open_checkpoint_dir(tmp_path)
    free = free_bytes(place)
    assert 0 < free < 2**60
    told = rf"{2**60} bytes needed, \d+ free; the older checkpoints are intact"
    with pytest.raises(DiskFullError, match=told), space_for(place, 2**60):
        pytest.fail("written without space")
    with space_for(open_checkpoint_dir("memory://x"), 2**60):
        pass
    with pytest.raises(OSError, match="another"), space_for(place, 1):
        raise OSError("another")


FULL = """
import resource, sys
import tensorstore as ts
from core.dist_checkpointing.storage.checkpoint_dir import DiskFullError, open_checkpoint_dir, space_for
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
place = open_checkpoint_dir(sys.argv[1])
writes = [
    lambda: place.write("x", bytes(2000)),
    lambda: place.write_all({"y": bytes(2000)}),
    lambda: ts.KvStore.open(place.kvstore()).result().write("z", bytes(2000)).result(),
]
for write in writes:
    try:
        with space_for(place, 4321):
            write()
    except DiskFullError as error:
        assert error.needed == 4321 and error.free > 4321, error
    else:
        raise SystemExit("written")
"""


def test_a_disk_that_becomes_full(tmp_path):
    subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], check=True)
