"""Parts of a file: between documents, nearest to their fractions, never empty; and files far larger than memory."""

import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.datasets.batches import GPTBatches
from core.datasets.splits import TokenRange, split_documents
from core.datasets.token_file import TokenFile
from core.datasets.token_file_writer import TokenFileWriter


def numbered(directory, lengths):
    """Documents of these lengths; the token at position p is p."""
    with TokenFileWriter(Path(directory) / "a", vocab_size=max(1, sum(lengths))) as writer:
        ends = np.cumsum(lengths)
        for end, length in zip(ends, lengths, strict=True):
            writer.add_document(range(end - length, end))
    return TokenFile(Path(directory) / "a")


def sizes(parts):
    return [None if part is None else (part.num_documents, part.num_tokens) for part in parts]


def test_cuts_are_nearest_to_the_fractions(tmp_path):
    file = numbered(tmp_path, [10] * 100)
    assert sizes(split_documents(file, "90,8,2")) == [(90, 900), (8, 80), (2, 20)]
    assert sizes(split_documents(file, "0.904,0.096,0")) == [(90, 900), (10, 100), None]
    assert sizes(split_documents(file, "0.906,0.094")) == [(91, 910), (9, 90), None]
    assert sizes(split_documents(file, "1")) == [(100, 1000), None, None]
    assert sizes(split_documents(file, "0,0,3")) == [None, None, (100, 1000)]
    assert sizes(split_documents(file, "1,0,1")) == [(50, 500), None, (50, 500)]


def test_a_part_with_a_weight_has_a_document(tmp_path):
    file = numbered(tmp_path, [1000, 1, 1])
    assert sizes(split_documents(file, "969,30,1")) == [(1, 1000), (1, 1), (1, 1)]
    assert sizes(split_documents(numbered(tmp_path, [1, 1, 1000]), "969,30,1")) == [(1, 1), (1, 1), (1, 1000)]


def test_too_few_documents_are_refused_with_the_remedy(tmp_path):
    file = numbered(tmp_path, [5, 5])
    with pytest.raises(
        ValueError, match=r"has 2 documents, split='969,30,1' asks for 3 parts; .*--documents paragraph"
    ):
        split_documents(file, "969,30,1")
    assert sizes(split_documents(file, "9,1")) == [(1, 5), (1, 5), None]


@pytest.mark.parametrize("split", ["", "a", "1,2,3,4", "0,0", "-1,2", "nan,1", "inf", "1e308,1e308,0", "1;2"])
def test_bad_splits_are_refused(tmp_path, split):
    with pytest.raises(ValueError, match="must be one to three numbers"):
        split_documents(numbered(tmp_path, [5, 5, 5]), split)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    weights=st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5)),
)
def test_parts_are_all_of_the_file_in_order(lengths, weights):
    if not 0 < sum(w > 0 for w in weights) <= len(lengths):
        return
    with tempfile.TemporaryDirectory() as directory:
        file = numbered(directory, lengths)
        parts = split_documents(file, ",".join(map(str, weights)))
        assert [part is not None for part in parts] == [w > 0 for w in weights]
        kept = [part for part in parts if part is not None]
        assert all(part.num_documents for part in kept)
        documents = [part.document(i).tolist() for part in kept for i in range(part.num_documents)]
        assert documents == [file.document(i).tolist() for i in range(len(lengths))]
        stream = [token for part in kept for token in part.tokens(0, part.num_tokens).tolist()]
        assert stream == list(range(sum(lengths)))


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_the_document_of_every_token(lengths):
    with tempfile.TemporaryDirectory() as directory:
        file = numbered(directory, lengths)
        expected = [i for i, length in enumerate(lengths) for _ in range(length)]
        assert [file.document_at(token) for token in range(file.num_tokens)] == expected
        with pytest.raises(ValueError, match=f"token {file.num_tokens} of"):
            file.document_at(file.num_tokens)


def test_documents_of_several_sequences(tmp_path):
    """Megatron's format has both levels: cuts are between documents, not between sequences."""
    index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 4, 3)
    index += struct.pack("<4i", 2, 1, 1, 4) + struct.pack("<4q", 0, 4, 6, 8) + struct.pack("<3q", 0, 3, 4)
    (tmp_path / "a.idx").write_bytes(index)
    (tmp_path / "a.bin").write_bytes(np.arange(8, dtype="<u2").tobytes())
    file = TokenFile(tmp_path / "a")
    assert (file.num_documents, file.num_sequences) == (2, 4)
    assert [file.document_at(token) for token in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    train, valid, _ = split_documents(file, "1,1")
    assert (train.tokens(0, 4).tolist(), valid.document(0).tolist()) == ([0, 1, 2, 3], [4, 5, 6, 7])


def test_a_range_refuses_what_lies_outside(tmp_path):
    part = TokenRange(numbered(tmp_path, [4, 4, 4]), 1, 2)
    assert part.tokens(0, 4).tolist() == [4, 5, 6, 7]
    for start, stop in ((-1, 2), (0, 5), (3, 2)):
        with pytest.raises(ValueError, match=f"tokens {start} to {stop} of documents 1 to 2 .* have 4"):
            part.tokens(start, stop)
    for number in (-1, 1):
        with pytest.raises(ValueError, match=f"document {number} of a range of 1"):
            part.document(number)
    with pytest.raises(ValueError, match=r"documents 2 to 5 of .*which has 3"):
        TokenRange(part.file, 2, 5)


def test_damage_of_the_index_at_a_cut_is_refused(tmp_path):
    numbered(tmp_path, [4, 4, 4])
    index = bytearray((tmp_path / "a.idx").read_bytes())
    start_of_document_1 = 34 + 3 * 4 + 8
    index[start_of_document_1 : start_of_document_1 + 8] = struct.pack("<q", -8)
    (tmp_path / "a.idx").write_bytes(index)
    with pytest.raises(ValueError, match=r"document 1 begins with sequence 1 at byte -8 of 24"):
        split_documents(TokenFile(tmp_path / "a"), "1,1")


def test_ten_billion_tokens_are_split_and_read_without_an_index(tmp_path):
    """A sparse file of 20 GB: whoever looked at all of it, or built an index of its samples, would be found out."""
    n, documents = 10**10, 10
    with (tmp_path / "a.idx").open("wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, documents, documents + 1))
        file.write(np.full(documents, n // documents, "<i4").tobytes())
        file.write((np.arange(documents) * (n // documents * 2)).astype("<i8").tobytes())
        file.write(np.arange(documents + 1, dtype="<i8").tobytes())
    with (tmp_path / "a.bin").open("wb") as file:
        file.truncate(2 * n)
    train, _, test = split_documents(TokenFile(tmp_path / "a"), "8,1,1")
    assert (train.num_tokens, test.num_tokens) == (8 * 10**9, 10**9)
    batches = GPTBatches(token_file=train, sequence_length=64, global_batch_size=4, seed=1)
    assert batches.num_samples == 125_000_000
    assert batches.batch(10**12)["labels"].eq(0).all()
