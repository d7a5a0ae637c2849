"""The tokenizer: bytes come back exactly, whatever the text."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.datasets.tokenizers.trained import END_OF_TEXT, Tokenizer, train_tokenizer

TEXTS = [
    "def f(x):\n    return x + 1\n",
    "class A:\n    pass\n" * 3,
    "naïve café, 東京",
    "twenty more words for merges",
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 300)


WEIRD = [
    "",
    " ",
    "  leading and trailing  ",
    "tabs\tand\r\nreturns\r",
    "\x00\x01\x7f\x80\xa0",
    "e\u0301 is not é",
    "👩‍👩‍👧‍👦🏳️‍🌈",
    "\ufeffBOM, \ufffd, \u202egnp",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U0010ffff",
    f"a{END_OF_TEXT}b",
]


@pytest.mark.parametrize("text", WEIRD)
def test_round_trip_of_weird_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=60, deadline=None)
@given(st.text())
def test_round_trip_of_any_text(text):
    tokenizer = train_tokenizer([], 257)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text.encode())


def test_end_of_text_is_zero_and_no_text_becomes_it(tokenizer):
    assert tokenizer.end_of_text == 0
    assert 0 not in tokenizer.encode(f"a{END_OF_TEXT}b")
    assert tokenizer.decode([0]) == END_OF_TEXT


def test_vocabulary_sizes(tokenizer):
    assert tokenizer.vocab_size == 300
    assert train_tokenizer(["ab"], 4096).vocab_size < 300  # too little text to learn more
    assert len(tokenizer.encode("return")) < 6
    with pytest.raises(ValueError, match="vocab_size=256 cannot hold every byte; use 257"):
        train_tokenizer(TEXTS, 256)


def test_batch_equals_one_by_one(tokenizer):
    assert tokenizer.encode_batch(WEIRD) == [tokenizer.encode(text) for text in WEIRD]


def test_save_and_load(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.encode_batch(WEIRD) == tokenizer.encode_batch(WEIRD)
    assert (loaded.vocab_size, loaded.end_of_text) == (300, 0)


def test_training_twice_gives_the_same_file(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "one.json")
    train_tokenizer(iter(TEXTS), 300).save(tmp_path / "two.json")
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()


def test_a_foreign_file_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json \(2 characters\) is no tokenizer"):
        Tokenizer.load(tmp_path / "tokenizer.json")


def test_a_tokenizer_without_end_of_text_is_refused(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    text = (tmp_path / "tokenizer.json").read_text().replace(END_OF_TEXT, "<s>")
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match="among the tokenizer's 300 tokens"):
        Tokenizer.load(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("eos", ["<s>", {"content": "<s>", "special": True}])
def test_an_end_of_text_of_no_known_name_is_what_the_folder_says(tokenizer, tmp_path, eos):
    tokenizer.save(tmp_path / "tokenizer.json")
    text = (tmp_path / "tokenizer.json").read_text().replace(END_OF_TEXT, "<s>")
    (tmp_path / "tokenizer.json").write_text(text)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    assert Tokenizer.load(tmp_path / "tokenizer.json").end_of_text == tokenizer.end_of_text
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "not there"}))
    with pytest.raises(ValueError, match="say which token ends a document"):
        Tokenizer.load(tmp_path / "tokenizer.json")


def test_lone_surrogates_are_refused_by_place(tokenizer):
    with pytest.raises(ValueError, match="text 1 of length 3 holds a lone surrogate at 2"):
        tokenizer.encode_batch(["fine", "ab\ud800"])


def test_no_text_is_a_type_error(tokenizer):
    with pytest.raises(TypeError):
        tokenizer.encode_batch([b"bytes"])
