"""Bytes without a library, any tokenizer.json, and whose tokens a file holds."""

import json
import pickle

import numpy as np
import pytest
import tokenizers as hf
from hypothesis import given, settings
from hypothesis import strategies as st

from core.datasets.token_file import TokenFile
from core.datasets.token_file_writer import TokenFileWriter
from core.datasets.tokenizers import any_tokenizer
from core.datasets.tokenizers.any_tokenizer import check_tokenizer, load_tokenizer, tokenizer_of
from core.datasets.tokenizers.byte_tokenizer import ByteTokenizer
from core.datasets.tokenizers.trained import Tokenizer, train_tokenizer


def words(special, vocabulary=("a", "b", "<unk>")):
    """A foreign tokenizer: whole words, with these special tokens."""
    ids = {word: i for i, word in enumerate((*vocabulary, *special))}
    inner = hf.Tokenizer(hf.models.WordLevel(ids, unk_token="<unk>"))
    inner.pre_tokenizer = hf.pre_tokenizers.Whitespace()
    inner.add_special_tokens(list(special))
    return inner


@settings(max_examples=60, deadline=None)
@given(st.text())
def test_bytes_come_back(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode([*ids, tokenizer.end_of_text]) == text


def test_bytes_that_are_no_text():
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.end_of_text, tokenizer.identity) == (257, 256, "bytes")
    assert tokenizer.decode([0xC3]) == "\ufffd"
    assert tokenizer.encode_batch(["a", "é"]) == [[97], [0xC3, 0xA9]]
    with pytest.raises(ValueError, match="ids 1 to 257, bytes and the end of text are 0 to 256"):
        tokenizer.decode([257, 1])
    with pytest.raises(ValueError, match="text 1 of length 1 holds a lone surrogate at 0"):
        tokenizer.encode_batch(["a", "\ud800"])


def test_what_is_saved_is_loaded(tmp_path):
    assert isinstance(load_tokenizer(None), ByteTokenizer)
    ByteTokenizer().save(tmp_path / "bytes.json")
    assert isinstance(load_tokenizer(tmp_path / "bytes.json"), ByteTokenizer)
    trained = train_tokenizer(["some text"], 270)
    trained.save(tmp_path / "trained.json")
    assert load_tokenizer(tmp_path / "trained.json").identity == trained.identity
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match=r"other\.json \(2 characters\) is no tokenizer\.json"):
        load_tokenizer(tmp_path / "other.json")


@pytest.mark.parametrize("name", ["<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[SEP]"])
def test_the_end_of_text_is_found(name):
    assert Tokenizer(words(["<pad>", name])).end_of_text == 4


def test_the_end_of_text_may_be_named_and_must_exist(tmp_path):
    inner = words(["<stop>"])
    with pytest.raises(
        ValueError, match=r"among the tokenizer's 4 tokens, special are <stop>; say which .*--end-of-text"
    ):
        Tokenizer(inner)
    assert Tokenizer(inner, "<stop>").end_of_text == Tokenizer(inner, 3).end_of_text == 3
    assert Tokenizer(inner, "b").end_of_text == 1
    with pytest.raises(ValueError, match="end_of_text='<no>' is not among the tokenizer's 4 tokens"):
        Tokenizer(inner, "<no>")
    with pytest.raises(ValueError, match="end_of_text=9 is no id"):
        Tokenizer(inner, 9)
    inner.save(str(tmp_path / "words.json"))
    with pytest.raises(ValueError, match=r"words\.json: no <\|endoftext\|>"):
        load_tokenizer(tmp_path / "words.json")
    assert load_tokenizer(tmp_path / "words.json", "<stop>").end_of_text == 3


def test_a_file_that_truncates_or_pads_does_not():
    inner = words(["</s>"])
    inner.enable_truncation(2)
    inner.enable_padding(length=5)
    assert Tokenizer(inner).encode("a b a b") == [0, 1, 0, 1]


def test_text_never_becomes_a_special_token():
    assert 3 not in Tokenizer(words(["</s>"])).encode("a </s> b")


def test_a_vocabulary_with_holes_is_as_large_as_its_last_id():
    inner = hf.Tokenizer(hf.models.WordLevel({"a": 0, "<unk>": 9}, unk_token="<unk>"))
    inner.add_special_tokens(["<eos>"])
    tokenizer = Tokenizer(inner)
    assert tokenizer.vocab_size == max(tokenizer.end_of_text, 9) + 1


