"""`MegatronTokenizer.from_pretrained`: a tokenizer.json of Hugging Face's, bytes, or numbers."""

from collections.abc import Sequence
from typing import Any

from core.datasets.tokenizers.any_tokenizer import AnyTokenizer, load_tokenizer


class NullTokenizer:
    """Text is numbers with spaces between; the last number is the end of text."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1
        self.pad = -1

    def tokenize(self, text: str) -> list[int]:
        """ "3 1 2" -> [3, 1, 2]."""
        return [int(word) for word in text.split()]

    def detokenize(self, ids: Sequence[int]) -> str:
        """[3, 1, 2] -> "3 1 2"."""
        return " ".join(map(str, ids))


class MegatronTokenizer:
    """`tokenize`, `detokenize`, `vocab_size`, `eod` of one of our tokenizers."""

    def __init__(self, tokenizer: AnyTokenizer) -> None:
        self.inner = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.eod = tokenizer.end_of_text
        self.pad = -1

    @staticmethod
    def from_pretrained(
        tokenizer_path: str | None = None, metadata_path: dict[str, Any] | None = None, **more: Any
    ) -> "MegatronTokenizer | NullTokenizer":
        """library "null-text" (with vocab_size), "byte-level", or "huggingface" with a folder or a tokenizer.json.

        Raises ValueError: another library; a null tokenizer without vocab_size.
        """
        library = (metadata_path or {}).get("library", "huggingface")
        if library == "null-text":
            if "vocab_size" not in more:
                raise ValueError('library "null-text" needs vocab_size, and 0 were given')
            return NullTokenizer(int(more["vocab_size"]))
        if library == "byte-level":
            return MegatronTokenizer(load_tokenizer(None))
        if library != "huggingface" or tokenizer_path is None:
            raise ValueError(
                f"library {library!r} with tokenizer_path={tokenizer_path!r} is not here; use 'huggingface' with a "
                "tokenizer.json, 'byte-level' or 'null-text'"
            )
        return MegatronTokenizer(load_tokenizer(tokenizer_path))

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text."""
        return self.inner.encode(text)

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        return self.inner.decode(ids)
