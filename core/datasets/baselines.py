"""Bits per byte: one yardstick for models of any tokenizer, for gzip and for counting tokens."""

import gzip
import math

import numpy as np


def bits_per_byte(loss_sum_nats: float, num_bytes: int) -> float:
    """A summed cross entropy in nats, over text of `num_bytes` bytes, as bits per byte.

    Raises `ValueError` if there are no bytes.
    """
    if num_bytes <= 0:
        raise ValueError(
            f"num_bytes={num_bytes} must be positive; count the bytes of the validation text"
        )
    return loss_sum_nats / math.log(2) / num_bytes


def unigram_bits_per_byte(text: bytes) -> float:
    """What a model pays that knows how often each byte occurs in this very text, and nothing else.

    The entropy of the text's own byte frequencies. Raises `ValueError` if there is no text.
    """
    if not text:
        raise ValueError(
            "unigram_bits_per_byte: 0 bytes of text, at least 1 is needed; give the validation text"
        )
    # entropy: -sum over bytes of log p(byte), p from the text itself
    counts = np.unique(np.frombuffer(text, np.uint8), return_counts=True)[1]
    return bits_per_byte(-float((counts * np.log(counts / len(text))).sum()), len(text))


def gzip_bits_per_byte(text: bytes) -> float:
    """The size of one `gzip -9` stream of `text`, in bits per byte of text; raises `ValueError` if empty."""
    if not text:
        raise ValueError(
            "gzip_bits_per_byte: 0 bytes of text, at least 1 is needed; give the validation text"
        )
    return 8 * len(gzip.compress(text, compresslevel=9, mtime=0)) / len(text)
