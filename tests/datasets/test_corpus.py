"""The corpus: deterministic, counted, and a split that never moves a file."""

from pathlib import Path

import pytest

from core.datasets.corpus.standard_library import SourceFiles, read_texts, split_by_hash, standard_library

NAMES = [f"package/module_{i}.py" for i in range(400)]


def test_standard_library_is_sorted_unique_and_without_installed_packages():
    sources = standard_library()
    assert list(sources.names) == sorted(set(sources.names))
    assert "argparse.py" in sources.names
    assert "json/decoder.py" in sources.names
    parts = {part for name in sources.names for part in Path(name).parts}
    assert not parts & {"site-packages", "dist-packages", "test", "encodings", "pydoc_data"}
    assert sum((sources.root / name).stat().st_size for name in sources.names) > 5_000_000


def test_listing_a_directory(tmp_path):
    for name in ("b.py", "a/z.py", "a/data.txt", "site-packages/x.py", "_sysconfigdata_x.py", "test/t.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert standard_library(tmp_path) == SourceFiles(tmp_path, ("a/z.py", "b.py"))


def test_directory_without_sources_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds 0 Python files, at least 1"):
        standard_library(tmp_path)


def test_a_name_twice_is_refused(tmp_path):
    with pytest.raises(ValueError, match="3 names, 2 different"):
        SourceFiles(tmp_path, ("a", "b", "a"))


def test_undecodable_and_missing_files_are_skipped_and_counted(tmp_path):
    (tmp_path / "good.py").write_bytes("é\r\n".encode())
    (tmp_path / "latin.py").write_bytes("é".encode("latin-1"))
    assert read_texts(tmp_path, ["good.py", "latin.py", "missing.py"]) == (["é\r\n"], 2)


def test_fingerprint_sees_a_changed_file(tmp_path):
    (tmp_path / "a.py").write_text("1")
    sources = SourceFiles(tmp_path, ("a.py",))
    before = sources.fingerprint()
    assert sources.fingerprint() == before
    (tmp_path / "a.py").write_text("12")
    changed = sources.fingerprint()
    (tmp_path / "a.py").unlink()
    assert len({before, changed, sources.fingerprint()}) == 3


def test_split_is_disjoint_complete_and_about_the_fraction():
    train, valid = split_by_hash(NAMES, 0.25)
    assert sorted(train + valid) == sorted(NAMES)
    assert not set(train) & set(valid)
    assert 70 <= len(valid) <= 130


def test_split_is_the_same_everywhere():
    """Golden: a file that changed sides would have been trained on before it validates."""
    assert split_by_hash(["abc.py", "chunk.py", "opcode.py", "os.py"]) == (
        ["abc.py", "os.py"],
        ["chunk.py", "opcode.py"],
    )


def test_other_files_and_their_order_do_not_move_a_file():
    whole = set(split_by_hash(NAMES)[1])
    assert set(split_by_hash(NAMES[::-3])[1]) == whole & set(NAMES[::-3])


def test_a_larger_fraction_only_adds_to_validation():
    assert set(split_by_hash(NAMES, 0.05)[1]) < set(split_by_hash(NAMES, 0.3)[1])


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 5])
def test_fraction_outside_is_refused(fraction):
    with pytest.raises(ValueError, match=f"valid_fraction={fraction} must lie between 0 and 1"):
        split_by_hash(NAMES, fraction)
