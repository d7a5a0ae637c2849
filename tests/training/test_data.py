"""A corpus of one's own gives the figures of the prepared one; parts, blends, limits; misfits are refused."""

import shutil
import sys
import warnings
from dataclasses import replace
from itertools import islice

import pytest
import torch

from core.datasets import (
    BlendedBatches,
    SourceFiles,
    TokenFile,
    TokenFileWriter,
    prepare_default_corpus,
    train_tokenizer,
)
from core.datasets.shards import ShardManifest
from core.datasets.tokenizers.byte_tokenizer import ByteTokenizer
from core.parallel_state import ParallelState
from core.training import DataConfig
from core.training.run.data import open_corpus
from core.training.run.data.opening import _tell_of_bytes
from tests.states import state
from tests.training.tiny import VOCAB, S, data_config, prepared, training_config


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def single():
    return ParallelState.single("cpu")


def labels_of(rows):
    return [int(t) for row in rows for t in row["labels"].flatten() if t != -100]


def test_files_of_ones_own(made, single):
    corpus = open_corpus(data_config(made), training_config(), single)
    assert corpus.num_tokens == (made.train_tokens, made.valid_tokens)
    assert corpus.tokenizer.vocab_size == made.vocab_size
    told = {"unigram": made.unigram_bits_per_byte, "gzip -9": made.gzip_bits_per_byte}
    assert (len(corpus.valid_text), corpus.baselines) == (made.valid_bytes, told), "end-of-text tokens are no text"
    assert corpus.bytes_per_token == made.train_bytes / made.train_tokens


def test_batches_and_validation_come_from_their_own_files(made, single):
    training = training_config()
    corpus = open_corpus(data_config(made), training, single)
    batch = corpus.train.batch(0)
    assert batch["tokens"].shape == batch["labels"].shape == (training.global_batch_size, S)
    (_, valid), *_ = corpus.valid_parts
    assert labels_of(corpus.validation(0, 1)) == valid.tokens(1, valid.num_tokens).tolist(), "all, once, in order"
    long = open_corpus(data_config(made, sequence_length=10**6), training, single)
    with pytest.raises(ValueError, match=rf"sequence_length={10**6} needs .* the file has {made.train_tokens}; use"):
        _ = long.train
    assert long.valid is not None, "a short text can still be validated on"


def test_eval_batches_limit_text_and_batches_alike(made, single):
    training = training_config(eval_batches=2)
    corpus = open_corpus(data_config(made), training, single)
    rows = 2 * training.global_batch_size * S
    labels = labels_of(corpus.validation(0, 1))
    assert len(labels) == rows
    whole = open_corpus(data_config(made), training_config(), single).valid_text
    assert whole.startswith(corpus.valid_text) and 0 < len(corpus.valid_text) < len(whole)


def test_a_part_of_the_training_files_validates(made, single):
    """The tokenizer is the one that lies beside the file."""
    data = DataConfig(train=str(made.train), split="3,1,1", sequence_length=S)
    corpus = open_corpus(data, training_config(), single)
    train, valid = corpus.num_tokens
    assert train == pytest.approx(3 / 5 * made.train_tokens, rel=0.1)
    assert valid == pytest.approx(1 / 5 * made.train_tokens, rel=0.2)
    assert corpus.tokenizer.vocab_size == VOCAB and corpus.valid_text.decode().startswith("def f")
    none = open_corpus(DataConfig(train=str(made.train), split="1,0,0"), training_config(), single)
    assert none.valid is None and list(none.validation(0, 1)) == [] and none.baselines == {}
    assert none.prompt(4) == none.train_parts[0][1].tokens(0, 4).tolist()


def test_a_blend(made, single):
    blend = ("3", str(made.train), "1", str(made.valid))
    corpus = open_corpus(DataConfig(train=blend, sequence_length=S), training_config(eval_batches=1), single)
    assert isinstance(corpus.train, BlendedBatches)
    assert corpus.order["blend"] == [0.75, 0.25] and len(corpus.order["train_tokens"]) == 2
    again = open_corpus(DataConfig(train=blend, sequence_length=S), training_config(), single)
    ranks = [again.train.batch(7, rank, 2)["tokens"] for rank in range(2)]
    assert (corpus.train.batch(7)["tokens"] == ranks[0].new_tensor([*ranks[0].tolist(), *ranks[1].tolist()])).all()
    assert len(list(islice(again.validation(0, 1), 99))) >= 2, "one part after the other"


