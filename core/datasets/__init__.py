"""From text files to batches: corpus, tokenizer, token files, in an order that is a function of the step.

Every public name is importable from here and loaded on first use, so that reading token files needs
neither torch nor tokenizers.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "corpus.standard_library": ("SourceFiles", "read_texts", "split_by_hash", "standard_library"),
    "tokenizers.trained": ("END_OF_TEXT", "Tokenizer", "train_tokenizer"),
    "tokenizers.byte_tokenizer": ("ByteTokenizer",),
    "tokenizers.any_tokenizer": ("AnyTokenizer", "check_tokenizer", "load_tokenizer", "tokenizer_of"),
    "card": ("TokenCard",),
    "token_file": ("TokenFile",),
    "token_file_writer": ("TokenFileWriter",),
    "splits": ("TokenRange", "TokenSource", "split_documents"),
    "order": ("draws", "permute", "sample_ids"),
    "packing": ("IGNORED_LABEL", "Packing"),
    "batches": ("GPTBatches",),
    "blend": ("BlendedBatches", "open_blend"),
    "corpus.build": ("CorpusFiles", "TextFiles", "prepare_files"),
    "corpus.default": ("PreparedCorpus", "prepare_default_corpus"),
    "baselines": ("bits_per_byte", "gzip_bits_per_byte", "unigram_bits_per_byte"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {sorted(_HOME)}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_HOME)
