"""Sources to documents: which files, in which order, cut where, and what is skipped for which reason."""

import codecs
import gzip
import json
from collections import Counter

import numpy as np
import pytest
import tokenizers as hf
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from core.datasets.corpus import documents as documents_module
from core.datasets.corpus import opening, readers
from core.datasets.corpus.conversations import are_conversations
from core.datasets.corpus.documents import Encoder, TextChunk, cuts
from core.datasets.corpus.readers import read_chunks
from core.datasets.corpus.sources import find_sources
from core.datasets.tokenizers.byte_tokenizer import ByteTokenizer
from core.datasets.tokenizers.trained import END_OF_TEXT, train_tokenizer

ENCODER = Encoder(tokenizer=ByteTokenizer(), dtype=np.dtype("<u2"), end_of_text=256, text_key="text")


def read(*inputs, globs=(), documents="file", encoder=ENCODER):
    """(documents as bytes, skipped) of the inputs."""
    sources, skipped = find_sources(inputs, globs)
    tokens, lengths = [], []
    for piece in read_chunks(sources, skipped, documents=documents, text_key=encoder.text_key):
        result = encoder.encode([piece])
        tokens += result.tokens.tolist()
        added = result.lengths.tolist()
        if result.continued:
            added[0] += lengths.pop()
        lengths += added
        skipped.update(result.skipped)
    ends = np.cumsum(lengths).tolist()
    found = [tokens[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    assert all(document[-1] == 256 for document in found)
    assert sum(lengths) == len(tokens)
    return [bytes(document[:-1]) for document in found], dict(skipped)


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(readers, "CHUNK_BYTES", 16)
    monkeypatch.setattr(documents_module, "CHUNK_BYTES", 16)
    monkeypatch.setattr(readers, "PORTION_BYTES", 64)


def test_the_order_is_that_of_a_hash_and_hidden_things_are_left_out(tmp_path):
    names = ["a.txt", "b.md", "sub/c.py", "sub/deep/d.rst", "e.jsonl", "f.txt.gz", "g.parquet"]
    for name in [*names, "x.bin", ".hidden.txt", ".git/h.txt", "sub/CVS/i.txt", "page.html"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    sources, skipped = find_sources([tmp_path])
    found = [source.name for source in sources]
    assert sorted(found) == sorted(names)
    assert found == ["e.jsonl", "b.md", "a.txt", "sub/c.py", "f.txt.gz", "g.parquet", "sub/deep/d.rst"]
    assert skipped == {"files of another suffix": 2}
    assert {source.name: source.kind for source in sources}["g.parquet"] == "parquet"
    assert len(find_sources([tmp_path], ["*.html", "sub/*"])[0]) == 8
    assert [source.name for source in find_sources([tmp_path / "page.html"])[0]] == ["page.html"], "it was named"


def test_nothing_to_read_is_refused(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"0 files to read, 1 of other suffixes than \.txt"):
        find_sources([tmp_path])
    with pytest.raises(ValueError, match=r"^2 of 3 inputs do not exist: .*/no, .*/neither; name"):
        find_sources([tmp_path, tmp_path / "no", tmp_path / "neither"])


def test_what_is_no_text_is_skipped_and_counted(tmp_path):
    (tmp_path / "good.txt").write_bytes("é\r\n".encode())
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "binary.txt").write_bytes(b"a\0b")
    (tmp_path / "empty.txt").write_bytes(b" \n")
    (tmp_path / "nothing.txt").write_bytes(b"")
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "missing")
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"abcd" * 99)[:-9])
    (tmp_path / "no.txt.zst").write_bytes(b"this is not zstandard")
    with pytest.warns(UserWarning, match=r"dangling.txt is not read, or not all of it: .*No such file"):
        documents, skipped = read(tmp_path)
    assert documents == ["é\r\n".encode()]
    assert skipped == {
        "undecodable files": 1,
        "binary files": 1,
        "empty documents": 2,
        "files that cannot be read": 1,
        "damaged compressed files": 2,
    }


