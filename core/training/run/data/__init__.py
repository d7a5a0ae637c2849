"""The tokens that a run reads: which files, how they are split, which tokenizer; every rank opens the same ones."""

from core.training.run.data.corpus import BatchSource, Corpus
from core.training.run.data.opening import open_corpus

__all__ = ["BatchSource", "Corpus", "open_corpus"]
