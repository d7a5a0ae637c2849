"""One data set for each of train, valid and test, blended from several files by weight."""

from collections.abc import Callable, Mapping, Sequence
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
    dataset_index = np.empty(size, np.int16)
    sample_index = np.empty(size, np.int64)
    taken = [0] * len(weights)
    unexhausted = list(range(len(weights)))
    for position in range(size):
        # the data set that is furthest behind its share goes next; of equal ones the first
        behind = [weights[dataset] * max(position, 1.0) - taken[dataset] for dataset in unexhausted]
        dataset = unexhausted[behind.index(max(behind))]
        dataset_index[position], sample_index[position] = dataset, taken[dataset]
        taken[dataset] += 1
        if sizes is not None and taken[dataset] == sizes[dataset]:
            unexhausted.remove(dataset)
    return dataset_index, sample_index


class BlendedDataset(torch.utils.data.Dataset):
    """Samples of several data sets in proportion to their weights; `dataset_id` says which one a sample is of.

    datasets: in a mapping, each with its number, which others without documents leave out.
    size: None takes every sample of every data set once. Raises ValueError: a data set with too few samples.
    """

    def __init__(
        self,
        datasets: Sequence[GPTDataset] | Mapping[int, GPTDataset],
        weights: Sequence[float],
        size: int | None,
    ) -> None:
        numbered = datasets if isinstance(datasets, Mapping) else dict(enumerate(datasets))
        self.numbers = list(numbered)
        self.datasets = list(numbered.values())
        lengths = [len(dataset) for dataset in self.datasets]
        shares = normalize(list(weights))
        if size is None:  # one epoch of each
            order = blending_order(shares, sum(lengths), lengths)
        else:
            order = blending_order(shares, size)
        self.dataset_index, self.dataset_sample_index = order
        needed = np.bincount(self.dataset_index, minlength=len(lengths)).tolist()
        for number, count, length in zip(self.numbers, needed, lengths, strict=True):
            if count > length:
                raise ValueError(
                    f"the blend takes {count} samples of data set {number}, which has {length}; raise "
                    "mid_level_dataset_surplus or ask for fewer"
                )

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, idx: int) -> dict[str, Tensor | int]:
        """A sample, with the number of its data set."""
        place = int(self.dataset_index[idx])
        sample = self.datasets[place][int(self.dataset_sample_index[idx])]
        return {"dataset_id": self.numbers[place], **sample}


class BlendedMegatronDatasetBuilder:
    """`build()` gives [train, valid, test], None where there is none. sizes: samples of each, None for one epoch.

    A part without documents is None where its size is 0 or None.

    No rank waits for another: nothing is written.
    """

    def __init__(
        self,
        cls: type[GPTDataset],
        sizes: Sizes,
        is_built_on_rank: Callable[[], bool],
        config: GPTDatasetConfig,
    ) -> None:
        if len(sizes) != len(Split):
            raise ValueError(
                f"{len(sizes)} sizes for {len(Split)} parts: train, valid, test; give None for an epoch"
            )
        self.cls = cls
        self.sizes = list(sizes)
        self.is_built_on_rank = is_built_on_rank
        self.config = config

    def build(self) -> list[GPTDataset | BlendedDataset | None]:
        """[train, valid, test]. Raises ValueError: weights without sizes, a part with too few tokens."""
        config = self.config
        if not self.is_built_on_rank():
            return [None] * len(Split)
        if config.mock:
            return list(self._split_file(None, config.bounds, self.sizes))
        if config.blend is not None:
            return self._blended(*config.blend, config.bounds, self.sizes)
        blends = config.blend_per_split or [None] * len(Split)
        datasets: list[GPTDataset | BlendedDataset | None] = []
        for split in Split:
            blend = blends[split.value]
            if blend is None:
                datasets.append(None)
                continue
            bounds: list[tuple[float, float] | None] = [None] * len(Split)
            # each split has files of its own
            bounds[split.value] = (0.0, 1.0)
            datasets.append(self._blended(*blend, bounds, self.sizes)[split.value])
        return datasets

    def _split_file(
        self, prefix: str | None, bounds: Bounds, sizes: Sizes
    ) -> list[GPTDataset | None]:
        """One file: each split its share of the documents, in their order."""
        source = self.cls.build_low_level_dataset(prefix, self.config)
        count = len(source.sequence_lengths)
        datasets: list[GPTDataset | None] = []
        for split in Split:
            share = bounds[split.value]
            if share is None:
                datasets.append(None)
                continue
            documents = np.arange(round(share[0] * count), round(share[1] * count), dtype=np.int32)
            if not len(documents):
                self._check_nothing_asked([prefix], split, sizes[split.value])
                datasets.append(None)
                continue
            datasets.append(self.cls(source, documents, sizes[split.value], split, self.config))
        return datasets

    def _check_nothing_asked(
        self, prefixes: Sequence[str | None], split: Split, size: int | None
    ) -> None:
        """Of a part without documents. Raises ValueError: samples are asked of it."""
        if not size:
            return
        count = 0
        for prefix in prefixes:
            count += len(self.cls.build_low_level_dataset(prefix, self.config).sequence_lengths)
        shares = "" if self.config.split is None else f" by split={self.config.split!r}"
        files = ", ".join(prefix or "generated data" for prefix in prefixes)
        raise ValueError(
            f"{files}: the {split.name} part has 0 of {count} documents{shares}, and {size} samples are asked of it; "
            "give it a larger share of split or a file of more documents, or the size 0: its data set is None then"
        )

    def _blended(
        self, prefixes: Sequence[str], weights: Sequence[float] | None, bounds: Bounds, sizes: Sizes
    ) -> list[GPTDataset | BlendedDataset | None]:
        without_size = any(
            size is None and bound is not None for size, bound in zip(sizes, bounds, strict=True)
        )
        if weights is not None and without_size:
            raise ValueError(
                f"weights {list(weights)} need a size for every part, the sizes are {list(sizes)}"
            )
        # one file needs no blend
        if len(prefixes) == 1:
            return list(self._split_file(prefixes[0], bounds, sizes))
        shares = None if weights is None else normalize(list(weights))
        # a few samples more per file than its share: rounding must not exhaust one before the blend is complete
        surplus = 1.0 + self.config.mid_level_dataset_surplus
        per_file = []
        for number, prefix in enumerate(prefixes):
            file_sizes: list[int | None] = [None] * len(sizes)
            if shares is not None:
                share = shares[number]
                file_sizes = [
                    None if size is None else ceil(ceil(size * share) * surplus) for size in sizes
                ]
            per_file.append(self._split_file(prefix, bounds, file_sizes))

        blended: list[GPTDataset | BlendedDataset | None] = []
        for split in Split:
            datasets: dict[int, GPTDataset] = {}
            for number, of_file in enumerate(per_file):
                dataset = of_file[split.value]
                if dataset is not None:
                    datasets[number] = dataset
            size = sizes[split.value]
            if not datasets:
                if bounds[split.value] is not None:
                    self._check_nothing_asked(prefixes, split, size)
                blended.append(None)
            elif shares is None:  # in proportion to their lengths
                lengths = [len(dataset) for dataset in datasets.values()]
                limited = None if size is None else min(size, sum(lengths))
                blended.append(BlendedDataset(datasets, lengths, limited))
            else:
                assert size is not None
                total_size = sum(ceil(size * share) for share in shares)
                of_these = [shares[number] for number in datasets]
                blended.append(BlendedDataset(datasets, of_these, total_size))
        return blended
