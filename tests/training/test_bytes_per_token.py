"""Bytes per token of a text that changes on the way: by its card, or of pieces all over it."""

from types import SimpleNamespace

import numpy as np
import pytest

from core.datasets import TokenFile
from core.training.run.data import Corpus
from core.training.run.data.corpus import _pieces
from tests.training.tiny import prepared


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


def test_a_file_with_a_card_is_not_sampled(tmp_path, monkeypatch):
    made = prepared(tmp_path)
    file = TokenFile(made.train)
    corpus = SimpleNamespace(_decode=lambda tokens: bytes(3 * len(tokens)))
    assert Corpus._bytes_per_token(corpus, file) == made.train_bytes / made.train_tokens
    monkeypatch.setattr(file, "card", None)
    assert Corpus._bytes_per_token(corpus, file) == pytest.approx(3.0)