def test_json_lines(tmp_path, small_pieces):
    lines = [
        json.dumps({"text": "one"}),
        "",
        json.dumps({"text": "zwölf\n" * 9}),
        '{"text": "half a pair \\ud800"}',
        '{"other": 1}',
        '{"text": 5}',
        "[1]",
        '{"text": "cut',
        json.dumps({"text": " "}),
        json.dumps({"text": "last"}),
    ]
    content = "\n".join(lines).encode() + b'\n{"text": "\xff"}\n' + b'{"text": "without a line end"}'
    (tmp_path / "a.jsonl").write_bytes(content)
    documents, skipped = read(tmp_path)
    assert documents == [b"one", ("zwölf\n" * 9).encode(), b"last", b"without a line end"]
    assert skipped == {
        "undecodable documents": 1,
        "undecodable lines": 1,
        "rows without a text 'text'": 3,
        "lines that are no JSON": 1,
        "empty documents": 1,
    }


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.zst"])
@pytest.mark.parametrize("length", [10, 63, 64, 65, 200])
def test_a_text_file_is_read_in_portions_and_pieces(tmp_path, small_pieces, name, length):
    text = "".join(f"line {i} é\n" for i in range(50)).encode()[:length].decode(errors="ignore").encode()
    packed = {"gz": gzip.compress, "zst": zstandard.ZstdCompressor().compress}.get(name.rsplit(".")[-1], bytes)
    (tmp_path / name).write_bytes(packed(text))
    documents, skipped = read(tmp_path)
    assert b"".join(documents) == text
    assert len(documents) == 1 if len(text) <= 64 else len(documents) > 1
    assert not skipped
    assert b"".join(read(tmp_path, documents="line")[0]) == text.replace(b"\n", b"")


PARAGRAPHS = "one\nstill one\n\n   two is indented\n \t\n\n\nthree\r\n\r\nfour"


def test_paragraphs_and_lines(tmp_path):
    (tmp_path / "a.txt").write_text(PARAGRAPHS, newline="")
    assert read(tmp_path, documents="paragraph")[0] == [b"one\nstill one", b"   two is indented", b"three", b"four"]
    lines = [b"one", b"still one", b"   two is indented", b"three", b"four"]
    assert read(tmp_path, documents="line")[0] == lines


@settings(max_examples=40, deadline=None)
@given(text=st.text(alphabet="aé\n \r.", max_size=80), limit=st.integers(4, 30))
def test_cuts_lose_nothing_and_part_no_paragraph_line_or_character(text, limit):
    content = text.encode()
    for mode in ("file", "paragraph", "line"):
        parts = list(cuts(content, limit, mode))
        assert b"".join(parts) == content
        assert all(len(part) <= limit for part in parts[:-1]) or mode != "file"
        for part in parts:
            part.decode()
        if mode != "file":
            ends = ("\n\n", "\n\r\n") if mode == "paragraph" else "\n"
            assert all(part.decode().endswith(ends) for part in parts[:-1])


@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet="a \t\r\n", max_size=60), limit=st.integers(1, 30))
def test_paragraphs_are_the_same_wherever_the_text_is_cut(text, limit):
    def paragraphs(parts):
        return [text for part in parts for text in ENCODER.texts(TextChunk("paragraph", part))]

    whole = paragraphs([text.encode()])
    assert paragraphs(cuts(text.encode(), limit, "paragraph")) == whole
    assert all(found == found.strip(b"\r\n") for found in whole)


def test_paragraphs_of_a_file_with_carriage_returns(tmp_path, small_pieces):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo \r\n\r\n \t\r\n three\r\r\n\r\n" * 9 + b"end\r\n")
    documents, _ = read(tmp_path, documents="paragraph")
    assert documents == [b"one\r\ntwo ", b" three"] * 9 + [b"end"]


