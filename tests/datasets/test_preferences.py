"""Preference files in the forms of TRL's, as pairs of documents, and as pairs of rows; bad rows word by word."""

import re

import pytest
import torch

from core.datasets import ByteTokenizer, PreferenceBatches, TextFiles, TokenFile, first_documents, split_documents
from core.datasets.corpus.preferences import prepare_preferences
from core.datasets.prepare import main as prepare
from tests.datasets.chats import TALK, lines

ROW = {"prompt": "1 + 1 =", "chosen": " 2", "rejected": " three"}


def prepared(tmp_path, rows, *options):
    output = str(tmp_path / "pairs")
    assert prepare(["--input", lines(tmp_path / "rows.jsonl", rows), "--output", output, *options]) == 0
    return TokenFile(output)


def texts(file, tokenizer=None):
    """(text, learned part) of each document."""
    tokenizer = tokenizer or ByteTokenizer()
    found = []
    for i in range(file.num_documents):
        learned = file.answers(file.document_start(i), file.document_start(i + 1))
        tokens = file.document(i)
        found.append((tokenizer.decode(tokens.tolist()), tokenizer.decode(tokens[learned].tolist())))
    return found


def test_a_pair_of_texts_is_two_documents_and_a_common_beginning_is_the_prompt(tmp_path):
    whole = {"chosen": "Q: 1? A: one", "rejected": "Q: 1? A: two"}
    file = prepared(tmp_path, [ROW, whole, ROW | {"rejected": " 2"}])
    assert file.holds_preferences and file.marks_answers and file.num_documents == 4
    assert texts(file)[:2] == [("1 + 1 = 2", " 2"), ("1 + 1 = three", " three")]
    assert texts(file)[2:] == [("Q: 1? A: one", " one"), ("Q: 1? A: two", " two")], "as TRL: a word keeps its space"
    assert file.document(0)[-1] == 256 and file.answers(0, 10).tolist() == [False] * 7 + [True] * 3
    assert file.card.skipped == {"pairs whose chosen and rejected response are the same": 1}


def test_messages_are_rendered_by_the_template_and_only_the_response_is_learned(tmp_path, chat_folder):
    from core.datasets import load_tokenizer

    other = [{"role": "assistant", "content": "A dog."}]
    explicit = {"prompt": TALK[:4], "chosen": TALK[4:], "rejected": other}
    implicit = {"chosen": TALK, "rejected": [*TALK[:4], *other]}
    # UltraFeedback's rows; TRL takes the conversations alone
    as_text = implicit | {"prompt": "Two and two?"}
    file = prepared(tmp_path, [explicit, implicit, as_text], "--tokenizer", str(chat_folder / "tokenizer.json"))
    found = texts(file, load_tokenizer(chat_folder / "tokenizer.json"))
    assert found[:2] == found[2:4] == found[4:]
    # the assistant's turn in the prompt is context
    assert [learned for _, learned in found[:2]] == ["A cat — é.<|im_end|>", "A dog.<|im_end|>"]


