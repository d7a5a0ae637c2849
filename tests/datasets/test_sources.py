"""Which files are found: each once, whatever leads to it, and none that cannot be read to its end."""

import os

import pytest

from core.datasets.corpus.sources import find_sources


def names(*inputs):
    sources, skipped = find_sources(inputs)
    return sorted(source.name for source in sources), dict(skipped)


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "in"
    (root / "sub").mkdir(parents=True)
    (root / "a.txt").write_text("a")
    (root / "sub/b.txt").write_text("b")
    return root


def test_a_file_is_read_once_whatever_names_it(tree):
    once = ["a.txt", "sub/b.txt"]
    assert names(tree, tree / "sub") == (once, {"files given twice": 1})
    assert names(tree, tree) == (once, {"files given twice": 2})
    assert names(tree / "a.txt", tree / "a.txt") == (["a.txt"], {"files given twice": 1})
    (tree / "link.txt").symlink_to("sub/b.txt")
    assert names(tree, tree / "link.txt") == (["a.txt", "link.txt"], {"files given twice": 2})
    assert names(tree / "sub", tree)[0] == ["a.txt", "b.txt"], "the first name counts"


def test_linked_directories_are_followed_but_not_in_a_circle(tree, tmp_path):
    (tmp_path / "else").mkdir()
    (tmp_path / "else/c.txt").write_text("c")
    (tree / "linked").symlink_to(tmp_path / "else")
    (tree / "sub/up").symlink_to("..")
    (tmp_path / "else/back").symlink_to(tree)
    (tree / "aaa").symlink_to("sub")
    assert names(tree) == (["a.txt", "linked/c.txt", "sub/b.txt"], {"directories given twice": 3})


def test_directories_that_cannot_be_read_are_counted(tree, monkeypatch):
    scandir = os.scandir

    def refused(path):
        if str(path).endswith("sub"):
            raise PermissionError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    assert names(tree) == (["a.txt"], {"directories that cannot be read": 1})


def test_a_pipe_is_not_waited_for(tree):
    os.mkfifo(tree / "pipe.txt")
    os.mkfifo(tree / "pipe")
    skipped = {"pipes, sockets and devices": 1, "files of another suffix": 1}
    assert names(tree) == (["a.txt", "sub/b.txt"], skipped)
    with pytest.raises(ValueError, match=r"0 files to read, .* 1 pipes, sockets and devices; name"):
        find_sources([tree / "pipe"])


def test_of_json_only_rows_are_read(tree):
    (tree / "array.json").write_text('\n[\n {"text": "a"}]')
    (tree / "lines.json").write_text('{"text": "a"}\n{"text": "b"}\n')
    others = {"one": '{"text": "a"}\n', "settings": '{\n "a": 1}', "numbers": "[1, 2]", "none": "[]", "text": "text"}
    for name, content in others.items():
        (tree / f"{name}.json").write_text(content)
    os.mkfifo(tree / "pipe.json")
    found = {source.name: source.kind for source in find_sources([tree])[0]}
    assert found == {"a.txt": "text", "sub/b.txt": "text", "array.json": "jsonl", "lines.json": "jsonl"}
    for name in others:
        with pytest.raises(ValueError, match=f"{name}.json is neither an array of rows .* write one of them"):
            find_sources([tree / f"{name}.json"])
    named = {source.name: source.kind for source in find_sources([tree], ["numbers.*"])[0]}
    assert named == found | {"numbers.json": "text"}, "a pattern names text"


def test_a_part_that_others_hold_out_is_told_where_it_lies_beside_train(tmp_path, recwarn):
    for name in ("train-00000.jsonl", "test-00000.jsonl", "a.jsonl"):
        (tmp_path / name).write_text('{"text": "a"}\n')
    with pytest.warns(UserWarning, match=r"test-00000\.jsonl \(1 of such a name\) is read as the files of train"):
        names(tmp_path)
    recwarn.clear()
    names(tmp_path / "train-00000.jsonl")
    (tmp_path / "train-00000.jsonl").unlink()
    names(tmp_path)
    assert not recwarn.list
