"""Any tree of a user's files, with names like ours, and any operations of ours in it: no file is lost or changed."""

import os
import tempfile
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from core.dist_checkpointing import CheckpointManager, save
from core.dist_checkpointing.__main__ import main
from core.dist_checkpointing.publish.checkpoint_root import CheckpointRoot
from core.parallel_state import ParallelState
from tests.dist_checkpointing import toy, whole
from tests.dist_checkpointing.crash import CrashFs, Killed
from tests.marks import FULL, PRODUCT

A = "a" * 32
FOLDERS = ["step-00000001", "step-00000002", "model", "receipts", "tags", ".tmp-x-y", ".trash-z", ".logs", "c"]
FOLDERS += [f".tmp-step-00000001-{A}", f".replaced-step-00000002-{A}", f".trash-{A}"]
FILES = [
    "manifest.json",
    "zarr.json",
    "00000.json",
    "best.json",
    ".lock",
    ".retention.json",
    "heartbeat",
    "c.0",
    "c",
    "notes.txt",
    "latest",
]
FILES += [f"{A[:31]}.heartbeat", ".manifest.json.part", "step-00000003", f".trash-{'b' * 32}", "writer-00000.log"]
TEXTS = ["x", "{", "{}", '{"step": 1}', '{"pid": 1}', '{"crc":0,"files":{},"format":1,"uuid":"x"}', '{"rank": 1}']

OPERATIONS = ("save", "manager", "retain", "sweep", "prune", "export", "reshard")

names = st.lists(st.sampled_from(FOLDERS), max_size=3)
files = st.tuples(names, st.sampled_from(FILES), st.sampled_from(TEXTS))
links = st.tuples(names, st.sampled_from(FILES + FOLDERS), st.just(None))
users = st.tuples(st.just("user"), st.lists(st.one_of(files, links), min_size=1, max_size=6))
where = st.sampled_from(["", "step-00000001", "model", "receipts"])
ours = st.one_of(
    st.tuples(st.sampled_from(["manager", "retain", "sweep", "prune"]), where),
    st.tuples(st.sampled_from(["save", "export", "reshard"]), where.map(lambda folder: f"{folder}/out".lstrip("/"))),
    st.tuples(st.sampled_from(["save", "export", "reshard"]), st.sampled_from([*FOLDERS, "step-00000003"])),
    st.tuples(st.just("killed"), where, st.integers(0, 90)),
)
stories = st.lists(st.one_of(users, ours, ours), min_size=2, max_size=7)


class World:
    """A directory in which a user and our programs do things; `theirs`: what the user put there."""

    def __init__(self, top, source, done):
        self.top, self.source, self.done, self.theirs, self.version = top, source, done, {}, 0

    def user(self, made):
        """Files and links in any directories, those of our checkpoints too; but not in what has our marks."""
        for folders, name, text in made:
            path = self.top.joinpath(*folders, name)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                if text is None:
                    path.symlink_to("/etc")
                else:
                    with open(path, "x") as file:
                        file.write(text)
            except OSError:  # something has the name
                continue
            self.theirs[path] = self.look(path)

    def look(self, path):
        return os.readlink(path) if path.is_symlink() else path.read_text() if path.is_file() else None

    def save(self, where):
        self.version += 1
        save({"a": self.version}, self.top / where, ps=ParallelState.single("cpu"))

    def manager(self, where):
        self.version += 1
        options = {
            "keep_last": 1,
            "keep_best": "loss",
            "stale_s": 0,
            "timeout_s": 0.2,
            "ps": ParallelState.single("cpu"),
        }
        with closing(CheckpointManager(self.top / where, **options)) as manager:
            manager.save(self.version, {"a": self.version})

    def retain(self, where):
        CheckpointRoot(self.top / where).retain(keep_last=1, keep_hours=1.0)

    def sweep(self, where):
        CheckpointRoot(self.top / where, stale_s=0).sweep()

    def prune(self, where):
        return main(["prune", str(self.top / where), "--keep-last", "1"])

    def export(self, where):
        return main(["export", str(self.source), str(self.top / where)])

    def reshard(self, where):
        return main(["reshard", str(self.source), str(self.top / where), "--tp", "3", "--copy"])

    def killed(self, where, at):
        toy.save(CheckpointRoot(self.top / where, fs=CrashFs(at), stale_s=0), 1 + at % 3, at, uuid=uuid4().hex)

    def tell(self, story):
        for name, *arguments in story:
            with suppress(ValueError, OSError, RuntimeError, Killed):
                if not getattr(self, name)(*arguments):
                    self.done[name] += 1
            now = {path: self.look(path) for path in self.theirs if os.path.lexists(path)}
            assert now == self.theirs, (name, *arguments)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """What is exported and copied."""
    path = tmp_path_factory.mktemp("source") / "x"
    save(whole.state(whole.mains(), step=7), path, ps=ParallelState.single("cpu"))
    return path


def check_stories(source, number):
    done = Counter()
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None

    @settings(max_examples=number, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(stories)
    @example([("user", [(["step-00000001"], "notes.txt", "x")]), ("save", "step-00000001"), ("manager", "")])
    @example([("save", "step-00000001"), ("user", [(["step-00000001"], "c.0", "x")]), ("save", "step-00000001")])
    @example([("user", [([".replaced-step-00000002-" + A], "zarr.json", "x")]), ("manager", ""), ("prune", "")])
    @example([("manager", ""), ("save", "x"), ("retain", ""), ("prune", ""), ("export", "y"), ("reshard", "z")])
    @example([("user", [([], ".lock", "x")]), ("manager", ""), ("prune", "")])
    @example([("user", [([], ".retention.json", "x")]), ("manager", ""), ("manager", ""), ("retain", "")])
    @example([("user", [([".trash-z"], "c", "x"), ([".trash-" + A], "c", "x")]), ("sweep", ""), ("save", "out")])
    def told(story):
        with tempfile.TemporaryDirectory(dir=memory) as folder:
            World(Path(folder), source, done).tell(story)

    told()
    assert all(done[name] for name in OPERATIONS) and done.total() >= 2 * number, done  # most are not refused


def test_no_file_of_a_user_is_lost(source, capsys):
    check_stories(source, 30)


@pytest.mark.parametrize("number", [pytest.param(400, marks=FULL), pytest.param(1500, marks=PRODUCT)])
def test_no_file_of_a_user_is_lost_in_many_stories(source, capsys, number):
    check_stories(source, number)
