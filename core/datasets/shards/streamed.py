"""Batches from shards in a fixed order: the number of a row says its shard, and the place in it."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from core.datasets.batches import GPTBatches, empty_rows, rows_from
from core.datasets.packing import Packing
from core.datasets.shards.local import LocalShards


@dataclass(frozen=True, kw_only=True)
class StreamedBatches:
    """Samples of `sequence_length` tokens, shard after shard in the order of the list, epoch after epoch.

    In a shard samples come in an order that `seed` and the epoch decide, each once (`GPTBatches`); no sample crosses
    from one shard into the next. The global batch number `step` is a function of (list, seed, step): one integer
    resumes, on any number of ranks. While a shard is read the next one is fetched, and those behind are removed.
    """

    local: LocalShards
    sequence_length: int
    global_batch_size: int
    seed: int
    packing: Packing = field(default_factory=Packing)
    _open: dict[int, GPTBatches] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def _ends(self) -> list[int]:
        """Samples of an epoch up to the end of each shard."""
        s = self.sequence_length
        return list(accumulate(-(-(shard.tokens - 1) // s) for shard in self.local.manifest.shards))

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return self._ends[-1]

    def batch(self, step: int, rank: int = 0, size: int = 1) -> dict[str, Tensor]:
        """The rank's rows of the global batch number `step`: as `GPTBatches.batch`, errors included."""
        if step < 0:
            raise ValueError(f"step={step} must be at least 0")
        return self.rows(step * self.global_batch_size, self.global_batch_size, rank, size)

    def rows(self, first: int, count: int, rank: int = 0, size: int = 1) -> dict[str, Tensor]:
        """The same of the `count` rows from row `first` of the run on."""
        local_rows = rows_from(first, count, rank, size)
        tokens, labels = empty_rows(len(local_rows), self.sequence_length)
        following = self._make_room(first, count)
        for shard, drawn, start in self._pieces(local_rows):
            row = start - local_rows.start
            self._shard(shard).fill(drawn, range(row, row + len(drawn)), tokens, labels)
        # now that what is needed is here
        self.local.bring_ahead(following)
        return self.packing.batch(torch.from_numpy(tokens), torch.from_numpy(labels))

    def _pieces(self, rows: range) -> Iterator[tuple[int, range, int]]:
        """(shard, which of its draws, first row) of each run of rows that lies in one shard and epoch."""
        row = rows.start
        while row < rows.stop:
            epoch, position = divmod(row, self.num_samples)
            shard = bisect_right(self._ends, position)
            begin = self._ends[shard - 1] if shard else 0
            samples = self._ends[shard] - begin
            count = min(rows.stop - row, self._ends[shard] - position)
            drawn = epoch * samples + position - begin
            yield shard, range(drawn, drawn + count), row
            row += count

    def _make_room(self, first: int, count: int) -> int:
        """Keep what this batch and the last one read, and the shard that comes next, which is returned."""
        # other ranks of the machine may still be at the last batch
        needed = list(
            dict.fromkeys(
                shard for shard, _, _ in self._pieces(range(max(0, first - count), first + count))
            )
        )
        following = (needed[-1] + 1) % len(self._ends)
        for shard in self._open.keys() - {*needed}:
            del self._open[shard]
        self.local.keep({*needed, following})
        return following

    def _shard(self, number: int) -> GPTBatches:
        if number not in self._open:
            self._open[number] = GPTBatches(
                token_file=self.local.open(number),
                sequence_length=self.sequence_length,
                global_batch_size=self.global_batch_size,
                seed=self.seed,
                allow_short=True,
            )
        return self._open[number]