@pytest.mark.parametrize("documents", ["file", "paragraph", "line"])
def test_a_byte_order_mark_is_no_text(tmp_path, documents):
    (tmp_path / "a.txt").write_bytes(codecs.BOM_UTF8 + "é\ufeff".encode())
    (tmp_path / "b.txt").write_bytes(codecs.BOM_UTF8)
    (tmp_path / "c.jsonl").write_bytes(codecs.BOM_UTF8 + b'{"text": "c"}')
    found, skipped = read(tmp_path, documents=documents)
    assert sorted(found) == [b"c", "é\ufeff".encode()]
    assert skipped == {"empty documents": 1}


def test_a_damaged_archive_is_read_up_to_the_damage(tmp_path, small_pieces):
    lines = [f"line {i} é".encode() for i in range(9)]
    text, damaged = b"\n".join(lines), {"damaged compressed files": 1}
    # stored, not packed: what is cut away is the end of the text, inside of a character, checksum and length
    cut = gzip.compress(text, 0)[:-9]
    (tmp_path / "a.txt.gz").write_bytes(cut)
    assert read(tmp_path, documents="line") == (lines[:-1], damaged)
    found, skipped = read(tmp_path)
    assert (b"".join(found), skipped) == (b"\n".join(lines[:-1]) + b"\n", damaged)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.replace(b" 2 ", b" 2\n\n"), 0)[:-9])
    assert read(tmp_path, documents="paragraph") == ([b"\n".join(lines[:2]) + b"\nline 2"], damaged)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text) + b"garbage")
    assert read(tmp_path, documents="line") == (lines, damaged)
    (tmp_path / "a.txt.gz").unlink()
    rows = b"".join(b'{"text": "%s"}\n' % line for line in lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(rows, 0)[:-14])
    assert read(tmp_path) == (lines[:-1], damaged)
    (tmp_path / "a.jsonl.gz").unlink()
    (tmp_path / "a.txt.zst").write_bytes(zstandard.ZstdCompressor().compress(text + b"\n") + b"garbage")
    assert read(tmp_path, documents="line") == (lines, damaged)


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.ZstdCompressor().compress])
def test_an_array_of_rows_is_its_rows(tmp_path, small_pieces, pack):
    path = tmp_path / f"a.json{ {bytes: '', gzip.compress: '.gz'}.get(pack, '.zst') }"
    rows = [{"text": "one \u2028 é"}, {"body": "x"}, 7, {"text": "\ud800"}, {"text": "two\nlines"}]
    path.write_bytes(pack(codecs.BOM_UTF8 + json.dumps(rows, indent=1).encode()))
    skipped = {"rows without a text 'text'": 2, "undecodable documents": 1}
    assert read(tmp_path) == read(path) == (["one \u2028 é".encode(), b"two\nlines"], skipped)
    path.write_bytes(pack(b"".join(json.dumps(row).encode() + b"\n" for row in rows)))
    assert read(path)[0] == ["one \u2028 é".encode(), b"two\nlines"]


def test_an_array_that_is_no_json_or_too_large_is_told(tmp_path, monkeypatch):
    (tmp_path / "a.json").write_text('[{"text": "a"}')
    with pytest.raises(ValueError, match=r"a.json is no JSON: Expecting ',' .* line 1"):
        read(tmp_path)
    monkeypatch.setattr(opening, "LARGEST_ARRAY", 13)
    with pytest.raises(ValueError, match=r"is one JSON array of more than .* write JSON lines"):
        read(tmp_path)


GPT_4 = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@pytest.mark.parametrize("pattern", [None, GPT_4])
def test_a_document_in_pieces_has_the_tokens_of_the_whole(pattern):
    text = "def f(x):\n    if x:\n\n        return x + (1)\n\n\nclass A:\n\tpass()\n" * 9
    tokenizer = train_tokenizer([text], 300)
    if pattern is not None:
        split = hf.pre_tokenizers.Split(hf.Regex(pattern), "isolated")
        byte_level = hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer._inner.pre_tokenizer = hf.pre_tokenizers.Sequence([split, byte_level])
        alphabet = hf.pre_tokenizers.ByteLevel.alphabet()
        trainer = hf.trainers.BpeTrainer(
            vocab_size=300, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
        )
        tokenizer._inner.train_from_iterator([text], trainer)
    whole = tokenizer.encode(text)
    parts = list(cuts(text.encode(), 80))
    assert len(parts) > 8
    assert [i for part in parts for i in tokenizer.encode(part.decode())] == whole


