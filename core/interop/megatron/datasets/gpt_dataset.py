"""Samples of fixed length out of documents, in Megatron's order: the same samples for the same seed and files.

Documents are shuffled over the epochs that are needed and laid end to end; sample k is the tokens from
k * sequence_length on, one more than its length for the labels; then samples are shuffled. Where the last epoch would
be cut short below 80 %, it is shuffled apart from the others.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.field_names import tells_names
from core.interop.megatron.absent import absent_names
from core.interop.megatron.datasets.indexed_dataset import IndexedDataset
from core.interop.megatron.datasets.utils import Split, check_blend, split_bounds
from core.interop.megatron.settings import refuse_others

_MOCK_DOCUMENTS = 100_000
_MOCK_MAX_LENGTH = 4096
# from this part on the last epoch is shuffled with the others
_NEARLY_FULL_EPOCH = 0.8
# a number that no text has
_NO_PAD = -1
_NO_CACHE = "leave it out: the index is computed in memory, there is no cache to read"
_INSTEAD = {
    "multiple_validation_sets": "make a BlendedMegatronDatasetBuilder for each file of the valid part",
    "full_validation": "give None as the size of the valid part to BlendedMegatronDatasetBuilder: one epoch",
    "fast_cache_load": _NO_CACHE,
    "defer_npy_index_mmap": _NO_CACHE,
    "object_storage_cache_path": "copy the .bin and .idx to a disk, and give their prefix in blend",
    "hybrid_context_parallel": "leave it out; context ranks cut rows of sequence_length "
    "(initialize_model_parallel(context_parallel_size=...))",
    "sequences_per_dataset": "leave it out: each .idx says its numbers of sequences and documents",
}


@tells_names()
@dataclass
class GPTDatasetConfig:
    """Megatron's fields that say which samples there are; without `blend` and `blend_per_split` data are made up.

    Raises ValueError: settings that contradict each other, or that are not here.
    """

    random_seed: int
    sequence_length: int
    blend: tuple[list[str], list[float] | None] | None = None
    blend_per_split: list[tuple[list[str], list[float] | None] | None] | None = None
    split: str | None = None
    num_dataset_builder_threads: int = 1
    path_to_cache: str | None = None  # not used: the index is computed at once, in memory
    mmap_bin_files: bool = True
    tokenizer: Any = None
    mid_level_dataset_surplus: float = 0.005
    reset_position_ids: bool | None = None
    reset_attention_mask: bool | None = None
    eod_mask_loss: bool | None = None
    create_attention_mask: bool = True
    drop_last_partial_validation_sequence: bool = True
    add_extra_token_to_sequence: bool = True
    # whether labels that are `tokenizer.pad` are no losses even where it is the number of the end of text, too
    allow_ambiguous_pad_tokens: bool | None = False
    multiple_validation_sets: bool | None = None
    full_validation: bool | None = None
    fast_cache_load: bool = False
    defer_npy_index_mmap: bool = False
    object_storage_cache_path: str | None = None
    hybrid_context_parallel: bool = False
    sequences_per_dataset: dict[str, Any] | None = None
    # sizes of the layout, which scripts give as they are: samples of fixed length do not depend on them
    data_parallel_size: int = 1
    sequence_parallel_size: int = 0
    context_parallel_size: int | None = None
    mock: bool = field(init=False, default=False)
    bounds: list[tuple[float, float] | None] = field(init=False)

    def __post_init__(self) -> None:
        refuse_others(self, _INSTEAD)
        if self.tokenizer is None:
            raise ValueError(
                "GPTDatasetConfig needs a tokenizer: MegatronTokenizer.from_pretrained(...)"
            )
        if not (self.drop_last_partial_validation_sequence and self.add_extra_token_to_sequence):
            raise ValueError(
                "drop_last_partial_validation_sequence=False and add_extra_token_to_sequence=False are not here; "
                "leave them at True"
            )
        per_split = self.blend_per_split is not None and any(self.blend_per_split)
        if per_split and (self.blend is not None or self.split is not None):
            raise ValueError("blend_per_split says all; leave blend and split out")
        if self.blend is not None and self.split is None:
            raise ValueError('blend needs split, such as "99,1,0"')
        if per_split:
            assert self.blend_per_split is not None
            if len(self.blend_per_split) != len(Split):
                raise ValueError(
                    f"blend_per_split has {len(self.blend_per_split)} blends for {len(Split)} parts: train, valid, "
                    "test; give None for a part without files"
                )
            for split, blend in zip(Split, self.blend_per_split, strict=True):
                check_blend(f"blend_per_split of {split.name}", blend)
        check_blend("blend", self.blend)
        self.mock = self.blend is None and not per_split
        if self.mock:
            self.split = "1,1,1"
        # each split has files of its own without `split`
        self.bounds = [(0.0, 1.0)] * len(Split)
        if self.split is not None:
            self.bounds = split_bounds(self.split)


def _pad_of(config: GPTDatasetConfig) -> int:
    """The number that labels without a loss have."""
    tokenizer = config.tokenizer
    pad: int = getattr(tokenizer, "pad", _NO_PAD)
    if config.allow_ambiguous_pad_tokens:
        return pad
    named = getattr(tokenizer, "special_tokens_dict", None) or {}
    others = [token for name, token in named.items() if name != "pad_token"]
    if not others:
        others = [getattr(tokenizer, name, None) for name in ("eos", "eod")]
    # as Megatron: a tokenizer whose pad is its end of text would hide every end of text from the loss
    return _NO_PAD if pad in others else pad


class MockDocuments:
    """100,000 documents of 1 to 4,095 tokens that count up, each ending in the end of text."""

    def __init__(self, tokenizer: Any) -> None:
        self._vocab = tokenizer.vocab_size
        self._end = tokenizer.eod
        lengths = np.random.default_rng(seed=0).integers(
            1, _MOCK_MAX_LENGTH, _MOCK_DOCUMENTS, dtype=np.int32
        )
        self.sequence_lengths: np.ndarray = lengths

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens of one document."""
        tokens = (np.arange(1, int(self.sequence_lengths[idx]) + 1)) % self._vocab
        tokens[-1] = self._end
        stop = None if length is None else offset + length
        return tokens[offset:stop]


