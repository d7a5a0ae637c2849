"""A byte-level BPE tokenizer: any text goes in, the same bytes come out."""

from collections.abc import Iterable, Sequence
from pathlib import Path

try:
    import tokenizers as hf
except ImportError as error:
    raise ImportError("the tokenizer needs an extra: pip install 'paracore[train]'") from error

END_OF_TEXT = "<|endoftext|>"
LIBRARY_VERSION: str = hf.__version__
_SMALLEST_VOCABULARY = 257  # the 256 bytes and the end of text


class Tokenizer:
    """Text to token ids and back, byte for byte, around one `tokenizers.Tokenizer`.

    Text never becomes the end-of-text token, even if it spells it out: only `end_of_text` ends a document.
    Raises `ValueError` if the vocabulary lacks `<|endoftext|>`.
    """

    def __init__(self, inner: hf.Tokenizer) -> None:
        end_of_text = inner.token_to_id(END_OF_TEXT)
        if end_of_text is None:
            raise ValueError(
                f"no {END_OF_TEXT} among the tokenizer's {inner.get_vocab_size()} tokens; "
                "train one with train_tokenizer or add the special token"
            )
        inner.encode_special_tokens = True  # "as text": this setting is not stored in the file
        self._inner = inner
        self.end_of_text: int = end_of_text

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """The tokenizer in a `tokenizer.json`; raises `ValueError` if the file is none."""
        text = Path(path).read_text(encoding="utf-8")
        try:
            inner = hf.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path} ({len(text)} characters) is no tokenizer.json: {error}") from error
        return cls(inner)

    def save(self, path: str | Path) -> None:
        """Write `tokenizer.json`, which the tokenizers and transformers libraries read too."""
        Path(path).write_text(self._inner.to_str(pretty=True), encoding="utf-8")

    @property
    def vocab_size(self) -> int:
        """Number of token ids, the end of text included."""
        return self._inner.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """The token ids of `text`; raises `ValueError` if it holds lone surrogates, which are no UTF-8."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text. Uses several threads unless TOKENIZERS_PARALLELISM=false."""
        try:
            encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError as error:
            for i, text in enumerate(texts):
                _refuse_surrogates(text, i)
            raise error  # not text at all
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; a token that cuts a character in two decodes to U+FFFD when it stands alone."""
        return self._inner.decode(list(ids), skip_special_tokens=False)


def _refuse_surrogates(text: str, number: int) -> None:
    if not isinstance(text, str):
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text {number} of length {len(text)} holds a lone surrogate at {error.start}; "
            "decode the file with errors='replace'"
        ) from error


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn byte pair merges from `texts`; `<|endoftext|>` is token 0, the 256 bytes follow.

    The same texts give the same tokenizer. Too little text gives fewer tokens than `vocab_size`.
    Raises `ValueError` if `vocab_size` is too small to hold every byte.
    """
    if vocab_size < _SMALLEST_VOCABULARY:
        raise ValueError(f"vocab_size={vocab_size} cannot hold every byte; use {_SMALLEST_VOCABULARY} or more")
    inner = hf.Tokenizer(hf.models.BPE())
    inner.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = hf.decoders.ByteLevel()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=hf.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return Tokenizer(inner)
