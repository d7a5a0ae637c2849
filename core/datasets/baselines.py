"""Bits per byte: one yardstick for models of any tokenizer, for gzip and for counting tokens."""

import gzip
import math

import numpy as np
import numpy.typing as npt


def bits_per_byte(loss_sum_nats: float, num_bytes: int) -> float:
    """A summed cross entropy in nats, over text of `num_bytes` bytes, as bits per byte.

    Raises `ValueError` if there are no bytes.
    """
    if num_bytes <= 0:
        raise ValueError(f"num_bytes={num_bytes} must be positive; count the bytes of the validation text")
    return loss_sum_nats / math.log(2) / num_bytes


def unigram_bits_per_byte(tokens: npt.ArrayLike, num_bytes: int) -> float:
    """What a model pays that knows how often each token occurs in this very text, and nothing else.

    tokens: integers `[n]`, the validation stream that encodes `num_bytes` bytes. The entropy of its own
    frequencies times n: no model that ignores the context can do better, so a model above this learned
    nothing from context. Raises `ValueError` if there are no tokens or no bytes.
    """
    counts = np.unique(np.asarray(tokens), return_counts=True)[1]
    total = int(counts.sum())
    if total == 0:
        raise ValueError(f"0 tokens for {num_bytes} bytes; give the validation stream")
    return bits_per_byte(-float((counts * np.log(counts / total)).sum()), num_bytes)


def gzip_bits_per_byte(text: bytes) -> float:
    """The size of one `gzip -9` stream of `text`, in bits per byte of text; raises `ValueError` if empty."""
    if not text:
        raise ValueError(
            "gzip_bits_per_byte: 0 bytes of text, at least 1 is needed; give the validation text"
        )
    return 8 * len(gzip.compress(text, compresslevel=9, mtime=0)) / len(text)
