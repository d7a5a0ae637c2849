"""The samples of `GPTDataset` are Megatron-Core's (0.16.1), to the bit: digests of its own, for the same files."""

import hashlib

import numpy as np
import pytest
import torch

from core.datasets.tokenizers.trained import train_tokenizer
from core.interop.megatron.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from core.interop.megatron.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from core.interop.megatron.datasets.indexed_dataset import (
    IndexedDataset,
    IndexedDatasetBuilder,
    get_bin_path,
    get_idx_path,
)
from core.interop.megatron.datasets.utils import get_blend_from_list, split_bounds
from core.interop.megatron.tokenizers import MegatronTokenizer

KEYS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")
# case -> (samples, digest of the first 400) of train, valid and test, as Megatron-Core made them
THEIRS = {
    "mock": [(4261893, "27bd3c65d0fa1297"), (4259983, "2cb00bb0144378b9"), (4267941, "24a74162a5617f66")],
    "one": [(59, "6ce59e507361b680"), (9, "ae0702ac80a7826b"), (1, "b213a0ef158ed39f")],
    "many epochs": [(359, "a86dcb34fbb97a9f"), (28, "9ff6f6f672d15d2b"), (20, "fa29296be1d9719a")],
    "apart": [(119, "d06c52492c92dea4"), (9, "ae0702ac80a7826b"), (5, "12c299451f756b04")],
    "blend": [(200, "8f0d5ed46b217927"), (30, "9202286342132d2f"), (30, "cb2dea8ea528aff1")],
    "blend3": [(99, "4c1ae12a6707c903"), (11, "f60d16f2d99856b4"), (5, "4d310973bece7f16")],
    "blendall": [(139, "7cd6d4e07e5c575f"), None, None],
    "persplit": [(100, "e5fce78d7246d0bb"), (20, "b6433a433749de9d"), None],
    "seed1": [(67, "c102a0f09eec3903"), (9, "b5079cb51fd6bf1f"), (8, "54dc7fa56ab4e969")],
    "seed2": [(121, "c25deb5a19a3dd58"), (8, "4afe86063e51c8ef"), (7, "10acc288ab7aa651")],
    "seed3": [(166, "f78335af47d76f3c"), (7, "b78fc44e4767d362"), (13, "12ace83aafb5eefe")],
    "seed4": [(203, "b5f81cfd1ef1b04c"), (6, "45d8fdee2dcfeb16"), (12, "3f0dfb776e1b3d25")],
}
SPLIT = "8,1,1"
PLAIN = {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False}
CASES = {
    "mock": (
        MockGPTDataset,
        [1000, None, None],
        PLAIN,
    ),
    "one": (GPTDataset, [None, None, None], {"blend": ("a", None), "split": SPLIT}),
    "many epochs": (GPTDataset, [300, 20, 20], {"blend": ("a", None), "split": SPLIT}),
    "apart": (GPTDataset, [70, 5, 5], {"blend": ("a", None), "split": SPLIT}),
    "blend": (GPTDataset, [200, 30, 30], {"blend": ("ab", [0.3, 0.7]), "split": SPLIT}),
    "blend3": (GPTDataset, [200, None, None], {"blend": ("ab", None), "split": SPLIT}),
    "blendall": (GPTDataset, [None, None, None], {"blend": ("abc", None), "split": "100,0,0"}),
    "persplit": (GPTDataset, [100, 20, None], {"blend_per_split": [("ab", [0.5, 0.5]), ("c", None), None]}),
} | {
    f"seed{s}": (
        GPTDataset,
        [50 * s, None, 7],
        {"blend": ("b", None), "split": "7,2,1", "random_seed": s, "sequence_length": 8 + s},
    )
    for s in (1, 2, 3, 4)
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """a, b, c: 40, 25 and 9 documents that end in token 63."""
    folder, draw = tmp_path_factory.mktemp("tokens"), np.random.default_rng(3)
    for name, count in (("a", 40), ("b", 25), ("c", 9)):
        prefix = str(folder / name)
        builder = IndexedDatasetBuilder(get_bin_path(prefix), dtype=np.int32)
        for _ in range(count):
            document = draw.integers(0, 63, draw.integers(2, 60))
            document[-1] = 63
            builder.add_item(torch.tensor(document))
            builder.end_document()
        builder.finalize(get_idx_path(prefix))
    return folder


def digest(dataset):
    found = hashlib.sha256()
    for i in range(min(len(dataset), 400)):
        sample = dataset[i]
        for key in KEYS:
            found.update(sample[key].numpy().tobytes())
    return len(dataset), found.hexdigest()[:16]


def config(folder, **more):
    def placed(blend):
        return blend and ([str(folder / name) for name in blend[0]], blend[1])

    facts = {"random_seed": 5, "sequence_length": 16, "tokenizer": tokenizer()}
    facts |= {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True} | more
    if "blend" in more:
        facts["blend"] = placed(more["blend"])
    if "blend_per_split" in more:
        facts["blend_per_split"] = [placed(blend) for blend in more["blend_per_split"]]
    return GPTDatasetConfig(**facts)


def tokenizer():
    return MegatronTokenizer.from_pretrained(metadata_path={"library": "null-text"}, vocab_size=64)


@pytest.mark.parametrize("case", CASES)
def test_the_samples_are_megatrons(files, case):
    kind, sizes, facts = CASES[case]
    parts = BlendedMegatronDatasetBuilder(kind, sizes, lambda: True, config(files, **facts)).build()
    assert [None if part is None else digest(part) for part in parts] == THEIRS[case]


def test_files_by_their_names(files):
    dataset = IndexedDataset(str(files / "c"))
    assert len(dataset) == 9 and dataset[2][-1] == 63 and len(dataset[:3]) == 3
    assert (dataset.get(3, 1, 2) == dataset[3][1:3]).all()
    assert dataset.document_indices.tolist() == list(range(10)) and IndexedDataset.exists(str(files / "c"))
    with pytest.raises(ValueError, match="tokens 0 to 1000 of sequence 0, which has"):
        dataset.get(0, 0, 1000)
    builder = IndexedDatasetBuilder(get_bin_path(str(files / "d")))
    builder.add_item([1, 2])
    with pytest.raises(ValueError, match="a document of 2 sequences; join them"):
        builder.add_item([3])
    builder.end_document()
    with pytest.raises(ValueError, match="does not belong to"):
        builder.finalize(get_idx_path(str(files / "e")))
    builder.finalize(get_idx_path(str(files / "d")))


def test_what_is_refused(files):
    with pytest.raises(ValueError, match="needs a tokenizer"):
        GPTDatasetConfig(random_seed=0, sequence_length=4)
    with pytest.raises(ValueError, match="blend needs split"):
        config(files, blend=("a", None))
    with pytest.raises(ValueError, match="leave blend and split out"):
        config(files, blend_per_split=[("a", None), None, None], split=SPLIT)
    with pytest.raises(ValueError, match="has 4 shares"):
        split_bounds("1,2,3,4")
    with pytest.raises(ValueError, match=r"need a size for every part, the sizes are \[None"):
        some = config(files, blend=("ab", [1, 1]), split=SPLIT)
        BlendedMegatronDatasetBuilder(GPTDataset, [None, 1, 1], lambda: True, some).build()
    with pytest.raises(ValueError, match=r"valid part has \d+ tokens in 1 documents, a sample takes 4097"):
        some = config(files, blend=("c", None), split="0,1,8", sequence_length=4096)
        BlendedMegatronDatasetBuilder(GPTDataset, [None] * 3, lambda: True, some).build()


def test_a_tokenizers_folder(tmp_path):
    train_tokenizer(["some text"], 270).save(tmp_path / "tokenizer.json")
    by_folder, by_file = map(MegatronTokenizer.from_pretrained, (str(tmp_path), str(tmp_path / "tokenizer.json")))
    assert by_folder.tokenize("some") == by_file.tokenize("some")
    with pytest.raises(ValueError, match=r"org/model is no file; give a tokenizer.json, or a folder with one"):
        MegatronTokenizer.from_pretrained("org/model")


def test_blends_of_a_list():
    assert get_blend_from_list(["0.3", "a", "0.7", "b"]) == (["a", "b"], [0.3, 0.7])
    assert get_blend_from_list(["a"]) == (["a"], None) and get_blend_from_list(["a", "b"]) == (["a", "b"], None)
    assert get_blend_from_list(None) is None
