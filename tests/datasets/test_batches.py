"""Batches: next-token labels, the same rows for every number of ranks, validation in order once."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.datasets.batches import IGNORED_LABEL, GPTBatches
from core.datasets.token_file import TokenFile
from core.datasets.token_file_writer import TokenFileWriter

KEYS = ("sequence_length", "global_batch_size", "seed")


def numbered(directory, count):
    """A file whose token at position p is p, in documents of 7."""
    with TokenFileWriter(directory / "a", vocab_size=max(1, count)) as writer:
        for start in range(0, count, 7):
            writer.add_document(range(start, min(count, start + 7)))
    return TokenFile(directory / "a")


def batches(directory, count=101, sequence_length=5, global_batch_size=8, seed=11):
    return GPTBatches(
        token_file=numbered(directory, count),
        sequence_length=sequence_length,
        global_batch_size=global_batch_size,
        seed=seed,
    )


def test_labels_are_the_next_tokens(tmp_path):
    batch = batches(tmp_path).batch(0)
    for name in ("tokens", "labels"):
        assert batch[name].dtype == torch.int64
        assert batch[name].shape == (8, 5)
        assert batch[name].is_contiguous()
    assert torch.equal(batch["labels"], batch["tokens"] + 1)
    assert (batch["tokens"][:, 0] % 5 == 0).all()


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_global_batch_is_the_same_for_every_layout(tmp_path, size):
    data = batches(tmp_path)
    for step in (0, 1, 77):
        parts = [data.batch(step, rank, size) for rank in range(size)]
        for name, whole in data.batch(step).items():
            assert torch.equal(torch.cat([part[name] for part in parts]), whole)


def test_resuming_at_a_step_equals_running_through(tmp_path):
    first = batches(tmp_path)
    through = [first.batch(step)["tokens"] for step in range(9)]
    second = GPTBatches(token_file=TokenFile(tmp_path / "a"), sequence_length=5, global_batch_size=8, seed=11)
    for step in range(4, 9):
        assert torch.equal(second.batch(step)["tokens"], through[step])


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    count=st.integers(7, 60),
    sequence_length=st.integers(1, 6),
    rows=st.integers(1, 4),
    size=st.sampled_from([1, 2, 3]),
    resumed=st.integers(0, 9),
)
def test_every_epoch_predicts_every_token_once(tmp_path, count, sequence_length, rows, size, resumed):
    """For any size, layout and point of resumption; the last window is filled up."""
    data = batches(tmp_path, count, sequence_length, rows * size)
    n = data.num_samples
    assert n == -(-(count - 1) // sequence_length)
    steps = range(3 * n // (rows * size) + 1)
    again = GPTBatches(token_file=data.token_file, **{k: getattr(data, k) for k in KEYS})
    labels = torch.cat(
        [
            (data if step < resumed else again).batch(step, rank, size)["labels"]
            for step in steps
            for rank in range(size)
        ]
    )
    for epoch in range(3):
        seen = labels[epoch * n : (epoch + 1) * n].flatten()
        assert sorted(seen[seen != IGNORED_LABEL].tolist()) == list(range(1, count))


def test_the_last_window_is_filled_up(tmp_path):
    data = batches(tmp_path, count=12, sequence_length=5, global_batch_size=3)
    rows = data.batch(0)
    row = rows["tokens"][:, 0].tolist().index(10)
    assert rows["tokens"][row].tolist() == [10, 0, 0, 0, 0]
    assert rows["labels"][row].tolist() == [11, -100, -100, -100, -100]


def test_a_short_text_is_taken_where_it_is_allowed(tmp_path):
    data = GPTBatches(
        token_file=numbered(tmp_path, 3), sequence_length=5, global_batch_size=1, seed=0, allow_short=True
    )
    assert data.batch(0)["labels"].tolist() == [[1, 2, -100, -100, -100]]
    with pytest.raises(ValueError, match=r"sequence_length=5 needs 6 tokens .*the file has 1"):
        GPTBatches(token_file=numbered(tmp_path, 1), sequence_length=5, global_batch_size=1, seed=0, allow_short=True)


def test_documents_are_told_in_training_and_in_validation(tmp_path):
    with TokenFileWriter(tmp_path / "a", vocab_size=9) as writer:
        writer.add_document([1, 2, 8])
        writer.add_document([3, 8])
    data = GPTBatches(
        token_file=TokenFile(tmp_path / "a"),
        sequence_length=4,
        global_batch_size=1,
        seed=0,
        end_of_text=8,
        reset_position_ids=True,
        reset_attention_mask=True,
        eod_mask_loss=True,
    )
    for batch in (data.batch(0), next(data.sequential(1))):
        assert batch["tokens"].tolist() == [[1, 2, 8, 3]]
        assert batch["labels"].tolist() == [[2, 8, -100, 8]]
        assert batch["position_ids"].tolist() == [[0, 1, 2, 0]]
        assert batch["document_begin"].tolist() == [[0, 0, 0, 3]]


def test_another_seed_is_another_order(tmp_path):
    one, two = batches(tmp_path, seed=1).batch(0), batches(tmp_path, seed=2).batch(0)
    assert not torch.equal(one["tokens"], two["tokens"])


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    count=st.integers(7, 60),
    sequence_length=st.integers(1, 6),
    rows=st.integers(1, 4),
    size=st.sampled_from([1, 2, 3]),
)
def test_validation_predicts_every_token_once(tmp_path, count, sequence_length, rows, size):
    data = batches(tmp_path, count=count, sequence_length=sequence_length)
    parts = [list(data.sequential(rows * size, rank, size)) for rank in range(size)]
    assert len({len(part) for part in parts}) == 1
    seen = []
    for part in parts:
        for batch in part:
            assert batch["tokens"].shape == batch["labels"].shape == (rows, sequence_length)
            kept = batch["labels"] != IGNORED_LABEL
            assert torch.equal(batch["tokens"][kept] + 1, batch["labels"][kept])
            seen += batch["labels"][kept].tolist()
    assert sorted(seen) == list(range(1, count))


def test_validation_goes_in_order_and_fills_the_tail(tmp_path):
    *_, last = batches(tmp_path, count=13, sequence_length=4).sequential(2)
    assert last["tokens"].tolist() == [[8, 9, 10, 11], [0, 0, 0, 0]]
    assert last["labels"].tolist() == [[9, 10, 11, 12], [-100] * 4]
    *_, last = batches(tmp_path, count=12, sequence_length=4).sequential(1)
    assert last["labels"].tolist() == [[9, 10, 11, -100]]


def test_sequence_longer_than_the_data_is_refused(tmp_path):
    assert batches(tmp_path, count=9, sequence_length=8).num_samples == 1
    with pytest.raises(ValueError, match=r"sequence_length=9 needs 10 tokens .*the file has 9; use at most 8"):
        batches(tmp_path, count=9, sequence_length=9)


def test_an_option_that_needs_the_end_of_text_is_told_too(tmp_path):
    with pytest.raises(ValueError, match=r"global_batch_size=0 must be positive; eod_mask_loss need end_of_text"):
        GPTBatches(
            token_file=numbered(tmp_path, 9), sequence_length=2, global_batch_size=0, seed=0, eod_mask_loss=True
        )


def test_all_mistakes_are_told_at_once(tmp_path):
    with pytest.raises(ValueError, match=r"sequence_length=0 must.*global_batch_size=-2 must"):
        batches(tmp_path, sequence_length=0, global_batch_size=-2)


def test_indivisible_batch_names_the_valid_sizes(tmp_path):
    data = batches(tmp_path, global_batch_size=6)
    message = r"6 rows does not divide among 4 ranks; \[1, 2, 3, 6\] would do"
    with pytest.raises(ValueError, match=message):
        data.batch(0, 0, 4)
    with pytest.raises(ValueError, match=message):
        data.sequential(6, 0, 4)


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_outside_is_refused(tmp_path, rank):
    with pytest.raises(ValueError, match=f"rank={rank} must lie between 0 and 1"):
        batches(tmp_path).batch(0, rank, 2)
