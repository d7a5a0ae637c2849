"""The tokens that a run reads: which files, how they are split, which tokenizer; every rank opens the same ones."""

from core.training.run.data.corpus import BatchSource, Corpus
from core.training.run.data.opening import note_on_tokenizer, open_corpus

__all__ = ["BatchSource", "Corpus", "note_on_tokenizer", "open_corpus"]
