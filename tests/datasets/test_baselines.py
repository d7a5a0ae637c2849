"""The yardsticks, on texts whose answer is known."""

import math
import random

import pytest

from core.datasets.baselines import bits_per_byte, gzip_bits_per_byte, unigram_bits_per_byte


def test_one_bit_for_every_byte():
    assert bits_per_byte(10 * math.log(2), 10) == pytest.approx(1, abs=1e-15)


def test_unigram_of_equally_frequent_bytes_is_eight_bits():
    assert unigram_bits_per_byte(bytes(range(256)) * 3) == pytest.approx(8, abs=1e-12)


def test_unigram_of_two_bytes_by_hand():
    # 3 of one, 1 of the other: 3 log2(4/3) + log2(4) bits over 8 bytes of text
    assert unigram_bits_per_byte(b"aaba") == pytest.approx((3 * math.log2(4 / 3) + 2) / 4, abs=1e-12)


def test_unigram_of_one_byte_costs_nothing():
    assert unigram_bits_per_byte(b"x" * 9) == 0


def test_gzip_of_noise_and_of_repetition():
    noise = random.Random(0).randbytes(20_000)
    assert 8 < gzip_bits_per_byte(noise) < 8.02
    assert gzip_bits_per_byte(noise[:1000] * 20) < 0.6
    assert gzip_bits_per_byte(b"a") == 8 * 21  # header, one literal, trailer


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bits_per_byte(1.0, 0), "num_bytes=0 must be positive"),
        (lambda: unigram_bits_per_byte(b""), "0 bytes of text"),
        (lambda: gzip_bits_per_byte(b""), "0 bytes of text"),
    ],
)
def test_nothing_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