def test_pairs_of_a_table_are_those_of_lines(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    expected = texts(prepared(tmp_path, [ROW]))
    parquet.write_table(pyarrow.Table.from_pylist([ROW]), tmp_path / "a.parquet")
    assert prepare(["--input", str(tmp_path / "a.parquet"), "--output", str(tmp_path / "a")]) == 0
    assert TokenFile(tmp_path / "a").holds_preferences and texts(TokenFile(tmp_path / "a")) == expected


BAD = {
    "rejected": ({"prompt": "a", "chosen": "b"}, 'rows.jsonl:2: lacks "rejected"'),
    "both": ({"prompt": "a", "chosen": None}, 'rows.jsonl:2: lacks "chosen" and "rejected"'),
    "mixed": (
        {"prompt": "a", "chosen": [TALK[2]], "rejected": [TALK[4]]},
        'rows.jsonl:2: mixes text and messages: "prompt" is a str, "chosen" is a list, "rejected" is a list',
    ),
    "nothing common": (
        {"chosen": "b", "rejected": "c"},
        'rows.jsonl:2: lacks "prompt", and "chosen" and "rejected" have 0 in common at their beginning',
    ),
    "no answer": (
        {"prompt": TALK[:1], "chosen": TALK[1:2], "rejected": TALK[2:3]},
        "rows.jsonl:2: chats without an answer of the assistant, whose roles are user",
    ),
    "empty": (
        ROW | {"prompt": ""},
        "rows.jsonl:2: has an empty \"prompt\", or one that is no text and no messages ('')",
    ),
    "list": ([1], "rows.jsonl:2: is a list, no object"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_row_is_refused_by_file_and_line(tmp_path, capsys, case):
    row, message = BAD[case]
    path = lines(tmp_path / "rows.jsonl", [ROW, row])
    assert prepare(["--input", path, "--output", str(tmp_path / "pairs")]) == 1
    told = capsys.readouterr().err
    assert f"1 rows are no preferences: {tmp_path}/{message}. A row is " in told
    assert not list(tmp_path.glob("pairs*"))


def test_many_bad_rows_are_counted(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join("nothing\n" for _ in range(7)))
    told = f"7 rows are no preferences: {path}:1: is no JSON; {path}:2: is no JSON"
    with pytest.raises(ValueError, match=re.escape(told)) as error:
        prepare_preferences(TextFiles(inputs=(str(path),)), tmp_path / "pairs", ByteTokenizer())
    assert "; and 2 more. A row is" in str(error.value)


def test_pairs_are_rows_side_by_side_and_lose_ends_that_do_not_fit(tmp_path):
    rows = [{"prompt": "ab", "chosen": "c" * i, "rejected": "d"} for i in range(1, 6)]
    file = prepared(tmp_path, rows)
    batches = PreferenceBatches(token_file=file, sequence_length=5, global_batch_size=4, seed=1)
    assert batches.num_samples == 5 and batches.truncated == 2
    batch = batches.batch(0)
    assert batch["pair"].tolist() == [n for n in batch["pair"][::2].tolist() for _ in range(2)]
    parts = [batches.batch(0, rank, 2) for rank in (0, 1)]
    assert all(torch.equal(torch.cat([part[name] for part in parts]), batch[name]) for name in batch)
    # in order, once; what is filled up counts for nothing
    first, last = batches.sequential(4)
    assert first["pair"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3] and last["pair"].tolist() == [4, 4] + [-1] * 6
    a, b, c, d, end, no = *b"abcd", 256, -100
    assert first["tokens"][0].tolist() == [a, b, c, end, 0] and first["labels"][0].tolist() == [no, c, end, no, no]
    assert last["tokens"][0].tolist() == [a, b, c, c, c] and last["labels"][0].tolist() == [no, c, c, c, c]
    assert last["labels"][1].tolist() == [no, d, end, no, no] and (last["labels"][2:] == no).all()
    with pytest.raises(
        ValueError, match="sequence_length=1 leaves nothing of 10 responses of 10, the first in pair 0"
    ):
        PreferenceBatches(token_file=file, sequence_length=1, global_batch_size=4, seed=1)


def test_no_cut_parts_a_pair(tmp_path):
    file = prepared(tmp_path, [{"prompt": "a", "chosen": "b" * (i % 7), "rejected": "c"} for i in range(30)])
    for split in ("969,30,1", "1,1,1", "98,1,1", "5,0,1"):
        parts = [part for part in split_documents(file, split) if part is not None]
        assert all(part.num_documents % 2 == part.first_document % 2 == 0 < part.num_documents for part in parts)
        assert sum(part.num_documents for part in parts) == 60
    for tokens in (1, 9, 10, 11, 50):
        assert first_documents(file, tokens).num_documents % 2 == 0
