"""Parts of a data set without documents, blends whose numbers do not fit, and fields that are another way here."""

import numpy as np
import pytest

from core.interop.megatron.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from core.interop.megatron.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from core.interop.megatron.datasets.indexed_dataset import (
    IndexedDataset,
    IndexedDatasetBuilder,
    get_bin_path,
    get_idx_path,
)
from core.interop.megatron.datasets.utils import Split

LONG, SHORT = 50, 3  # documents of the two files
PLAIN = {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False}
# of pretrain_gpt.py of megatron-core 0.16.1, at its defaults
THEIRS = {
    "multiple_validation_sets": None,
    "full_validation": False,
    "allow_ambiguous_pad_tokens": False,
    "fast_cache_load": False,
    "defer_npy_index_mmap": False,
    "object_storage_cache_path": None,
    "data_parallel_size": 1,
    "sequence_parallel_size": 0,
    "hybrid_context_parallel": False,
    "sequences_per_dataset": None,
    "context_parallel_size": None,
}


class Tokenizer:
    vocab_size, eod, pad = 64, 63, 62


class PadIsEnd:
    """As GPT-2's, which has one special token."""

    vocab_size, eod, pad = 64, 63, 63


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory):
    folder, draw = tmp_path_factory.mktemp("tokens"), np.random.default_rng(3)
    for name, count in (("long", LONG), ("short", SHORT)):
        builder = IndexedDatasetBuilder(get_bin_path(str(folder / name)), dtype=np.int32)
        for _ in range(count):
            builder.add_document([*draw.integers(0, 60, 30), 63], [31])
        builder.finalize(get_idx_path(str(folder / name)))
    return [str(folder / "long"), str(folder / "short")]


def config(**more):
    facts = {"random_seed": 1, "sequence_length": 16, "tokenizer": Tokenizer()} | PLAIN
    return GPTDatasetConfig(**facts | more)


def parts(sizes, **more):
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config(**more)).build()


@pytest.mark.parametrize("size", [0, None])
def test_a_part_without_documents_of_which_nothing_is_asked_is_none(prefixes, size):
    train, valid, test = parts([40, 10, size], blend=(prefixes[:1], None), split="949,50,1")
    assert len(train) >= 40 and len(valid) >= 10 and test is None
    # of two files without weights, too
    assert parts([40, 10, size], blend=(prefixes, None), split="949,50,1")[2] is None


def test_samples_of_a_part_without_documents_are_refused(prefixes):
    said = r"long: the test part has 0 of 50 documents by split='949,50,1', and 5 samples are asked.*or the size 0"
    with pytest.raises(ValueError, match=said):
        parts([40, 10, 5], blend=(prefixes[:1], None), split="949,50,1")
    said = r"long, .*short: the test part has 0 of 53 documents by split='949,50,1', and 5 samples"
    with pytest.raises(ValueError, match=said):
        parts([40, 10, 5], blend=(prefixes, None), split="949,50,1")
    with pytest.raises(ValueError, match=r"short: the valid part has 0 of 3 documents .* and 6 samples"):
        parts([40, 10, 0], blend=(prefixes, [0.5, 0.5]), split="949,50,1")
    with pytest.raises(ValueError, match="the test part has 0 tokens in 0 documents, a sample takes 17"):
        GPTDataset(IndexedDataset(prefixes[0]), np.arange(0), 5, Split.test, config())


def test_files_with_documents_of_a_part_keep_their_numbers(prefixes):
    """The first file has no document of the valid part."""
    blend = ([prefixes[1], prefixes[0]], None)
    valid = parts([40, 10, 0], blend=blend, split="949,50,1")[1]
    alone = parts([40, None, 0], blend=(prefixes[:1], None), split="949,50,1")[1]
    assert {valid[i]["dataset_id"] for i in range(len(valid))} == {1}
    assert (valid[0]["tokens"] == alone[0]["tokens"]).all()
    weighted = parts([40, 10, 0], blend=(blend[0], [0.0, 1.0]), split="949,50,1")[1]
    assert {weighted[i]["dataset_id"] for i in range(len(weighted))} == {1}


def test_numbers_of_prefixes_weights_and_parts(prefixes):
    with pytest.raises(ValueError, match=r"^blend has 2 prefixes and 1 weights; give a weight for each prefix"):
        config(blend=(prefixes, [1.0]), split="8,1,1")
    with pytest.raises(ValueError, match=r"^blend_per_split of valid has 1 prefixes and 2 weights"):
        config(blend_per_split=[(prefixes, None), (prefixes[:1], [1, 1]), None])
    with pytest.raises(ValueError, match="has 2 blends for 3 parts: train, valid, test; give None"):
        config(blend_per_split=[(prefixes, None), None])


def test_fields_of_megatrons_script_are_taken(prefixes):
    plain = parts([40, 10, 5], blend=(prefixes[:1], None), split="8,1,1")
    taken = parts([40, 10, 5], blend=(prefixes[:1], None), split="8,1,1", **THEIRS)
    # sizes as a script over 8 ranks gives them: samples do not depend on them
    sizes = {"data_parallel_size": 2, "sequence_parallel_size": 2, "context_parallel_size": 2}
    over_ranks = parts([40, 10, 5], blend=(prefixes[:1], None), split="8,1,1", **sizes)
    for want, *others in zip(plain, taken, over_ranks, strict=True):
        for got in others:
            assert len(got) == len(want)
            assert all((got[i]["tokens"] == want[i]["tokens"]).all() for i in range(len(want)))


@pytest.mark.parametrize(
    "name, value, way",
    [
        ("multiple_validation_sets", True, "make a BlendedMegatronDatasetBuilder for each file"),
        ("full_validation", True, "give None as the size of the valid part"),
        ("fast_cache_load", True, "there is no cache to read"),
        ("defer_npy_index_mmap", True, "there is no cache to read"),
        ("object_storage_cache_path", "/cache", "copy the .bin and .idx to a disk"),
        ("hybrid_context_parallel", True, "context ranks cut rows of sequence_length"),
        ("sequences_per_dataset", {"a": [1, 1]}, "each .idx says its numbers"),
    ],
)
def test_other_values_are_refused_by_name(name, value, way):
    with pytest.raises(ValueError, match=f"GPTDatasetConfig: {name}=.* is not here; .*{way}"):
        config(**{name: value})


def test_a_name_that_is_no_field_gets_the_nearest():
    with pytest.raises(TypeError, match="did you mean sequence_length"):
        config(sequence_lenght=4)


def test_a_pad_that_is_the_end_of_text_hides_no_end(prefixes):
    """Unless that is asked for, as in Megatron."""
    facts = {"blend": (prefixes[:1], None), "split": "8,1,1", "tokenizer": PadIsEnd()}
    for more, hidden in (({}, False), ({"allow_ambiguous_pad_tokens": True}, True)):
        train = parts([40, 1, 1], **facts, **more)[0]
        masked = [int((train[i]["loss_mask"] == 0).sum()) for i in range(10)]
        ends = [int((train[i]["labels"] == 63).sum()) for i in range(10)]
        assert (sum(masked) > 0) == hidden and (sum(ends) > 0) != hidden
    assert int((parts([40, 1, 1], **facts | {"tokenizer": Tokenizer()})[0][0]["loss_mask"] == 0).sum()) == 0
