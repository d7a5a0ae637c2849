"""A text that changes on the way has its bytes per token estimated from pieces all over it."""

import numpy as np

from core.training.run.data.corpus import _pieces


class Source:
    def __init__(self, count):
        self.num_tokens = count

    def tokens(self, start, stop):
        assert 0 <= start < stop <= self.num_tokens
        # the first half are tokens of 0, the second of 1
        return (np.arange(start, stop) >= self.num_tokens // 2).astype(np.int32)


def test_pieces_lie_evenly_over_a_text():
    for count in (1, 5, 1 << 18, (1 << 18) + 1, 10_000_000):
        pieces = _pieces(Source(count))
        assert len(pieces) == min(count, 1 << 18)
        assert abs(pieces.mean() - 0.5) <= 0.5 / len(pieces) + 1e-9, count
