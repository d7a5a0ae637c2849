"""Several texts in one stream: which of them the next sample comes from is a function of its number."""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from core.datasets.batches import GPTBatches, empty_rows, rows_from
from core.datasets.order import Ids, permute

BLEND_BLOCK = 4096  # samples in which the weights hold exactly


@dataclass(frozen=True, kw_only=True)
class BlendedBatches:
    """Batches whose rows come from `parts`, (weight, batches) each, in proportion to the weights.

    In every 4096 samples each part occurs round(4096 * weight) times, in an order that `seed` and the number of the
    block decide; each part goes through its own samples in its own order, epoch after epoch. Nothing is built, any
    step is found at once. Weights need not add up to 1; None for all of them takes the number of tokens.
    Raises `ValueError`: weights that are not positive or too small to be drawn, parts of different shape or options.
    """

    parts: Sequence[tuple[float | None, GPTBatches]]
    global_batch_size: int
    seed: int

    def __post_init__(self) -> None:
        problems = [message for holds, message in self._rules() if not holds]
        if not problems:
            problems = self._never_drawn()
        if problems:
            raise ValueError("BlendedBatches: " + "; ".join(problems))

    def _rules(self) -> Iterator[tuple[bool, str]]:
        """Every rule is one (holds, message) line, so that all failures are reported at once."""
        yield (
            self.global_batch_size > 0,
            f"global_batch_size={self.global_batch_size} must be positive",
        )
        yield len(self.parts) > 0, "0 parts, at least 1 is needed"
        weights = [weight for weight, _ in self.parts]
        numbers = [weight for weight in weights if weight is not None]
        all_or_none = len(numbers) in (0, len(weights))
        yield all_or_none, f"{len(numbers)} of {len(weights)} parts have a weight; give all or none"
        bad = [weight for weight in numbers if not 0 < weight < math.inf]
        yield not bad, f"weights {bad} must be positive; leave the part out"
        options = {(batches.sequence_length, batches.packing) for _, batches in self.parts}
        yield (
            len(options) <= 1,
            f"parts differ in sequence length or options: {sorted(map(str, options))}",
        )

    def _never_drawn(self) -> list[str]:
        """A message for each part whose weight is too small to occur in a block."""
        messages = []
        for i, (weight, count) in enumerate(zip(self._weights, self._counts, strict=True)):
            if not count:
                messages.append(
                    f"weight {weight:g} of part {i} is {weight / sum(self._weights):.2g} of all and would never be "
                    f"drawn, 1/{BLEND_BLOCK} would; give it more, or leave it out"
                )
        return messages

    @cached_property
    def _weights(self) -> list[float]:
        return [
            batches.token_file.num_tokens if weight is None else weight
            for weight, batches in self.parts
        ]

    @cached_property
    def _counts(self) -> tuple[int, ...]:
        """How often each part occurs in a block: rounded, and the largest remainders make up the sum."""
        # the method of largest remainders, ties broken by the part's number
        exact = [BLEND_BLOCK * weight / math.fsum(self._weights) for weight in self._weights]
        counts = [math.floor(count) for count in exact]
        by_remainder = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
        for i in by_remainder[: BLEND_BLOCK - sum(counts)]:
            counts[i] += 1
        return tuple(counts)

    @property
    def sequence_length(self) -> int:
        """Tokens in a row."""
        return self.parts[0][1].sequence_length

    def batch(self, step: int, rank: int = 0, size: int = 1) -> dict[str, Tensor]:
        """The rank's rows of the global batch number `step`: as `GPTBatches.batch`, errors included."""
        if step < 0:
            raise ValueError(f"step={step} must be at least 0")
        return self.rows(step * self.global_batch_size, self.global_batch_size, rank, size)

    def rows(self, first: int, count: int, rank: int = 0, size: int = 1) -> dict[str, Tensor]:
        """The same of the `count` rows from row `first` of the run on, for batches whose sizes change."""
        local_rows = rows_from(first, count, rank, size)
        tokens, labels = empty_rows(len(local_rows), self.sequence_length)
        # the rank's rows may reach over several blocks, each of which has an order of its own
        for block in range(
            local_rows.start // BLEND_BLOCK, (local_rows.stop - 1) // BLEND_BLOCK + 1
        ):
            block_start = block * BLEND_BLOCK
            begin = max(local_rows.start, block_start)
            end = min(local_rows.stop, block_start + BLEND_BLOCK)
            part_of_sample, number_in_part = _block_order(self._counts, self.seed, block)
            part_of_row = part_of_sample[begin - block_start : end - block_start]
            number_of_row = number_in_part[begin - block_start : end - block_start]
            for i in np.unique(part_of_row).tolist():
                rows = np.flatnonzero(part_of_row == i)
                # samples of one part follow each other
                first = block * self._counts[i] + int(number_of_row[rows[0]])
                drawn = range(first, first + len(rows))
                _, batches = self.parts[i]
                batches.fill(drawn, (rows + (begin - local_rows.start)).tolist(), tokens, labels)
        return self.parts[0][1].packing.batch(torch.from_numpy(tokens), torch.from_numpy(labels))

    def sequential(
        self, batch_size: int, rank: int = 0, size: int = 1
    ) -> Iterator[dict[str, Tensor]]:
        """Each part in order, once, one part after the other: as `GPTBatches.sequential`."""
        return chain.from_iterable(
            [batches.sequential(batch_size, rank, size) for _, batches in self.parts]
        )


@lru_cache(maxsize=8)
def _block_order(counts: tuple[int, ...], seed: int, block: int) -> tuple[Ids, Ids]:
    """For each sample of a block: its part, and how many samples of that part precede it. `[4096]` each."""
    # a seed of its own: with that of the parts, an epoch of 4096 samples would have the order of the blend
    blend_seed = int.from_bytes(
        hashlib.blake2b(f"blend,{seed}".encode(), digest_size=8).digest(), "big"
    )
    positions = permute(np.arange(BLEND_BLOCK), BLEND_BLOCK, seed=blend_seed, epoch=block)
    # the first counts[0] positions belong to part 0, the next counts[1] to part 1, ...
    part_of_sample = np.searchsorted(np.cumsum(counts), positions, side="right")
    number_in_part = np.empty(BLEND_BLOCK, np.int64)
    for i, count in enumerate(counts):
        number_in_part[part_of_sample == i] = np.arange(count)
    return part_of_sample, number_in_part


def open_blend(names: str | Sequence[str]) -> list[tuple[float | None, str]]:
    """(weight, prefix) of each text that is named, as `"0.7", "data/code", "0.3", "data/prose"`, or without weights.

    Without, every weight is None. Raises `ValueError` where weights and prefixes do not alternate.
    """
    names = [names] if isinstance(names, str) else list(names)
    numbers = [_number(name) for name in names]
    if names and all(number is None for number in numbers):
        return [(None, name) for name in names]
    is_weight = [number is not None for number in numbers]
    alternate = [i % 2 == 0 for i in range(len(names))]
    if not names or len(names) % 2 or is_weight != alternate:
        raise ValueError(
            f"{' '.join(names) or 'nothing'} names {sum(is_weight)} weights and "
            f"{len(names) - sum(is_weight)} files; write prefixes alone, or weight prefix weight "
            "prefix (a file whose name is a number as ./7)"
        )
    weights = [number for number in numbers[::2] if number is not None]
    if bad := [weight for weight in weights if not 0 < weight < math.inf]:
        raise ValueError(f"weights {bad} must be positive; leave the file out")
    return list(zip(weights, names[1::2], strict=True))


def _number(name: str) -> float | None:
    try:
        return float(name)
    except ValueError:
        return None