def test_a_huge_row_is_tokenised_in_pieces(tmp_path, small_pieces):
    text = "a long row without a line end " * 20
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
    assert read(tmp_path) == ([text.encode()], {})


def test_parquet_and_saved_datasets(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": ["one", None, "", "two"], "n": [1, 2, 3, 4]}), tmp_path / "a.parquet")
    assert read(tmp_path) == ([b"one", b"two"], {"rows without a text 'text'": 1, "empty documents": 1})
    other = Encoder(tokenizer=ByteTokenizer(), dtype=np.dtype("<u2"), end_of_text=256, text_key="words")
    assert read(tmp_path, encoder=other) == ([], {"rows without a text 'words'": 4})
    (tmp_path / "a.parquet").write_bytes(b"PAR1 not")
    with pytest.warns(UserWarning, match=r"a.parquet is not read, or not all of it: .*magic bytes"):
        assert read(tmp_path) == ([], {"files damaged from some place on": 1})


def test_half_of_a_saved_dataset_is_refused(tmp_path):
    (tmp_path / "in" / "rows").mkdir(parents=True)
    (tmp_path / "in" / "rows" / "data-00000-of-00001.arrow").write_bytes(b"")
    for name, missing in (("dataset_info.json", "state.json"), ("state.json", "dataset_info.json")):
        (tmp_path / "in" / "rows" / name).write_text("{}")
        with pytest.raises(ValueError, match=rf"rows has .arrow files and no {missing}: it is half of a dataset"):
            read(tmp_path / "in")
        (tmp_path / "in" / "rows" / name).unlink()


def test_rows_of_a_damaged_table_are_of_no_kind(tmp_path):
    """Beside chats it is left out and told, not taken for something else."""
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    chats = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]]
    parquet.write_table(pyarrow.table({"messages": chats}), tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 not")
    assert are_conversations(find_sources([tmp_path])[0])


def test_a_table_is_not_learned_as_text_unless_a_glob_says_so(tmp_path):
    (path := tmp_path / "rows.csv").write_text("text,n\none,1\n")
    with pytest.raises(ValueError, match=r"rows.csv is a table, whose header .* write its rows as JSON lines"):
        find_sources([path])
    assert [source.kind for source in find_sources([path], globs=("*.csv",))[0]] == ["text"]


@pytest.mark.full  # the library takes seconds to import
def test_saved_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": ["one", None, "two"], "n": [1, 2, 3]})
    rows.save_to_disk(tmp_path / "in" / "rows")
    assert read(tmp_path / "in") == ([b"one", b"two"], {"rows without a text 'text'": 1})
    datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path / "one")
    assert read(tmp_path / "one") == ([b"one", b"two"], {"rows without a text 'text'": 1})
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "splits")
    with pytest.raises(ValueError, match=r"dataset of 2 splits; name those to read: .*splits/test, .*splits/train"):
        read(tmp_path / "splits")
    assert len(read(tmp_path / "splits" / "train")[0]) == 2
    (shard,) = (tmp_path / "in" / "rows").glob("*.arrow")
    content = shard.read_bytes()
    for rest in (content[: len(content) // 2], b"", None):
        shard.unlink() if rest is None else shard.write_bytes(rest)
        with pytest.raises(ValueError, match=r"rows is not all of a dataset of save_to_disk: .+; save it again"):
            read(tmp_path / "in")


def test_a_missing_extra_is_told(tmp_path, monkeypatch):
    (tmp_path / "a.txt.zst").write_bytes(b"")
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(ImportError, match=r"a\.txt\.zst needs zstandard: pip install zstandard"):
        list(read_chunks(find_sources([tmp_path])[0], Counter()))
