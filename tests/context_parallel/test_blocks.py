"""Which keys each row meets: every pair once, and no rank works more than another. Pure."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.context_parallel.blocks import blocks, pieces
from core.parallel_state.context import ContextRows, wrong_length, zigzag


@pytest.mark.parametrize("size", range(1, 17))
def test_every_pair_is_computed_once_and_all_ranks_work_the_same(size):
    s = 4 * size
    work, seen = set(), set()
    for rank in range(size):
        rows = [[row for run in zigzag(s, size, source) for row in run] for source in range(size)]
        area = 0
        for block in blocks(size, rank, s // size):
            pairs = {
                (rows[rank][q], rows[block.source][k])
                for q, k in itertools.product(block.queries, block.keys)
                if not block.causal or k <= q
            }
            assert not seen & pairs
            seen |= pairs
            area += len(pairs)
        work.add(area)
    assert seen == {(q, k) for q in range(s) for k in range(q + 1)}
    assert len(work) == 1


@pytest.mark.parametrize("size", range(1, 17))
def test_rows_of_all_ranks_are_the_sequence_whatever_exchanges_heads(size):
    for ulysses in (u for u in range(1, size + 1) if size % u == 0):
        s = 4 * size
        held = [ContextRows(size, rank, ulysses).rows(s).tolist() for rank in range(size)]
        assert sorted(itertools.chain(*held)) == list(range(s))
        assert all(rows == sorted(rows) and len(rows) == s // size for rows in held)
        for first in range(0, size, ulysses):  # those who exchange heads hold the rows of one rank of the ring
            together = list(itertools.chain(*held[first : first + ulysses]))
            assert together == [row for run in zigzag(s, size // ulysses, first // ulysses) for row in run], (
                "in rank order"
            )


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_pieces_hold_every_visible_key_and_no_piece_is_without_one(data):
    size = data.draw(st.integers(1, 4))
    chunk = data.draw(st.sampled_from([1, 2, 200, 300]))
    s = 2 * size * chunk
    rank = data.draw(st.integers(0, size - 1))
    rows = [[row for run in zigzag(s, size, source) for row in run] for source in range(size)]
    cuts = sorted(data.draw(st.sets(st.integers(1, s - 1), max_size=6))) if s > 1 else []
    begin = [max([c for c in cuts if c <= row], default=0) for row in rows[rank]]
    for block in blocks(size, rank, len(rows[rank])):
        covered = {}
        for piece in pieces(block, rows[rank], rows[block.source], begin, begin):
            keys = rows[block.source][piece.keys]
            for q in range(piece.queries.start, piece.queries.stop):
                visible = {k for k in keys if begin[q] <= k <= rows[rank][q]}
                assert piece.masked or len(visible) == len(keys)
                covered[q] = visible
            assert any(covered[q] for q in range(piece.queries.start, piece.queries.stop))
        for q in block.queries:
            wanted = {rows[block.source][k] for k in block.keys}
            assert covered.get(q, set()) == {k for k in wanted if begin[q] <= k <= rows[rank][q]}


def test_lengths_that_do_not_divide_name_the_nearest():
    assert wrong_length(16, 4) is None and wrong_length(15, 1) is None
    assert "20 is not a multiple of 2 x context(4) = 8; use 16 or 24" in wrong_length(20, 4)
    assert "use 8" in wrong_length(3, 4)
    with pytest.raises(ValueError, match="use 16 or 24"):
        ContextRows(4, 0).rows(20)
