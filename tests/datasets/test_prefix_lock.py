"""One writer per prefix, and nothing left of those that were killed."""

import errno
import fcntl
import os

import pytest

from core.datasets.token_file import TokenFile
from core.datasets.token_file_writer import TokenFileWriter


def writer(prefix):
    return TokenFileWriter(prefix, vocab_size=9)


def test_a_second_writer_is_refused_and_the_first_goes_on(tmp_path):
    with writer(tmp_path / "a") as first:
        with pytest.raises(ValueError, match=rf"another process \({os.getpid()}\) is writing .*/a; wait"):
            writer(tmp_path / "a").__enter__()
        with writer(tmp_path / "b") as other:
            other.add_document([1])
        first.add_document([1, 2])
    assert TokenFile(tmp_path / "a").num_tokens == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx", "b.bin", "b.idx"]
    with writer(tmp_path / "a") as again:
        again.add_document([3])
    assert TokenFile(tmp_path / "a").num_tokens == 1


def test_temporary_files_of_the_dead_are_removed_and_no_others(tmp_path):
    kinds = ("bin", "idx", "json", "tokenizer.json")
    dead = [tmp_path / f"a.{kind}.{number}.tmp" for number, kind in enumerate(kinds)]
    others = [tmp_path / name for name in ("a.bin.tmp", "a.bin.x.tmp", "ab.bin.1.tmp", "a.text.1.tmp")]
    for path in [*dead, *others, tmp_path / "a.lock.tmp"]:
        path.write_bytes(b"x")
    with pytest.raises(KeyboardInterrupt), writer(tmp_path / "a"):
        assert not any(path.exists() for path in dead)
        raise KeyboardInterrupt
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_a_lock_whose_file_was_removed_meanwhile_is_taken_again(tmp_path, monkeypatch):
    flock, left = fcntl.flock, [1]

    def removed(file, how):
        flock(file, how)
        if left:
            left.pop()
            (tmp_path / "a.lock.tmp").unlink()

    monkeypatch.setattr(fcntl, "flock", removed)
    with writer(tmp_path / "a"):
        monkeypatch.undo()
        with pytest.raises(ValueError, match="another process"):
            writer(tmp_path / "a").__enter__()


def test_without_locks_it_writes_all_the_same(tmp_path, monkeypatch):
    def refused(file, how):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", refused)
    (tmp_path / "a.bin.1.tmp").write_bytes(b"of somebody who may live")
    with writer(tmp_path / "a") as alone:
        alone.add_document([1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.bin.1.tmp", "a.idx"]
