"""One data set for each part, blended from several files by weight."""

from collections.abc import Callable, Sequence
from math import ceil

import numpy as np
import torch
from torch import Tensor

from core.interop.megatron.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from core.interop.megatron.datasets.utils import Split, normalize

Bounds = Sequence[tuple[float, float] | None]
Sizes = Sequence[int | None]


def blending_order(
    weights: Sequence[float], size: int, sizes: Sequence[int] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(which data set, which of its samples) of each of `size` samples: always of the one furthest behind its weight.

    sizes: how many samples each has; one that is used up is left out.
    """
    which, sample = np.empty(size, np.int16), np.empty(size, np.int64)
    counts, open_ = [0] * len(weights), list(range(len(weights)))
    for i in range(size):
        behind = [weights[d] * max(i, 1.0) - counts[d] for d in open_]
        d = open_[behind.index(max(behind))]
        which[i], sample[i] = d, counts[d]
        counts[d] += 1
        if sizes is not None and counts[d] == sizes[d]:
            open_.remove(d)
    return which, sample


class BlendedDataset(torch.utils.data.Dataset):
    """Samples of several data sets in proportion to their weights; `dataset_id` says which one a sample is of.

    size: None takes every sample of every data set once. Raises ValueError: a data set with too few samples.
    """

    def __init__(self, datasets: Sequence[GPTDataset], weights: Sequence[float], size: int | None) -> None:
        self.datasets = list(datasets)
        lengths = [len(dataset) for dataset in datasets]
        count = sum(lengths) if size is None else size
        self.dataset_index, self.dataset_sample_index = blending_order(
            normalize(list(weights)), count, lengths if size is None else None
        )
        wanted = np.bincount(self.dataset_index, minlength=len(lengths)).tolist()
        for number, (most, have) in enumerate(zip(wanted, lengths, strict=True)):
            if most > have:
                raise ValueError(
                    f"the blend takes {most} samples of data set {number}, which has {have}; raise "
                    "mid_level_dataset_surplus or ask for fewer"
                )

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, idx: int) -> dict[str, Tensor | int]:
        """The sample of its data set."""
        number = int(self.dataset_index[idx])
        return {"dataset_id": number, **self.datasets[number][int(self.dataset_sample_index[idx])]}


class BlendedMegatronDatasetBuilder:
    """`build()` gives [train, valid, test], None where there is none. sizes: samples of each, None for one epoch.

    No rank waits for another: nothing is written.
    """

    def __init__(
        self, cls: type[GPTDataset], sizes: Sizes, is_built_on_rank: Callable[[], bool], config: GPTDatasetConfig
    ) -> None:
        if len(sizes) != len(Split):
            raise ValueError(f"{len(sizes)} sizes for {len(Split)} parts: train, valid, test; give None for an epoch")
        self.cls, self.sizes, self.is_built_on_rank, self.config = cls, list(sizes), is_built_on_rank, config

    def build(self) -> list[GPTDataset | BlendedDataset | None]:
        """The parts. Raises ValueError: weights without sizes, a part with too few tokens."""
        config = self.config
        if not self.is_built_on_rank():
            return [None] * len(Split)
        if config.mock:
            return list(self._parts(None, config.bounds, self.sizes))
        if config.blend is not None:
            return self._blended(*config.blend, config.bounds, self.sizes)
        found: list[GPTDataset | BlendedDataset | None] = []
        for part in Split:
            blend = (config.blend_per_split or [None] * len(Split))[part.value]
            bounds = [(0.0, 1.0) if other is part else None for other in Split]
            found.append(None if blend is None else self._blended(*blend, bounds, self.sizes)[part.value])
        return found

    def _parts(self, prefix: str | None, bounds: Bounds, sizes: Sizes) -> list[GPTDataset | None]:
        """Of one file: each part its share of the documents, in their order."""
        source = self.cls.build_low_level_dataset(prefix, self.config)
        count = len(source.sequence_lengths)
        found: list[GPTDataset | None] = []
        for part in Split:
            share = bounds[part.value]
            if share is None:
                found.append(None)
                continue
            documents = np.arange(round(share[0] * count), round(share[1] * count), dtype=np.int32)
            found.append(self.cls(source, documents, sizes[part.value], part, self.config))
        return found

    def _blended(
        self, prefixes: Sequence[str], weights: Sequence[float] | None, bounds: Bounds, sizes: Sizes
    ) -> list[GPTDataset | BlendedDataset | None]:
        if weights is not None and any(s is None and b is not None for s, b in zip(sizes, bounds, strict=True)):
            raise ValueError(f"weights {list(weights)} need a size for every part, the sizes are {list(sizes)}")
        if len(prefixes) == 1:
            return list(self._parts(prefixes[0], bounds, sizes))
        shares = None if weights is None else normalize(list(weights))
        surplus = 1.0 + self.config.mid_level_dataset_surplus
        columns = []
        for number, prefix in enumerate(prefixes):
            share = None if shares is None else shares[number]
            wanted = [None if s is None or share is None else ceil(ceil(s * share) * surplus) for s in sizes]
            columns.append(self._parts(prefix, bounds, wanted))
        found: list[GPTDataset | BlendedDataset | None] = []
        for part in Split:
            parts = [column[part.value] for column in columns]
            there = [dataset for dataset in parts if dataset is not None]
            size = sizes[part.value]
            if not there:
                found.append(None)
            elif shares is None:
                lengths = [len(dataset) for dataset in there]
                found.append(BlendedDataset(there, lengths, None if size is None else min(size, sum(lengths))))
            else:
                assert size is not None
                found.append(BlendedDataset(there, shares, sum(ceil(size * share) for share in shares)))
        return found
