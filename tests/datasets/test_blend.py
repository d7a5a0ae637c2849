"""Blends: exact proportions, every part's own order, any layout and any step without the steps before."""

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.datasets.batches import GPTBatches
from core.datasets.blend import BLEND_BLOCK, BlendedBatches, open_blend
from core.datasets.token_file import TokenFile
from core.datasets.token_file_writer import TokenFileWriter


def part(directory, name, first, count, s=2, rows=4, seed=3, **kwargs):
    """Tokens first .. first + count."""
    with TokenFileWriter(Path(directory) / name, vocab_size=60_000) as writer:
        writer.add_document(range(first, first + count))
    file = TokenFile(Path(directory) / name)
    return GPTBatches(token_file=file, sequence_length=s, global_batch_size=rows, seed=seed, **kwargs)


def blend(directory, weights=(0.7, 0.3), counts=(21, 9), rows=4, seed=5, **kwargs):
    parts = [
        (weight, part(directory, f"part{i}", 10_000 * i, count, **kwargs))
        for i, (weight, count) in enumerate(zip(weights, counts, strict=True))
    ]
    return BlendedBatches(parts=parts, global_batch_size=rows, seed=seed)


def labels(batches, steps, rank=0, size=1):
    return torch.cat([batches.batch(step, rank, size)["labels"] for step in steps])


