"""`hf://datasets/ORG/NAME`: the files of a data set of the Hub, as those of a folder; a server stands for it."""

import os
import subprocess
import sys

import pytest

from core.datasets.corpus.hub import HubName, is_hub_name
from core.datasets.corpus.sources import SUFFIXES
from core.datasets.token_file import TokenFile
from tests.datasets.fake_hub import FakeHub

LINES = [b'{"text": "the %d. line of the first file"}\n' % i for i in range(200)]
FILES = {
    "README.md": b"# a card\n",
    "data/train-0.jsonl": b"".join(LINES[:120]),
    "data/train-1.jsonl": b"".join(LINES[120:]),
    "data/test-0.jsonl": b'{"text": "not to be trained on"}\n',
}


@pytest.fixture(scope="module")
def hub():
    server = FakeHub("org/name", FILES)
    yield server
    server.shutdown()
    server.server_close()


def environment(hub, home, **more):
    return os.environ | {"HF_ENDPOINT": hub.address, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"} | more


def prepare(source, output, env):
    command = [sys.executable, "-m", "core.datasets.prepare", "--input", source, "--output", str(output)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


def content(prefix):
    return [prefix.with_suffix(suffix).read_bytes() for suffix in (".bin", ".idx")]


@pytest.mark.parametrize(
    "name, expected",
    [
        ("hf://datasets/org/name", ("org/name", "main", "")),
        ("hf://datasets/org/name/", ("org/name", "main", "")),
        ("hf://datasets/org/na.me@v1.0", ("org/na.me", "v1.0", "")),
        ("hf://datasets/org/name@abc/data/train-*.parquet", ("org/name", "abc", "data/train-*.parquet")),
    ],
)
def test_names(name, expected):
    parsed = HubName.parse(name)
    assert is_hub_name(name) and (parsed.repo, parsed.revision, parsed.files) == expected


@pytest.mark.parametrize("name", ["hf://org/name", "hf://datasets/name", "hf://datasets/a/b@", "hf://models/a/b"])
def test_other_forms_are_refused(name):
    with pytest.raises(ValueError, match=r"the form is hf://datasets/ORG/NAME, with @REVISION and /FILES"):
        HubName.parse(name)


def test_files_that_are_meant():
    def of(files, paths=FILES):
        return HubName("hf://datasets/org/name", "org/name", "main", files).matching(paths, SUFFIXES)

    assert of("data/train-*") == of("data/train-[01].jsonl") == ["data/train-0.jsonl", "data/train-1.jsonl"]
    assert len(of("data")) == 3 and of("README.md") == ["README.md"]
    with pytest.raises(ValueError, match=r"2 splits \(test, train\).*name/data/train-\*.jsonl"):
        of("")
    assert of("", ["a.parquet", "README.md", "b.txt", "x.png", "retrained.txt"]) == [
        "a.parquet",
        "b.txt",
        "retrained.txt",
    ]
    with pytest.raises(ValueError, match="none of its 4 files like 'train' can be read"):
        of("train")


def test_the_tokens_are_those_of_the_same_files_on_disk(hub, tmp_path):
    local = tmp_path / "local"
    local.mkdir()
    for number in (0, 1):
        (local / f"train-{number}.jsonl").write_bytes(FILES[f"data/train-{number}.jsonl"])
    env = environment(hub, tmp_path / "home")
    name = "hf://datasets/org/name/data/train-*"
    done = prepare(name, tmp_path / "a", env)
    assert done.returncode == 0, done.stderr
    assert prepare(str(local), tmp_path / "b", env).returncode == 0
    assert content(tmp_path / "a") == content(tmp_path / "b")
    assert TokenFile(tmp_path / "a").num_documents == 200
    downloads = [path for command, path in hub.asked if command == "GET" and "resolve" in path]
    assert sorted(downloads) == sorted({*downloads}) and len(downloads) == 2
    # what was downloaded is found again, without a connection as well
    offline = prepare(name, tmp_path / "c", environment(hub, tmp_path / "home", HF_HUB_OFFLINE="1"))
    assert offline.returncode == 0, offline.stderr
    assert content(tmp_path / "c") == content(tmp_path / "a")
    assert len([path for command, path in hub.asked if command == "GET" and "resolve" in path]) == 2


@pytest.mark.parametrize(
    "name, offline, says",
    [
        ("hf://datasets/org/other", "0", "the Hub has no such data set or revision"),
        ("hf://datasets/org/name@v9", "0", "the Hub has no such data set or revision"),
        ("hf://datasets/org/name", "0", "files of 2 splits (test, train)"),
        ("hf://datasets/org/name/data", "1", "was not reached, and none of its files is in the cache"),
    ],
)
def test_what_the_hub_has_not_is_refused_in_a_line(hub, tmp_path, name, offline, says):
    done = prepare(name, tmp_path / "a", environment(hub, tmp_path / "home", HF_HUB_OFFLINE=offline))
    assert done.returncode == 1 and says in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not list(tmp_path.glob("a*"))


def test_a_hub_that_nobody_reaches_is_told_in_a_line(hub, tmp_path):
    """Not HF_HUB_OFFLINE: the library tries, and its HTTP client's error comes through."""
    env = environment(hub, tmp_path / "home", HF_ENDPOINT="http://127.0.0.1:9")
    done = prepare("hf://datasets/org/name/data/train-*", tmp_path / "a", env)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "the Hub was not reached, and none of its files is in the cache" in done.stderr
    assert "or name files on this disk" in done.stderr


@pytest.mark.full
def test_a_run_takes_it_on_two_ranks(hub, tmp_path):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "core.pretrain",
    ]
    flags = "--model.num-layers 1 --model.hidden-size 32 --model.num-attention-heads 2 --data.sequence-length 16"
    env = environment(hub, tmp_path / "home", OMP_NUM_THREADS="1")
    where = ["--data.train", "hf://datasets/org/name/data/train-*", "--data.directory", str(tmp_path / "data")]
    run = [
        *command,
        *flags.split(),
        *where,
        "--data.vocab-size",
        "300",
        "--training.train-steps",
        "2",
        "--training.global-batch-size",
        "4",
    ]
    done = subprocess.run(run, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "2 files of commit c0ffee" in done.stderr
    assert done.stderr.count("files of commit") == 1
