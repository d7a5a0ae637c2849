"""What is said of the numbers that context ranks have of one backward."""

from collections.abc import Iterator

import torch
from torch import Tensor

from core.context_parallel.rows.batches import REMEDY as BATCH_REMEDY
from core.context_parallel.rows.divisors import Divisors
from core.context_parallel.rows.factors import (
    NUM_FACTORS,
    NUM_SCALARS,
    NUM_TABLES,
    SCALARS_REMEDY,
    TABLES_REMEDY,
    told_of_factors,
    told_of_scalars,
    told_of_tables,
)
from core.context_parallel.rows.means import told_of_means, told_of_shares
from core.context_parallel.rows.sequences import NUM_SEQUENCES, SEQUENCES_REMEDY, told_of_sequences
from core.context_parallel.rows.synced import NUM_SYNCED, SYNCED_REMEDY, told_of_weights
from core.context_parallel.rows.totals import (
    COUNT_REMEDY,
    told_of_counts,
    told_of_shared_counts,
    told_of_sums,
    told_of_totals,
)
from core.parallel_state.collectives import Group

# norm and mean of the sums' gradients, what rows weigh, tensors that divide sums, sums of the batch, numbers, tensors
# of outputs, of the batch, tables for the batch, its sequences, a weight; then what rows weigh, as many numbers as
# there are sequences
_SIZES = [2, 1, 5, 2, NUM_SCALARS, NUM_FACTORS, NUM_FACTORS, NUM_TABLES, NUM_SEQUENCES, NUM_SYNCED]


def verdicts(
    numbers: Tensor,
    group: Group,
    divisors: Divisors,
    dtype: torch.dtype,
    judges_totals: bool,
    averaged_rows: int,
) -> Iterator[tuple[str, str]]:
    """(message, its remedy; "": that of sums) of each thing that is wrong. numbers: [ranks, ...] of `_SIZES`.

    averaged_rows: of each rank, where gradients are averaged over the ranks; else 0.
    """
    of_means = numbers[:, sum(_SIZES) :]
    parts = numbers[:, : sum(_SIZES)].split(_SIZES, dim=1)
    sums, weights, counts, of_batch, scalars, of_outputs, of_tokens, tables, sequences, synced = (
        parts
    )
    tolerance = 1e-6 if dtype in (torch.float32, torch.float64) else 1e-2
    if judges_totals:
        # they are sums in single precision
        of_weights = (told_of_totals(weights[:, 0], group.size, max(tolerance, 1e-4)), "")
    else:
        of_weights = (told_of_counts(weights[:, 0], group.size), COUNT_REMEDY)
    of_shares = ""
    if averaged_rows:
        of_shares = told_of_shares(of_means, group.size, averaged_rows, max(tolerance, 1e-5))
    found = [
        (told_of_weights(synced), SYNCED_REMEDY),
        (told_of_sequences(sequences), SEQUENCES_REMEDY),
        told_of_factors(of_outputs),
        told_of_factors(of_tokens),
        (divisors.told_of(of_batch), BATCH_REMEDY),
        (told_of_tables(tables), TABLES_REMEDY),
        of_weights,
        (told_of_sums(sums, group.ranks, tolerance), ""),
        (told_of_shared_counts(counts, group.size, tolerance) if judges_totals else "", ""),
        (told_of_means(of_means, group.ranks, max(tolerance, 1e-5)), ""),
        (of_shares, ""),
        (told_of_scalars(scalars), SCALARS_REMEDY),
    ]
    yield from ((message, remedy) for message, remedy in found if message)
