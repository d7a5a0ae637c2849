"""A corpus of one's own gives the figures of the prepared one; what does not belong together is refused."""

import shutil

import pytest

from core.datasets import SourceFiles, TokenFileWriter, prepare_default_corpus, train_tokenizer
from core.parallel_state import ParallelState
from core.training import DataConfig
from core.training.data import open_corpus
from tests.states import state
from tests.training.tiny import S, data_config, prepared, training_config


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def single():
    return ParallelState.single("cpu")


def test_files_of_ones_own(made, single):
    corpus = open_corpus(data_config(made), single)
    assert (corpus.train.num_tokens, corpus.valid.num_tokens) == (made.train_tokens, made.valid_tokens)
    assert corpus.tokenizer.vocab_size == made.vocab_size
    assert (corpus.valid_bytes, corpus.unigram, corpus.gzip) == (
        made.valid_bytes,
        made.unigram_bits_per_byte,
        made.gzip_bits_per_byte,
    ), "the same text, whoever opens it: end-of-text tokens are no text"
    assert corpus.bytes_per_token == made.valid_bytes / made.valid_tokens


def test_batches_and_validation_come_from_their_own_files(made, single):
    data, training = data_config(made), training_config()
    corpus = open_corpus(data, single)
    batch = corpus.batches(data, training).batch(0)
    assert batch["tokens"].shape == batch["labels"].shape == (training.global_batch_size, S)
    rows = list(corpus.validation(data, training).sequential(training.global_batch_size))
    labels = [int(t) for row in rows for t in row["labels"].flatten() if t != -100]
    assert labels == corpus.valid.tokens(1, corpus.valid.num_tokens).tolist(), "all of it, once, in order"
    with pytest.raises(ValueError, match=rf"sequence_length={10**6} needs .* the file has {made.train_tokens}; use"):
        corpus.batches(data_config(made, sequence_length=10**6), training)


def test_a_tokenizer_that_did_not_make_the_files_is_refused(made, single, tmp_path):
    train_tokenizer(["abc"], 257).save(tmp_path / "other.json")
    config = data_config(made, tokenizer=str(tmp_path / "other.json"))
    with pytest.raises(ValueError, match=r"train\.bin holds token \d+, .*other\.json has 257 tokens; give"):
        open_corpus(config, single)
    with TokenFileWriter(tmp_path / "valid", vocab_size=60_000) as writer:
        writer.add_document([1, 59_999])
    with pytest.raises(ValueError, match=rf"valid\.bin holds token 59999, .* has {made.vocab_size} tokens"):
        open_corpus(data_config(made, valid=str(tmp_path / "valid")), single)


def test_damaged_files_are_named(made, single, tmp_path):
    for kind in ("bin", "idx"):
        shutil.copy(f"{made.train}.{kind}", tmp_path / f"train.{kind}")
    (tmp_path / "train.bin").write_bytes((tmp_path / "train.bin").read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"train\.bin has \d+ bytes, train\.idx says \d+"):
        open_corpus(data_config(made, train=str(tmp_path / "train")), single)
    (tmp_path / "t.json").write_text("no")
    with pytest.raises(ValueError, match=r"t\.json \(2 characters\) is no tokenizer"):
        open_corpus(data_config(made, tokenizer=str(tmp_path / "t.json")), single)


def default_corpus(directory, sources):
    """The default corpus over two ranks, of few sources instead of the whole standard library."""
    with pytest.MonkeyPatch.context() as patch:
        prepared_by = []

        def prepare(where, *, vocab_size):
            prepared_by.append((where / "corpus.json").exists())
            return prepare_default_corpus(where, vocab_size=vocab_size, valid_fraction=0.2, sources=sources)

        patch.setattr("core.training.data.prepare_default_corpus", prepare)
        corpus = open_corpus(DataConfig(directory=directory, vocab_size=280), state(tp=2))
        return prepared_by, corpus.train.num_tokens, corpus.valid_bytes, corpus.unigram, corpus.gzip


def test_the_default_corpus_is_written_once_while_the_others_wait(ranks, made, tmp_path):
    root = made.train.parent / "sources"
    sources = SourceFiles(root, tuple(sorted(p.name for p in root.iterdir())))
    first, second = ranks(default_corpus, tmp_path, sources)
    assert first[0] == [False, True] and second[0] == [True]
    assert first[1:] == second[1:]
    assert first[1:3] == (made.train_tokens, made.valid_bytes)