def test_a_block_holds_each_part_exactly(tmp_path):
    found = labels(blend(tmp_path, rows=512), range(2 * BLEND_BLOCK // 512))
    for block in (0, 1):
        of_part_1 = (found[block * BLEND_BLOCK : (block + 1) * BLEND_BLOCK, 0] >= 10_000).sum()
        assert of_part_1 == round(BLEND_BLOCK * 0.3)
    assert not torch.equal(found[:BLEND_BLOCK] >= 10_000, found[BLEND_BLOCK:] >= 10_000), (
        "each block has an order of its own"
    )


@settings(max_examples=15, deadline=None)
@given(weights=st.lists(st.floats(0.05, 9), min_size=1, max_size=5))
def test_largest_remainders_make_up_the_block(weights):
    with tempfile.TemporaryDirectory() as directory:
        counts = blend(directory, weights, [9] * len(weights))._counts
    assert sum(counts) == BLEND_BLOCK
    exact = [BLEND_BLOCK * weight / sum(weights) for weight in weights]
    assert all(abs(count - e) < 1 for count, e in zip(counts, exact, strict=True))


@settings(max_examples=15, deadline=None)
@given(
    counts=st.lists(st.integers(2, 40), min_size=1, max_size=3),
    s=st.integers(1, 5),
    rows=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_every_part_goes_through_its_own_epochs(counts, s, rows, seed):
    """The samples of a part, in the order of the blend, are those that the part alone would give."""
    with tempfile.TemporaryDirectory() as directory:
        weights = [i + 1.0 for i in range(len(counts))]
        batches = blend(directory, weights, counts, rows, seed, s=s, allow_short=True)
        found = labels(batches, range(60 // rows + 1))
        for i, (_, alone) in enumerate(batches.parts):
            mine = found[(found[:, 0] >= 10_000 * i) & (found[:, 0] < 10_000 * (i + 1))]
            steps = range(len(mine) // alone.global_batch_size + 1)
            assert torch.equal(mine, labels(alone, steps)[: len(mine)])
            whole = len(mine) // alone.num_samples * alone.num_samples
            seen = mine[:whole][mine[:whole] >= 0].tolist()
            each = range(10_000 * i + 1, 10_000 * i + counts[i])
            assert sorted(seen) == sorted(list(each) * (whole // alone.num_samples)), "each token once per epoch"


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_global_batch_is_the_same_for_every_layout(tmp_path, size):
    batches = blend(tmp_path, rows=8)
    for step in (0, 511, 512, 10**9):
        parts = [batches.batch(step, rank, size) for rank in range(size)]
        for name, whole in batches.batch(step).items():
            assert torch.equal(torch.cat([part[name] for part in parts]), whole)


def test_resuming_and_batches_across_blocks(tmp_path):
    through = labels(blend(tmp_path, rows=6), range(1500))
    resumed = labels(blend(tmp_path, rows=6), range(680, 700))
    assert torch.equal(through[680 * 6 : 700 * 6], resumed)
    large = blend(tmp_path, rows=9000).batch(0)["labels"]
    assert torch.equal(large, through), "a batch may be longer than a block"


def test_golden_order(tmp_path):
    """A contract: changed, every run in progress would resume on other data."""
    found = labels(blend(tmp_path, rows=16), [0])[:, 0].tolist()
    assert found == [11, 15, 10003, 10007, 17, 5, 9, 13, 3, 7, 1, 19, 1, 15, 5, 10001]


def test_weights_are_normalised_and_default_to_the_tokens(tmp_path):
    counts = [blend(tmp_path, weights)._counts for weights in ((0.7, 0.3), (70, 30), (None, None))]
    assert counts[0] == counts[1] == counts[2] == (2867, 1229)


def test_sequential_reads_each_part_once(tmp_path):
    batches = blend(tmp_path)
    for size in (1, 2):
        parts = [torch.cat([b["labels"] for b in batches.sequential(4, rank, size)]) for rank in range(size)]
        seen = torch.cat(parts).flatten()
        assert sorted(seen[seen >= 0].tolist()) == [*range(1, 21), *range(10_001, 10_009)]


def test_packing_options_hold_for_the_blend(tmp_path):
    batches = blend(tmp_path, end_of_text=5, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)
    batch = batches.batch(0)
    assert batch.keys() == {"tokens", "labels", "position_ids", "document_begin"}
    assert batch["document_begin"].shape == (4, 2)


def test_mistakes_are_told_together(tmp_path):
    one, other = part(tmp_path, "a", 0, 9), part(tmp_path, "b", 0, 9, s=3)

    def message(parts, rows=4):
        with pytest.raises(ValueError) as error:
            BlendedBatches(parts=parts, global_batch_size=rows, seed=1)
        return str(error.value)

    assert "0 parts, at least 1" in message([])
    told = message([(0.5, one), (-1, other), (None, one)], rows=0)
    for words in (
        "global_batch_size=0",
        "2 of 3 parts have a weight",
        "weights [-1] must",
        "differ in sequence length",
    ):
        assert words in told
    assert "weight 1e-06 of part 1 is 1e-06 of all and would never be drawn, 1/4096 would" in message(
        [(1, one), (1e-6, one)]
    )
    with pytest.raises(ValueError, match="6 rows does not divide among 4 ranks"):
        blend(tmp_path, rows=6).batch(0, 0, 4)
    with pytest.raises(ValueError, match="step=-1 must be at least 0"):
        blend(tmp_path).batch(-1)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("a", [(None, "a")]),
        (("a",), [(None, "a")]),
        (("a", "b", "c"), [(None, "a"), (None, "b"), (None, "c")]),
        (("0.7", "a", "3", "b"), [(0.7, "a"), (3.0, "b")]),
        (("1", "./7"), [(1.0, "./7")]),
    ],
)
def test_blends_as_they_are_written(names, expected):
    assert open_blend(names) == expected


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), "nothing names 0 weights and 0 files"),
        (("0.5",), "names 1 weights and 0 files; write prefixes alone"),
        (("0.5", "a", "b"), "names 1 weights and 2 files"),
        (("a", "0.5"), "names 1 weights and 1 files"),
        (("1", "7"), "as ./7"),
        (("0", "a", "1", "b"), r"weights \[0.0\] must be positive"),
        (("nan", "a"), "must be positive"),
    ],
)
def test_blends_that_cannot_be_meant(names, message):
    with pytest.raises(ValueError, match=message):
        open_blend(names)
