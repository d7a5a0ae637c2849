"""Token files: the bytes of the format, round trips, and every damage refused by name."""

import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.datasets.token_file import TokenFile
from core.datasets.token_file_writer import TokenFileWriter
from core.datasets.tokenizers.byte_tokenizer import ByteTokenizer

DOCUMENTS = [[1, 2, 3], [], [4, 500]]


def write(prefix, documents, vocab_size=501, **kwargs):
    with TokenFileWriter(prefix, vocab_size=vocab_size, **kwargs) as writer:
        for document in documents:
            writer.add_document(document)
    return prefix


def index_by_hand(magic=b"MMIDIDX\x00\x00", version=1, code=8, n=3, d=4):
    """The `.idx` of DOCUMENTS, field by field."""
    return b"".join(
        [
            magic,
            struct.pack("<Q", version),
            struct.pack("<B", code),
            struct.pack("<Q", n),
            struct.pack("<Q", d),
            struct.pack("<3i", 3, 0, 2),
            struct.pack("<3q", 0, 6, 6),
            struct.pack("<4q", 0, 1, 2, 3),
        ]
    )


def test_bytes_are_megatrons(tmp_path):
    write(tmp_path / "a", DOCUMENTS)
    assert (tmp_path / "a.idx").read_bytes() == index_by_hand()
    assert (tmp_path / "a.bin").read_bytes() == struct.pack("<5H", 1, 2, 3, 4, 500)


def test_reads_a_file_written_by_hand_with_two_sequences_in_a_document(tmp_path):
    index = index_by_hand(d=3)[:-32] + struct.pack("<3q", 0, 2, 3)
    (tmp_path / "a.idx").write_bytes(index)
    (tmp_path / "a.bin").write_bytes(struct.pack("<5H", 1, 2, 3, 4, 500))
    file = TokenFile(tmp_path / "a")
    assert (file.num_documents, file.num_tokens, file.dtype) == (2, 5, np.dtype("uint16"))
    assert [file.document(i).tolist() for i in range(2)] == [[1, 2, 3], [4, 500]]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(0, 99_999), max_size=6), max_size=6), st.sampled_from([100_000, 2**31]))
def test_round_trip_int32(documents, vocab_size):
    with tempfile.TemporaryDirectory() as directory:
        file = TokenFile(write(Path(directory) / "a.b", documents, vocab_size))
        assert file.dtype == np.int32
        assert [file.document(i).tolist() for i in range(file.num_documents)] == documents
        stream = [token for document in documents for token in document]
        assert file.tokens(0, file.num_tokens).tolist() == stream
        assert file.tokens(1, 3).tolist() == stream[1:3] if len(stream) >= 3 else file.num_tokens < 3


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(1, "uint16"), (2**16, "uint16"), (2**16 + 1, "int32"), (2**31, "int32")]
)
def test_smallest_dtype_holds_the_last_id(tmp_path, vocab_size, dtype):
    file = TokenFile(write(tmp_path / "a", [[vocab_size - 1]], vocab_size))
    assert file.dtype == np.dtype(dtype)
    assert file.tokens(0, 1).tolist() == [vocab_size - 1]


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
def test_every_integer_dtype_round_trips(tmp_path, dtype):
    file = TokenFile(write(tmp_path / "a", [[1, 127], [0]], 128, dtype=dtype))
    assert file.dtype == np.dtype(dtype)
    assert file.document(0).tolist() == [1, 127]


