"""Which keys the rows of a rank meet, and in which pieces they are computed. Pure: no process, no kernel.

Rows are numbers in the whole sequence; a query sees the keys from the begin of its document (or of its window) up to
itself.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]

# queries of a piece with a mask: the mask is at most [STRIP, keys of one rank]
STRIP = 256


class AttentionBlock(NamedTuple):
    """The rows `queries` of this rank with the rows `keys` of rank `source`, numbered within each rank."""

    source: int
    queries: range
    keys: range
    causal: bool


class Piece(NamedTuple):
    """A part of a block that is one kernel call. causal: as in `AttentionBlock`; masked: by document and row."""

    queries: slice
    keys: slice
    causal: bool
    masked: bool


@lru_cache(maxsize=64)
def blocks(size: int, rank: int, count: int) -> tuple[AttentionBlock, ...]:
    """The blocks of a rank that holds `count` rows of a zigzag over `size` ranks, in the order of a ring.

    Of an earlier rank all queries see its low chunk and none its high one; of a later rank only the high queries see
    keys, and these all of them. So every block but the own one is one dense call, of equal work.
    """
    whole = range(count)
    half = count // 2
    result = [AttentionBlock(rank, whole, whole, True)]
    for distance in range(1, size):
        source = (rank - distance) % size
        if source < rank:
            queries, keys = (whole, range(half))
        else:
            queries, keys = (range(half, count), whole)
        result.append(AttentionBlock(source, queries, keys, False))
    return tuple(result)


def pieces(
    block: AttentionBlock, query_rows: Rows, key_rows: Rows, first: Rows, last: Rows
) -> Iterator[Piece]:
    """The kernel calls of a block where queries begin to see keys somewhere; keys that none sees are left out.

    query_rows, key_rows: of this rank and of the block's source. first, last: of each query the lowest and the
    highest begin over the microbatch's sequences. All ascending.
    """
    queries = block.queries
    keys = block.keys
    rows_of_keys = key_rows[keys.start : keys.stop]
    for start in range(queries.start, queries.stop, STRIP):
        stop = min(start + STRIP, queries.stop)
        low = int(np.searchsorted(rows_of_keys, first[start]))
        high = int(np.searchsorted(rows_of_keys, query_rows[stop - 1], side="right"))
        if low < high:
            seen_by_all = (
                rows_of_keys[low] >= last[stop - 1] and rows_of_keys[high - 1] <= query_rows[start]
            )
            yield Piece(
                slice(start, stop),
                slice(keys.start + low, keys.start + high),
                False,
                not seen_by_all,
            )


@lru_cache(maxsize=256)
def whole(block: AttentionBlock) -> tuple[Piece, ...]:
    """A block as one kernel call: no document begins among its keys."""
    queries = block.queries
    keys = block.keys
    return (
        Piece(
            slice(queries.start, queries.stop), slice(keys.start, keys.stop), block.causal, False
        ),
    )