def test_validation_counts_every_label(made, single):
    """Else the bits of the labels left out would be missing, and their bytes not."""
    masked = open_corpus(data_config(made, eod_mask_loss=True), training_config(), single)
    whole = open_corpus(data_config(made), training_config(), single)
    assert labels_of(masked.validation(0, 1)) == labels_of(whole.validation(0, 1))
    assert masked.valid_text == whole.valid_text and masked.order != whole.order


def test_another_text_of_the_same_length_is_another_order(made, single, tmp_path):
    file, orders = open_corpus(data_config(made), training_config(), single).train_parts[0][1], []
    for name, shift in (("same", 0), ("other", 1)):
        with TokenFileWriter(tmp_path / name, vocab_size=VOCAB) as writer:
            writer.add_document([(int(t) + shift) % VOCAB for t in file.tokens(0, file.num_tokens)])
        data = data_config(made, train=str(tmp_path / name))
        orders.append(open_corpus(data, training_config(), single).order)
    assert orders[0]["train_tokens"] == orders[1]["train_tokens"] and orders[0] != orders[1]


def another_text_on_rank_1(directory, made):
    ps = state(tp=2)
    data = data_config(made, train=str(directory / f"rank{ps.rank}" / "text"))
    try:
        open_corpus(data, training_config(), ps)
    except ValueError as error:
        return str(error)


def test_all_ranks_read_the_same_text(ranks, made, tmp_path):
    """A stale copy on one machine: the name is the same there, here it is not."""
    for rank in range(2):
        (tmp_path / f"rank{rank}").mkdir()
        with TokenFileWriter(tmp_path / f"rank{rank}" / "text", vocab_size=VOCAB) as writer:
            writer.add_document([rank, 1, 2, 3] * 50)
    told = ranks(another_text_on_rank_1, world=2, directory=tmp_path, made=made)
    assert told[0] == told[1] and "rank 1 reads another text than rank 0: train_hash" in told[0]


def test_documents_end_alike_in_all_files(made, single, tmp_path):
    tokenizer = open_corpus(data_config(made), training_config(), single).tokenizer
    with TokenFileWriter(tmp_path / "open", vocab_size=VOCAB, tokenizer=tokenizer, end_of_text=None) as writer:
        writer.add_document([5] * 100)
    data = DataConfig(train=(str(made.train), str(tmp_path / "open")), valid=str(made.valid))
    with pytest.raises(ValueError, match=r"documents end with 2 different tokens: .*train with 0, .*open with none"):
        open_corpus(data, training_config(), single)


def test_documents_are_kept_apart_if_asked(made, single):
    asked = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
    corpus = open_corpus(data_config(made, **asked), training_config(), single)
    batch = corpus.train.batch(0)
    assert batch.keys() == {"tokens", "labels", "position_ids", "document_begin"}
    ends = batch["tokens"] == corpus.tokenizer.end_of_text
    assert ends.any() and (batch["labels"][ends] == -100).all()
    assert (batch["position_ids"][:, 1:][ends[:, :-1]] == 0).all()


def test_a_tokenizer_that_did_not_make_the_files_is_refused(made, single, tmp_path):
    train_tokenizer(["abc"], 257).save(tmp_path / "other.json")
    config = data_config(made, tokenizer=str(tmp_path / "other.json"))
    with pytest.raises(ValueError, match=rf"train\.bin was made by tokenizer \w+ of {VOCAB} .* \w+ of 257"):
        open_corpus(config, training_config(), single)
    with TokenFileWriter(tmp_path / "valid", vocab_size=60_000) as writer:
        writer.add_document([1, 59_999])
    with pytest.raises(ValueError, match=rf"valid\.bin holds token 59999, .* has {made.vocab_size} tokens"):
        open_corpus(data_config(made, valid=str(tmp_path / "valid")), training_config(), single)


def test_damaged_files_are_named(made, single, tmp_path):
    for kind in ("bin", "idx"):
        shutil.copy(f"{made.train}.{kind}", tmp_path / f"train.{kind}")
    (tmp_path / "train.bin").write_bytes((tmp_path / "train.bin").read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"train\.bin has \d+ bytes, train\.idx says \d+"):
        open_corpus(data_config(made, train=str(tmp_path / "train")), training_config(), single)
    (tmp_path / "t.json").write_text("no")
    with pytest.raises(ValueError, match=r"t\.json \(2 characters\) is no tokenizer"):
        open_corpus(data_config(made, tokenizer=str(tmp_path / "t.json")), training_config(), single)