def test_views_are_mapped_and_read_only(tmp_path):
    view = TokenFile(write(tmp_path / "a", DOCUMENTS)).tokens(0, 5)
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 7


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (index_by_hand(magic=b"NNIDIDX\x00\x00"), r"a\.idx begins with b'NNIDIDX.*b'MMIDIDX"),
        (b"PK\x03\x04" + bytes(60), r"a\.idx begins with b'PK"),
        (index_by_hand(version=2), "version 2, this reads version 1"),
        (index_by_hand(code=0), "dtype code 0, "),
        (index_by_hand(code=7), "dtype code 7, "),
        (index_by_hand(code=9), "dtype code 9, "),
        (index_by_hand(code=4), r"a\.bin has 10 bytes, a\.idx says 14"),
        (index_by_hand()[:33], "33 bytes, its header alone has 34"),
        (index_by_hand()[:-1], "101 bytes, .* makes 102"),
        (index_by_hand() + b"\0", "103 bytes, .* makes 102"),
        (index_by_hand(n=2**61), "102 bytes, its header of 2305843009213693952 sequences"),
        (index_by_hand(d=2**61), "and 2305843009213693952 document indices"),
        (index_by_hand()[:-8] + struct.pack("<q", 2), r"documents span sequences \(0, 2\), .* 0 to 3"),
        (index_by_hand(n=0, d=0)[:34], "documents span sequences None"),
    ],
)
def test_damaged_index_is_refused(tmp_path, index, message):
    write(tmp_path / "a", DOCUMENTS)
    (tmp_path / "a.idx").write_bytes(index)
    with pytest.raises(ValueError, match=message) as error:
        TokenFile(tmp_path / "a")
    assert "write it again" in str(error.value)


@pytest.mark.parametrize("change", [-10, -2, -1, 1, 2])
def test_bin_of_another_length_is_refused(tmp_path, change):
    write(tmp_path / "a", DOCUMENTS)
    content = (tmp_path / "a.bin").read_bytes()
    (tmp_path / "a.bin").write_bytes(content[:change] if change < 0 else content + bytes(change))
    with pytest.raises(ValueError, match=rf"a\.bin has {10 + change} bytes, a\.idx says 10; write it again"):
        TokenFile(tmp_path / "a")


@pytest.mark.parametrize("offset", [34, 38, 46, 54, 78, 86])  # lengths 0 and 1, pointers 0 and 1, indices 1, 2
def test_damage_inside_the_tables_is_found_where_it_is_read(tmp_path, offset):
    write(tmp_path / "a", DOCUMENTS)
    index = bytearray((tmp_path / "a.idx").read_bytes())
    index[offset] ^= 0x05
    (tmp_path / "a.idx").write_bytes(index)
    file = TokenFile(tmp_path / "a")
    with pytest.raises(ValueError, match=r"document . spans|sequences of document"):
        [file.document(i) for i in range(3)]


@pytest.mark.parametrize("shift", [-2, 1, 20])
def test_pointers_before_between_or_behind_the_tokens_are_refused(tmp_path, shift):
    write(tmp_path / "a", DOCUMENTS)
    index = bytearray((tmp_path / "a.idx").read_bytes())
    index[46:62] = struct.pack("<2q", shift, shift + 6)  # they agree with the lengths
    (tmp_path / "a.idx").write_bytes(index)
    with pytest.raises(ValueError, match=rf"document 0 begin at bytes \[{shift}, {shift + 6}\]"):
        TokenFile(tmp_path / "a").document(0)


def test_missing_half_is_named(tmp_path):
    write(tmp_path / "a", DOCUMENTS)
    (tmp_path / "a.bin").unlink()
    with pytest.raises(FileNotFoundError, match=rf"a\.idx\.bin does not exist: .*; give {tmp_path}/a, what"):
        TokenFile(tmp_path / "a.idx")
    with pytest.raises(FileNotFoundError, match=r"/no\.jsonl does not exist, and no prefix .*no\.jsonl\.bin, either"):
        TokenFile(tmp_path / "no.jsonl")
    with pytest.raises(FileNotFoundError, match=r"a\.bin does not exist: .*; make it with"):
        TokenFile(tmp_path / "a")


def test_out_of_range_is_refused(tmp_path):
    file = TokenFile(write(tmp_path / "a", DOCUMENTS))
    for start, stop in ((-1, 2), (3, 2), (0, 6)):
        with pytest.raises(ValueError, match=f"tokens {start} to {stop} of .*which has 5"):
            file.tokens(start, stop)
    for number in (-1, 3):
        with pytest.raises(ValueError, match=f"document {number} of .*which has 3"):
            file.document(number)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([0, 501], "document 0 has tokens 0 to 501, vocab_size=501 allows 0 to 500"),
        ([-1], "tokens -1 to -1"),
        ([65536 + 1], "tokens 65537"),  # would wrap to 1
        ([0.5], r"float64 of shape \[1\]"),
        ([[1]], r"int64 of shape \[1, 1\]"),
    ],
)
def test_bad_tokens_are_refused_and_nothing_is_left(tmp_path, tokens, message):
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "a", [tokens])
    assert list(tmp_path.iterdir()) == []


