"""Shards in a fixed order: any step of any layout is found from one integer, with few shards at hand."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.datasets import TokenFile, TokenFileWriter
from core.datasets.card import sampled_hash
from core.datasets.packing import Packing
from core.datasets.shards import CommandFetch, LocalShards, ShardManifest, StreamedBatches, local
from core.datasets.shards.__main__ import main
from core.datasets.shards.manifest import CorpusShard

LENGTHS = (23, 7, 40, 2, 31)  # tokens of the shards
S, ROWS = 5, 4


@pytest.fixture
def store(tmp_path):
    """A folder with all shards, and their list."""
    folder, token = tmp_path / "store", 0
    folder.mkdir()
    for number, length in enumerate(LENGTHS):
        with TokenFileWriter(folder / f"part-{number}", vocab_size=500) as writer:
            writer.add_document(np.arange(token, token + length))
        token += length
    assert main([*(str(folder / f"part-{n}.idx") for n in range(5)), "--output", f"{folder}/all.shards.json"]) == 0
    return folder


def from_store(store, log=None):
    def fetch(name, directory):
        if log is not None:
            log.append(name)
        for path in store.glob(f"{name}.*"):
            shutil.copy(path, directory)

    return fetch


def streamed(store, directory=None, fetch=None, **more):
    shards = LocalShards(ShardManifest.read(store / "all.shards.json"), directory or store, fetch)
    return StreamedBatches(local=shards, sequence_length=S, global_batch_size=ROWS, seed=3, **more)


def test_every_token_is_a_label_once_per_epoch_and_shards_come_in_the_lists_order(store):
    batches = streamed(store)
    assert batches.num_samples == sum(-(-(length - 1) // S) for length in LENGTHS) == 22
    rows = batches.rows(0, 44)
    starts, token, orders = iter(range(44)), 0, []
    for epoch in range(2):
        token = 0
        for length in LENGTHS:
            numbers = [next(starts) for _ in range(-(-(length - 1) // S))]
            labels = rows["labels"][numbers]
            assert sorted(labels[labels >= 0].tolist()) == list(range(token + 1, token + length)), (epoch, length)
            orders.append(labels[:, 0].tolist())
            token += length
    assert orders[2] != sorted(orders[2]) and orders[2] != orders[7], "shuffled inside a shard, anew in each epoch"


@settings(max_examples=30, deadline=None)
@given(step=st.integers(0, 30), size=st.sampled_from([1, 2, 4]), ahead=st.integers(0, 3))
def test_a_step_is_the_same_for_who_begins_there_and_on_any_ranks(store_of_module, step, size, ahead):
    want = streamed(store_of_module).batch(step)
    uninterrupted = streamed(store_of_module)
    for earlier in range(max(0, step - ahead), step):
        uninterrupted.batch(earlier)
    for ranks_batches in (uninterrupted, streamed(store_of_module)):
        parts = [ranks_batches.batch(step, rank, size) for rank in range(size)]
        for name in ("tokens", "labels"):
            assert torch.equal(torch.cat([part[name] for part in parts]), want[name])


@pytest.fixture(scope="module")
def store_of_module(tmp_path_factory):
    return store.__wrapped__(tmp_path_factory.mktemp("shards"))


def here(directory):
    return {int(path.stem[-1]) for path in directory.glob("*.idx")}


def test_few_shards_are_at_hand_and_each_is_fetched_once_an_epoch(store, tmp_path):
    log, directory = [], tmp_path / "scratch"
    batches, whole = streamed(store, directory, from_store(store, log)), streamed(store)
    for step in range(5):  # nearly one epoch: 22 samples
        found, want = batches.batch(step), whole.batch(step)
        assert torch.equal(found["tokens"], want["tokens"]) and torch.equal(found["labels"], want["labels"])
        for thread in list(batches.local._ahead.values()):
            thread.join()
        assert len(here(directory)) <= 4
    assert log == [f"part-{n}" for n in (0, 1, 2, 3, 4, 0)], "in order, each ahead of its use"
    batches.batch(7)  # shards 1 and 2 of the next epoch
    for thread in list(batches.local._ahead.values()):
        thread.join()
    assert here(directory) == {0, 1, 2, 3}, "of this batch, of the one before, and the next"
    assert not [path for path in directory.iterdir() if "part-4" in path.name], "with all that came beside it"


def test_what_was_not_fetched_is_never_removed(store, tmp_path):
    directory = tmp_path / "mine"
    shutil.copytree(store, directory)
    batches = streamed(store, directory, from_store(store))
    for step in range(12):
        batches.batch(step)
    assert here(directory) == {0, 1, 2, 3, 4}


def test_positions_and_masks_are_those_of_packing(store):
    options = Packing(end_of_text=9, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)
    rows, plain = streamed(store, packing=options).batch(0), streamed(store).batch(0)
    want = options.batch(plain["tokens"], plain["labels"])
    assert rows.keys() == want.keys() and all(torch.equal(rows[name], want[name]) for name in want)


def fetched_by_rank(store, directory):
    batches = streamed(Path(store), Path(directory), from_store(Path(store)))
    return [batches.batch(step)["tokens"] for step in range(14)]


def test_processes_share_a_directory(ranks, store, tmp_path):
    whole = streamed(store)
    for tokens in ranks(fetched_by_rank, str(store), str(tmp_path / "scratch"), world=2):
        assert all(torch.equal(found, whole.batch(step)["tokens"]) for step, found in enumerate(tokens))


def test_a_shard_is_not_removed_while_another_opens_it(store, tmp_path, monkeypatch):
    """As two processes do, one a batch ahead: the test above meets it one time in hundreds."""
    manifest = ShardManifest.read(store / "all.shards.json")
    slow, fast = (LocalShards(manifest, tmp_path, from_store(store)) for _ in range(2))

    def hash_while_the_other_removes(path):
        fast.keep(())
        return sampled_hash(path)

    monkeypatch.setattr(local, "sampled_hash", hash_while_the_other_removes)
    opened = slow.open(0)
    assert here(tmp_path) == {0}
    fast.keep(())
    assert [*tmp_path.glob("part-*")] == [], "and then it goes, with its lock"
    assert opened.num_tokens == LENGTHS[0]


COPY = (
    "import pathlib, shutil, sys; [shutil.copy(p, sys.argv[3]) for p in pathlib.Path(sys.argv[1]).glob(sys.argv[2])]"
)


def test_a_command_fetches(store, tmp_path):
    command = f'{sys.executable} -c "{COPY}" {store} {{name}}.* {{directory}}'
    batches = streamed(store, tmp_path / "a b", CommandFetch(command))
    assert torch.equal(batches.batch(0)["tokens"], streamed(store).batch(0)["tokens"])
    failing = CommandFetch(f"{sys.executable} -c \"raise SystemExit('no {{name}} in {{directory}}')\"")
    with pytest.raises(ValueError, match=r"data\.fetch ended with 1 for shard part-0: no part-0 in .*/scratch"):
        streamed(store, tmp_path / "scratch", failing).batch(0)
    assert not list((tmp_path / "scratch").iterdir())


def test_a_shard_that_is_missing_or_another_is_told(store, tmp_path):
    with pytest.raises(ValueError, match=r"shard part-0 is not in .*empty; copy it there, or say how: data\.fetch"):
        streamed(store, tmp_path / "empty").batch(0)
    with TokenFileWriter(store / "part-1", vocab_size=500) as writer:
        writer.add_document(np.arange(7) + 1)
    with pytest.raises(
        ValueError, match=r"part-1 has 7 tokens \(hash \w{12}\), the list of shards says 7 \(\w{12}\)"
    ):
        streamed(store).rows(0, 8)


def test_a_list_that_is_none(tmp_path, capsys):
    path = tmp_path / "x.shards.json"
    for content in ("{", "{}", '{"format": "other", "shards": []}', '{"format": "paracore shards 1", "shards": []}'):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"x\.shards\.json is no list of shards .*core\.datasets\.shards"):
            ShardManifest.read(path)
    with pytest.raises(ValueError, match=r"'\.\./a' is no file name; b is there 2 times; b has 1 tokens, 2 or more"):
        ShardManifest((CorpusShard("../a", 5, ""), CorpusShard("b", 9, ""), CorpusShard("b", 1, "")))
    assert main([str(tmp_path / "nowhere"), "--output", str(path)]) == 1
    assert "does not exist" in capsys.readouterr().err


def test_prefixes_of_the_list_are_opened_as_they_are(store):
    manifest = ShardManifest.read(store / "all.shards.json")
    assert manifest == ShardManifest.of([store / shard.name for shard in manifest.shards])
    assert manifest.num_tokens == sum(TokenFile(store / f"part-{n}").num_tokens for n in range(5)) == sum(LENGTHS)
