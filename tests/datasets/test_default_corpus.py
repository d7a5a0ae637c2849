"""Preparing a corpus: what is written, when it is reused, and what never is."""

import dataclasses
import json
import shutil

import pytest

from core.datasets.baselines import gzip_bits_per_byte, unigram_bits_per_byte
from core.datasets.corpus import default as module
from core.datasets.corpus.default import prepare_default_corpus
from core.datasets.corpus.standard_library import SourceFiles, split_by_hash
from core.datasets.token_file import TokenFile
from core.datasets.tokenizers.trained import Tokenizer

NAMES = tuple(f"m{i}.py" for i in range(12))
FRACTION = 0.3
WORDS = "forty or more merges need some different words to be made from"


@pytest.fixture
def sources(tmp_path):
    root = tmp_path / "sources"
    root.mkdir()
    for i, name in enumerate(NAMES):
        (root / name).write_text(
            f"def function_{i}(x):\n    return x * {i}  # é, {WORDS}\n" * (i + 1), encoding="utf-8"
        )
    return SourceFiles(root, NAMES)


def prepare(tmp_path, sources, vocab_size=300, name="out"):
    return prepare_default_corpus(tmp_path / name, vocab_size=vocab_size, valid_fraction=FRACTION, sources=sources)


@pytest.fixture
def no_building(monkeypatch):
    def refuse(*args):
        raise AssertionError("built again")

    return lambda: monkeypatch.setattr(module, "_build", refuse)


def test_token_files_hold_the_texts_and_the_split(tmp_path, sources):
    corpus = prepare(tmp_path, sources)
    tokenizer = Tokenizer.load(corpus.tokenizer)
    for prefix, names, num_bytes in zip(
        (corpus.train, corpus.valid),
        split_by_hash(NAMES, FRACTION),
        (corpus.train_bytes, corpus.valid_bytes),
        strict=True,
    ):
        file = TokenFile(prefix)
        texts = [(sources.root / name).read_text(encoding="utf-8") for name in names]
        documents = [file.document(i).tolist() for i in range(file.num_documents)]
        assert [tokenizer.decode(document[:-1]) for document in documents] == texts
        assert {document[-1] for document in documents} == {tokenizer.end_of_text}
        assert num_bytes == sum(len(text.encode()) for text in texts)


def test_figures_agree_with_the_files(tmp_path, sources):
    corpus = prepare(tmp_path, sources)
    train, valid = TokenFile(corpus.train), TokenFile(corpus.valid)
    assert (corpus.train_tokens, corpus.valid_tokens) == (train.num_tokens, valid.num_tokens)
    assert (corpus.train_documents, corpus.valid_documents) == (train.num_documents, valid.num_documents)
    assert corpus.vocab_size == Tokenizer.load(corpus.tokenizer).vocab_size
    text = "".join((sources.root / n).read_text(encoding="utf-8") for n in split_by_hash(NAMES, FRACTION)[1])
    assert corpus.gzip_bits_per_byte == gzip_bits_per_byte(text.encode())
    assert corpus.unigram_bits_per_byte == unigram_bits_per_byte(text.encode())


def test_the_tokenizer_learns_from_training_files_only(tmp_path, sources):
    first = prepare(tmp_path, sources).tokenizer.read_bytes()
    for name in split_by_hash(NAMES, FRACTION)[1]:
        (sources.root / name).write_text("zyzzyva qwerty " * 100)
    second = prepare(tmp_path, sources, name="other")
    assert second.tokenizer.read_bytes() == first
    (sources.root / split_by_hash(NAMES, FRACTION)[0][0]).write_text("zyzzyva qwerty " * 100)
    assert prepare(tmp_path, sources, name="third").tokenizer.read_bytes() != first


def test_a_second_call_reuses_the_first_even_moved(tmp_path, sources, no_building):
    first = prepare(tmp_path, sources)
    no_building()
    assert prepare(tmp_path, sources) == first
    shutil.move(tmp_path / "out", tmp_path / "moved")
    moved = prepare(tmp_path, sources, name="moved")
    assert moved.train == tmp_path / "moved" / "train"
    assert moved.valid_tokens == first.valid_tokens


@pytest.mark.filterwarnings("ignore:.*held a corpus of other inputs")
def test_other_inputs_are_built_anew(tmp_path, sources):
    first = prepare(tmp_path, sources)
    before = (tmp_path / "out" / "tokenizer.json").read_bytes()
    with pytest.warns(UserWarning, match=r"another tokenizer, which is kept as .*tokenizer\.[0-9a-f]{12}\.json"):
        second = prepare(tmp_path, sources, vocab_size=290)
    (kept,) = (tmp_path / "out").glob("tokenizer.*.json")
    assert kept.read_bytes() == before
    assert (first.vocab_size, second.vocab_size) == (300, 290)
    assert Tokenizer.load(second.tokenizer).vocab_size == 290
    changed = sources.root / split_by_hash(NAMES, FRACTION)[0][0]
    changed.write_text(changed.read_text() + "more = 1\n")
    assert prepare(tmp_path, sources, vocab_size=290).train_bytes == second.train_bytes + 9


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "train.bin", "train.idx", "valid.bin", "valid.idx", "corpus.json"]
)
@pytest.mark.parametrize("damage", ["removed", "cut", "longer"])
def test_damage_is_repaired(tmp_path, sources, name, damage):
    first = prepare(tmp_path, sources)
    path = tmp_path / "out" / name
    whole = path.read_bytes()
    if damage == "removed":
        path.unlink()
    else:
        path.write_bytes(whole[:-3] if damage == "cut" else whole + b"???")
    assert prepare(tmp_path, sources) == first
    assert path.read_bytes() == whole


@pytest.mark.parametrize("content", ["[]", "null", '{"key": "x", "figures": {}}'])
def test_a_foreign_corpus_json_is_replaced(tmp_path, sources, content):
    first = prepare(tmp_path, sources)
    (tmp_path / "out" / "corpus.json").write_text(content)
    assert prepare(tmp_path, sources) == first
    assert json.loads((tmp_path / "out" / "corpus.json").read_text())["figures"]["vocab_size"] == 300


@pytest.mark.filterwarnings("ignore:.*held a corpus of other inputs")
def test_an_interrupted_build_is_not_reused(tmp_path, sources, monkeypatch):
    prepare(tmp_path, sources)
    with monkeypatch.context() as patch:
        patch.setattr(module, "unigram_bits_per_byte", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(tmp_path, sources, vocab_size=290)
    assert not (tmp_path / "out" / "corpus.json").exists()
    assert prepare(tmp_path, sources).vocab_size == 300
    assert Tokenizer.load(tmp_path / "out" / "tokenizer.json").vocab_size == 300


def test_an_empty_side_is_refused(tmp_path, sources):
    with pytest.raises(ValueError, match="leaves 1 training and 0 validation files; give more files"):
        prepare_default_corpus(tmp_path / "out", sources=dataclasses.replace(sources, names=("os.py",)))
    assert not (tmp_path / "out").exists()