def test_vocabulary_larger_than_the_dtype_is_refused(tmp_path):
    with pytest.raises(ValueError, match="vocab_size=70000, but uint16 holds 1 to 65536 ids"):
        TokenFileWriter(tmp_path / "a", vocab_size=70000, dtype="uint16")
    with pytest.raises(ValueError, match=f"vocab_size={2**31 + 1}, but int32 holds 1 to {2**31} ids"):
        TokenFileWriter(tmp_path / "a", vocab_size=2**31 + 1)
    with pytest.raises(ValueError, match="dtype float32 is none of"):
        TokenFileWriter(tmp_path / "a", vocab_size=10, dtype="float32")


def test_interrupted_writer_leaves_nothing_that_opens(tmp_path):
    with pytest.raises(KeyboardInterrupt), TokenFileWriter(tmp_path / "a", vocab_size=9) as writer:
        writer.add_document([1])
        with pytest.raises(FileNotFoundError):
            TokenFile(tmp_path / "a")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_interrupted_writer_leaves_the_old_file_whole(tmp_path):
    write(tmp_path / "a", DOCUMENTS)
    with pytest.raises(KeyboardInterrupt), TokenFileWriter(tmp_path / "a", vocab_size=9) as writer:
        writer.add_document([7])
        raise KeyboardInterrupt
    assert TokenFile(tmp_path / "a").tokens(0, 5).tolist() == [1, 2, 3, 4, 500]


@pytest.mark.parametrize("survives", [0, 1])
def test_death_between_the_renames_leaves_nothing_that_opens(tmp_path, monkeypatch, survives):
    write(tmp_path / "a", DOCUMENTS)
    calls = []
    replace = Path.replace

    def dies(self, target):
        if len(calls) == survives:
            raise KeyboardInterrupt
        calls.append(target)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", dies)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "a", [[8, 8, 8], [], [8, 8]])  # the same lengths: a mixture would look whole
    with pytest.raises(FileNotFoundError, match=r"a\.bin"):
        TokenFile(tmp_path / "a")
    monkeypatch.undo()
    write(tmp_path / "a", [[8, 8, 8]])
    assert TokenFile(tmp_path / "a").num_tokens == 3


def test_files_of_other_programs_stay(tmp_path):
    """nanoGPT's train.bin holds ids alone."""
    np.arange(9, dtype="uint16").tofile(tmp_path / "train.bin")
    before = (tmp_path / "train.bin").read_bytes()
    for name in ("train", "train.bin"):
        with pytest.raises(FileNotFoundError, match=r"train.bin has no train.idx beside it.*under another name"):
            TokenFile(tmp_path / name)
    with pytest.raises(ValueError, match=r"train.bin exists and would be replaced.*choose another prefix"):
        TokenFileWriter(tmp_path / "train", vocab_size=9)
    assert (tmp_path / "train.bin").read_bytes() == before
    with TokenFileWriter(tmp_path / "mine", vocab_size=9) as writer:
        writer.add_document(np.memmap(tmp_path / "train.bin", "uint16"))
    assert TokenFile(tmp_path / "mine").tokens(0, 9).tolist() == [*range(9)]

    (tmp_path / "mine.idx").write_bytes(b"something else")
    with pytest.raises(ValueError, match=r"mine.idx exists and would be replaced, and it is no token index"):
        TokenFileWriter(tmp_path / "mine", vocab_size=9)


def test_megatrons_files_stay_where_a_text_is_prepared(tmp_path):
    write(tmp_path / "a", DOCUMENTS)  # without a card, as preprocess_data.py leaves them
    with pytest.raises(ValueError, match=r"a.idx exists and would be replaced, and no card says who made it"):
        TokenFileWriter(tmp_path / "a", vocab_size=257, tokenizer=ByteTokenizer())
