"""A real save, its every file operation: killed and losing power after each, the newest checkpoint is always whole.

Our own operations are killed one by one in test_crash.py; here are tensorstore's too, in the order of real threads,
and the writer program's.
"""

import os
import random
import re
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from tests.dist_checkpointing import victims
from tests.dist_checkpointing.aftermath import assert_goes_on, newest
from tests.dist_checkpointing.crash import Disk, read_tree, write_tree
from tests.dist_checkpointing.strace import changes, strace
from tests.marks import FULL, PRODUCT

REPO = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """In memory where there is such a directory: thousands of files are made."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path_factory.getbasetemp()
    with tempfile.TemporaryDirectory(dir=memory) as path:
        yield Path(path)


@pytest.fixture(scope="module")
def told(folder):
    """(changes of the tale, the directory it left)."""
    top = folder / "top"
    (top / "marks").mkdir(parents=True)
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-m", victims.__name__, top]
    strace(*program, log=folder / "log", cwd=REPO, env=environment)
    with open(folder / "log") as log:
        found = changes(log, top)
    return [("mkdir", "marks"), *found], top


def oldest(states):
    return states[0]


def latest(states):
    return states[-1]


def any_of(seed):
    return random.Random(seed).choice


LOSSES = {  # what survives of content, of names
    "killed": (latest, latest),
    "nothing unsynced": (oldest, oldest),
    "names in order": (oldest, latest),  # as a journal of names keeps them
    "content only": (latest, oldest),
    **{f"random {seed}": (any_of(seed), any_of(seed + 100)) for seed in range(2)},
}


@pytest.mark.full
def test_the_log_is_all_that_happened(told):
    log, top = told
    disk = Disk(".")
    for change in log:
        disk.apply(change)
    assert disk.left(latest, latest) == read_tree(top)
    kinds = {kind for kind, *_ in log}
    assert kinds == {"mkdir", "create", "append", "syncing", "sync", "rename", "unlink"}
    assert any(change[0] == "rename" and "__lock" in change[1] for change in log)  # tensorstore's
    assert sum(change[0] == "append" and "/c." in change[1] for change in log) > 50


@pytest.mark.parametrize("loss", [pytest.param(k, marks=PRODUCT if "random" in k else FULL) for k in LOSSES])
def test_every_prefix(loss, told, folder, single):
    log, _ = told
    disk, left, before, points = Disk("."), folder / "left", None, 0
    allowed = {0}  # none
    for change in log:
        disk.apply(change)
        if change[1].startswith("marks/"):
            allowed = {int(seed) for seed in change[1].removeprefix("marks/").split(".")}
        tree = disk.left(*LOSSES[loss]).get("root", {})
        if (tree, allowed) == before:
            continue
        before = tree, allowed
        shutil.rmtree(left, ignore_errors=True)  # of a loss that failed
        write_tree(tree, left)
        assert newest(left, single)[1] in allowed, change
        if points % 16 == 0:
            assert_goes_on(left, single)
        points += 1
    print(f"{points} points of {len(log)} changes")
    assert points > (100 if "random" in loss or loss in ("killed", "names in order") else 15)


def parsed(text):
    """The changes of a readable log: 'strings' and <paths> are written as `-xx` does."""

    def escaped(match):
        return match[1] + "".join(f"\\x{ord(c):02x}" for c in match[2]) + match[3]

    text = re.sub(r"""(")([^"]*)(")""", escaped, re.sub("(<)(/[^>]*)(>)", escaped, text.replace("'", '"')))
    return changes(text.split("\n"), "/t")


def test_the_log_of_overlapping_threads():
    """A directory is used before its mkdir returns; a name changes while its directory is being synced."""
    found = parsed(
        """\
1 mkdir('/t/d', 0777 <unfinished ...>
2 openat(AT_FDCWD</w>, '/t/d/f', O_RDWR|O_CREAT|O_EXCL, 0666) = 4</t/d/f>
1 <... mkdir resumed>) = 0
2 writev(4</t/d/f>, [{iov_base='ab', iov_len=2}, {iov_base='cd', iov_len=2}], 2) = 4
1 fsync(3</t/d> <unfinished ...>
2 rename('/t/d/f', '/t/d/g' <unfinished ...>
2 <... rename resumed>) = 0
1 <... fsync resumed>) = 0
2 openat(AT_FDCWD</w>, '/t/d/g', O_RDONLY) = 5</t/d/g>
2 openat(AT_FDCWD</w>, '/t/d/g', O_WRONLY|O_CREAT|O_EXCL, 0666) = -1 EEXIST (File exists)
2 unlinkat(3</t/d>, 'g', 0) = 0
1 mkdir('/elsewhere', 0777) = 0
2 write(7</elsewhere/f>, 'x', 1) = 1
1 +++ exited with 0 +++"""
    )
    assert found == [
        ("mkdir", "d"),
        ("create", "d/f", False),
        ("append", "d/f", b"ab"),
        ("append", "d/f", b"cd"),
        ("syncing", "d", 7),
        ("rename", "d/f", "d/g"),
        ("sync", "d", 7),
        ("unlink", "d/g"),
    ]
    disk = Disk(".")
    for change in found[:-1]:
        disk.apply(change)
    assert disk.left(latest, latest) == {"d": {"g": b"abcd"}}
    assert disk.root.now["d"].since[0].keys() == {"f"}  # the sync began before the rename
    assert disk.left(oldest, oldest) == {}


def test_what_the_log_must_not_hide():
    with pytest.raises(AssertionError, match="more than"):
        parsed("1 write(4</t/f>, 'ab'..., 9) = 9")
    for call in ("ftruncate(4</t/f>, 3) = 0", "link('/a', '/t/f') = 0", "pwrite64(4</t/f>, 'ab', 2, 7) = 2"):
        with pytest.raises(AssertionError, match="not known"):
            Disk(".").apply(*parsed(f"1 {call}"))