def default_corpus(directory, sources):
    """The default corpus over two ranks, of few sources instead of the whole standard library."""
    with pytest.MonkeyPatch.context() as patch:
        prepared_by = []

        def prepare(where, *, vocab_size):
            prepared_by.append((where / "corpus.json").exists())
            return prepare_default_corpus(where, vocab_size=vocab_size, valid_fraction=0.2, sources=sources)

        patch.setattr("core.training.run.data.opening.prepare_default_corpus", prepare)
        corpus = open_corpus(DataConfig(directory=directory, vocab_size=280), training_config(), state(tp=2))
        return prepared_by, corpus.num_tokens, corpus.valid_text, corpus.baselines


def test_the_default_corpus_is_written_once_while_the_others_wait(ranks, made, tmp_path):
    root = made.train.parent / "sources"
    sources = SourceFiles(root, tuple(sorted(p.name for p in root.iterdir())))
    first, second = ranks(default_corpus, tmp_path, sources)
    assert first[0] == [False] and second[0] == [], "rank 0 alone"
    assert first[1:] == second[1:]
    assert first[1][0] == made.train_tokens and len(first[2]) == made.valid_bytes


def test_shards_are_a_text_of_which_a_few_lie_here(made, single, tmp_path):
    store, scratch = tmp_path / "store", tmp_path / "scratch"
    store.mkdir()
    names = []
    for name, prefix in (("a", made.train), ("b", made.valid)):
        for path in prefix.parent.glob(f"{prefix.name}.*"):
            shutil.copy(path, store / f"{name}{path.name.removeprefix(prefix.name)}")
        names.append(store / name)
    listed = str(tmp_path / "all.shards.json")
    ShardManifest.of(names).write(listed)
    copies = "[shutil.copy(f, sys.argv[3]) for f in pathlib.Path(sys.argv[1]).glob(sys.argv[2])]"
    fetch = f'{sys.executable} -c "import pathlib, shutil, sys; {copies}" {store} {{name}}.* {{directory}}'
    facts = {"train": listed, "sequence_length": S, "valid": str(made.valid)}
    data = DataConfig(**facts, fetch=fetch, shard_directory=str(scratch))
    corpus = open_corpus(data, training_config(), single)
    assert corpus.num_tokens == (made.train_tokens + made.valid_tokens, made.valid_tokens)
    assert corpus.tokenizer.vocab_size == VOCAB and corpus.baselines
    here = DataConfig(train=listed, sequence_length=S, shard_directory=str(store))
    local = open_corpus(here, training_config(), single)
    assert local.order == corpus.order and len(corpus.order["train_hash"]) == 2 and local.valid is None
    last = corpus.train.num_samples // training_config().global_batch_size
    for step in (0, last, last + 1):
        assert torch.equal(corpus.train.batch(step)["labels"], local.train.batch(step)["labels"])
    positions = replace(here, reset_position_ids=True)
    assert "position_ids" in open_corpus(positions, training_config(), single).train.batch(0)


def test_settings_of_shards_that_do_not_fit():
    with pytest.raises(ValueError, match=r"train has 2 names, and a\.shards\.json, a list of shards, is no part"):
        DataConfig(train=("a.shards.json", "b"))
    with pytest.raises(ValueError, match=r"fetch or shard_directory is given and train names 0 lists of shards"):
        DataConfig(train="a", fetch="cp {name} {directory}")
    with pytest.raises(ValueError, match=r"fetch='cp \{name\}' lacks \{directory\}, the shard and where it goes"):
        DataConfig(train="a.shards.json", fetch="cp {name}")


def test_ids_of_another_program_that_are_taken_for_bytes_are_told(tmp_path):
    with TokenFileWriter(tmp_path / "a", vocab_size=200) as writer:
        writer.add_document([1, 2, 3])
    with pytest.warns(UserWarning, match="has no card and no tokenizer beside it: its ids are taken for bytes"):
        _tell_of_bytes(TokenFile(tmp_path / "a"), ByteTokenizer())
    with TokenFileWriter(tmp_path / "b", vocab_size=257, tokenizer=ByteTokenizer()) as writer:
        writer.add_document([1, 2, 3])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _tell_of_bytes(TokenFile(tmp_path / "b"), ByteTokenizer())