class GPTDataset(torch.utils.data.Dataset):
    """`[s]` tokens, labels, loss_mask and position_ids per sample, and a mask `[1, s, s]`, True = hidden.

    documents: the numbers of those that belong to the split. num_samples: how many are needed, over as many epochs as
    it takes; None for one epoch. Raises ValueError: too few tokens for one sample.
    """

    def __init__(
        self,
        source: Any,
        documents: np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        self.source = source
        self.documents = documents
        self.num_samples = num_samples
        self.index_split = index_split
        self.config = config
        self.pad = _pad_of(config)
        # not len(self), which python refuses below 0
        if self._samples_in(self._epochs) < 1:
            raise ValueError(
                f"the {index_split.name} part has {self._tokens_per_epoch} tokens in {len(documents)} documents, a "
                f"sample takes {config.sequence_length + 1}; give it a larger share of split, or shorter samples"
            )

    @classmethod
    def build_low_level_dataset(cls, path_prefix: str | None, config: GPTDatasetConfig) -> Any:
        """The documents under a prefix."""
        assert path_prefix is not None
        return IndexedDataset(path_prefix)

    @cached_property
    def _tokens_per_epoch(self) -> int:
        return int(np.sum(self.source.sequence_lengths[self.documents], dtype=np.int64))

    @cached_property
    def _epochs(self) -> int:
        if self.num_samples is None:
            return 1
        # one more for the last label
        needed_tokens = self.num_samples * self.config.sequence_length + 1
        return max(1, -(-needed_tokens // max(1, self._tokens_per_epoch)))

    def _samples_in(self, epochs: int) -> int:
        return (epochs * self._tokens_per_epoch - 1) // self.config.sequence_length

    def __len__(self) -> int:
        """All samples of the epochs: as many as were asked for, or a few more."""
        return self._samples_in(self._epochs)

    @cached_property
    def _order(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(documents of all epochs, the token at which each begins and the end, samples): drawn at first use."""
        # the same calls of the same generator in the same order as Megatron: so the samples are the same
        generator = np.random.RandomState(self.config.random_seed)
        separate_last_epoch = False
        if self._epochs > 1 and self.num_samples is not None:
            last_epoch_samples = self.num_samples - self._samples_in(self._epochs - 1)
            separate_last_epoch = last_epoch_samples < int(_NEARLY_FULL_EPOCH * self._samples_in(1))

        def shuffled(values: np.ndarray) -> np.ndarray:
            generator.shuffle(values)
            return values

        # documents: the epochs that are shuffled together, then the last one
        joint_epochs = self._epochs - separate_last_epoch
        orders = [shuffled(np.tile(self.documents, joint_epochs).astype(np.int32))]
        if separate_last_epoch:
            orders.append(shuffled(self.documents.astype(np.int32)))
        documents = np.concatenate(orders)
        lengths = self.source.sequence_lengths[documents].astype(np.int64)
        starts = np.concatenate([[0], np.cumsum(lengths)])

        # samples, likewise
        joint_samples = self._samples_in(joint_epochs)
        count = len(self)
        dtype = np.uint32 if count < np.iinfo(np.uint32).max - 1 else np.int64
        samples = shuffled(np.arange(joint_samples, dtype=dtype))
        last_epoch = shuffled(np.arange(joint_samples, count, dtype=dtype))
        if separate_last_epoch:
            samples = np.concatenate([samples, last_epoch])
        return documents, starts, samples

    def _text(self, idx: int) -> Tensor:
        documents, starts, samples = self._order
        position = int(samples[idx]) * self.config.sequence_length
        stop = position + self.config.sequence_length + 1
        # the document of the first token
        number = int(np.searchsorted(starts, position, side="right")) - 1
        pieces = []
        while position < stop:
            end = min(stop, int(starts[number + 1]))
            if end > position:
                offset = position - int(starts[number])
                pieces.append(self.source.get(int(documents[number]), offset, end - position))
            position = end
            number = number + 1
        return torch.from_numpy(np.concatenate(pieces).astype(np.int64))

    def __getitem__(self, idx: int | None) -> dict[str, Tensor]:
        """A sample; None is one that no loss counts (to fill a batch)."""
        config = self.config
        if idx is None:
            number = 0
        else:
            # a range checks the index, and counts from the end
            number = range(len(self))[idx]
        text = self._text(number)
        tokens = text[:-1].contiguous()
        labels = text[1:].contiguous()
        masks = masks_and_positions(
            tokens,
            config.tokenizer.eod,
            reset_position_ids=bool(config.reset_position_ids),
            reset_attention_mask=bool(config.reset_attention_mask),
            eod_mask_loss=bool(config.eod_mask_loss),
            create_attention_mask=config.create_attention_mask,
        )
        masks["loss_mask"][labels == self.pad] = 0.0
        if idx is None:
            masks["loss_mask"].zero_()
        return {
            "tokens": tokens.masked_fill(tokens == self.pad, 0),
            "labels": labels.masked_fill(labels == self.pad, 0),
        } | masks


def masks_and_positions(
    tokens: Tensor,
    eod: int,
    *,
    reset_position_ids: bool,
    reset_attention_mask: bool,
    eod_mask_loss: bool,
    create_attention_mask: bool,
) -> dict[str, Tensor]:
    """loss_mask, position_ids `[s]` and, if wanted, attention_mask `[1, s, s]`, True = hidden, of tokens `[s]`.

    Reset: a document, up to and with its end of text, sees itself only, and counts its positions from 0.
    """
    s = tokens.numel()
    ends = tokens == eod
    # the end belongs to its document
    document = torch.cumsum(ends, 0) - ends.long()
    positions = torch.arange(s)
    loss_mask = torch.ones(s)
    masks = {"loss_mask": loss_mask}
    if eod_mask_loss:
        loss_mask[ends] = 0.0
    # the running maximum of the documents' begins is the begin of each token's own document
    if reset_position_ids:
        begins = torch.cat([torch.ones(1, dtype=torch.bool), ends[:-1]])
        positions = positions - torch.cummax(torch.where(begins, positions, 0), 0).values
    masks["position_ids"] = positions
    # True hides: later positions, and other documents
    if create_attention_mask:
        hidden = torch.ones(s, s, dtype=torch.bool).triu(1)
        if reset_attention_mask:
            hidden |= document[:, None] != document[None, :]
        masks["attention_mask"] = hidden[None]
    return masks


class MockGPTDataset(GPTDataset):
    """A GPTDataset of generated documents."""

    @classmethod
    def build_low_level_dataset(cls, path_prefix: str | None, config: GPTDatasetConfig) -> Any:
        """The generated documents, whatever the prefix."""
        return MockDocuments(config.tokenizer)


__getattr__ = absent_names(__name__)