def test_identity_is_of_what_decides_ids():
    def identity(change=lambda content: None):
        content = json.loads(words(["</s>"]).to_str())
        change(content)
        return Tokenizer.from_text(json.dumps(content)).identity

    same = identity()
    assert len(same) == 64
    assert identity(lambda c: c.update(truncation=None, padding=None, decoder=None)) == same
    assert identity(lambda c: c.pop("normalizer")) == same, "an older file has fewer keys"
    assert identity(lambda c: c["model"]["vocab"].update(c=7)) != same
    assert identity(lambda c: c.update(normalizer={"type": "Lowercase"})) != same


def test_a_tokenizer_travels_to_another_process():
    tokenizer = Tokenizer(words(["<stop>"]), "<stop>")
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert (copy.end_of_text, copy.identity, copy.encode("a <stop>")) == (3, tokenizer.identity, [0, 2, 2, 2])


def write(prefix, tokenizer, end_of_text=None, **kwargs):
    with TokenFileWriter(
        prefix, vocab_size=tokenizer.vocab_size, tokenizer=tokenizer, end_of_text=end_of_text, **kwargs
    ) as writer:
        writer.add_document([*tokenizer.encode("a b"), tokenizer.end_of_text])
    return TokenFile(prefix)


def test_the_tokenizer_of_a_file_lies_beside_it(tmp_path):
    assert isinstance(tokenizer_of(write(tmp_path / "bytes", ByteTokenizer())), ByteTokenizer)
    tokenizer = Tokenizer(words(["<stop>"]), "<stop>")
    found = tokenizer_of(write(tmp_path / "words", tokenizer, 3))
    assert (found.identity, found.end_of_text) == (tokenizer.identity, 3)


def test_another_tokenizer_than_the_files_is_refused(tmp_path):
    file = write(tmp_path / "a", Tokenizer(words(["</s>"])), 3)
    check_tokenizer(file, Tokenizer(words(["</s>"])))
    with pytest.raises(ValueError, match=r"a\.bin was made by tokenizer .* of 4 tokens, this is bytes of 257; give"):
        check_tokenizer(file, ByteTokenizer())
    with pytest.raises(ValueError, match=r"end with token 3, the tokenizer's end of text is 1; load it with"):
        check_tokenizer(file, Tokenizer(words(["</s>"]), "b"))
    Tokenizer(words(["</s>", "<x>"])).save(tmp_path / "a.tokenizer.json")
    with pytest.raises(ValueError, match="was made by tokenizer"):
        tokenizer_of(file)


def test_a_file_without_a_card_is_held_against_the_size(tmp_path):
    with TokenFileWriter(tmp_path / "a", vocab_size=500) as writer:
        writer.add_document([1, 300])
    message = (
        rf"a\.bin holds token 300, the tokenizer has 257 tokens, and no a\.json beside it says which one made the "
        rf"file; give that one's tokenizer\.json: --data\.tokenizer, or as {tmp_path}/a\.tokenizer\.json; "
        "where there is none.*one of numbers$"
    )
    with pytest.raises(ValueError, match=message):
        check_tokenizer(TokenFile(tmp_path / "a"), ByteTokenizer())


@pytest.mark.parametrize(("place", "token"), [(0, -1), (60_000, 300), (60_000, -7), (99_999, 257)])
def test_tokens_behind_the_beginning_are_sampled_and_none_is_negative(tmp_path, monkeypatch, place, token):
    monkeypatch.setattr(any_tokenizer, "_CHECKED_TOKENS", 10)
    tokens = np.zeros(100_000, "<i4")
    with TokenFileWriter(tmp_path / "a", vocab_size=500, dtype="int32") as writer:
        writer.add_document(tokens)
    check_tokenizer(TokenFile(tmp_path / "a"), ByteTokenizer())
    tokens[place] = token
    (tmp_path / "a.bin").write_bytes(tokens.tobytes())
    with pytest.raises(ValueError, match=rf"a\.bin holds token {token}, the tokenizer has 257"):
        check_tokenizer(TokenFile(tmp_path / "a"), ByteTokenizer())
