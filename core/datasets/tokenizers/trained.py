"""Tokenizers of the `tokenizers` library: one that is trained here, or any `tokenizer.json`."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from core.datasets.tokenizers.byte_tokenizer import refuse_surrogates
from core.datasets.tokenizers.eos_token import eos_token_beside

try:
    import tokenizers as hf
except ImportError as error:
    raise ImportError(
        "the tokenizer needs the package tokenizers: pip install tokenizers"
    ) from error

END_OF_TEXT = "<|endoftext|>"
LIBRARY_VERSION: str = hf.__version__
_MIN_VOCABULARY = 257  # the 256 bytes and the end of text
# what the families of models call it; the first that is a special token of the file is taken
_ENDS_OF_TEXT = (
    *(END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<EOS>", "<|im_end|>"),
    *("<\uff5cend\u2581of\u2581sentence\uff5c>", "<|eod|>", "<eod>", "[SEP]", "<sep>"),
)
# the rest is for decoding and for pairs
_DECIDE_IDS = ("added_tokens", "normalizer", "pre_tokenizer", "model")


class Tokenizer:
    """Text to token ids and back around one `tokenizers.Tokenizer`; byte for byte if that is byte-level.

    Text never becomes a special token, even if it spells it out: only `end_of_text` ends a document. Truncation and
    padding that the file may ask for are off. `end_of_text` names the token (or its id) that ends a document; by
    default it is found among the special tokens: `<|endoftext|>`, `</s>`, `<eos>`, `[SEP]` and their like, else
    it is `eos_token`, what a `tokenizer_config.json` beside the file says.
    Raises `ValueError` if it is not in the vocabulary.
    """

    def __init__(
        self,
        inner: hf.Tokenizer,
        end_of_text: str | int | None = None,
        eos_token: str | None = None,
    ) -> None:
        # "as text": this setting is not stored in the file
        inner.encode_special_tokens = True
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self.end_of_text: int = _find_end_of_text(inner, end_of_text, eos_token)

    @classmethod
    def load(cls, path: str | Path, end_of_text: str | int | None = None) -> "Tokenizer":
        """The tokenizer in a `tokenizer.json`; raises `ValueError` if the file is none."""
        text = Path(path).read_text(encoding="utf-8", errors="replace")
        eos_token = eos_token_beside(Path(path))
        return cls.from_text(text, end_of_text, name=str(path), eos_token=eos_token)

    @classmethod
    def from_text(
        cls,
        text: str,
        end_of_text: str | int | None = None,
        name: str = "the text",
        eos_token: str | None = None,
    ) -> "Tokenizer":
        """The tokenizer in the content of a `tokenizer.json`, which errors call `name`; raises `ValueError`."""
        try:
            inner = hf.Tokenizer.from_str(text)
        except Exception as error:
            # the library raises bare Exception
            raise ValueError(
                f"{name} ({len(text)} characters) is no tokenizer.json: {error}"
            ) from error
        try:
            return cls(inner, end_of_text, eos_token)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    def to_text(self) -> str:
        """The content of a `tokenizer.json`."""
        return self._inner.to_str(pretty=True)

    def save(self, path: str | Path) -> None:
        """Write `tokenizer.json`, which the tokenizers and transformers libraries read too."""
        Path(path).write_text(self.to_text(), encoding="utf-8")

    def __reduce__(self) -> tuple[Any, ...]:
        return Tokenizer.from_text, (self.to_text(), self.end_of_text)

    @cached_property
    def vocab_size(self) -> int:
        """Number of token ids, the end of text included: one more than the largest, if the vocabulary has holes."""
        return max(self._inner.get_vocab().values()) + 1

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """What the file's post-processor puts before a text: `<|begin_of_text|>` of Llama 3."""
        text = "a"
        alone = self._inner.encode(text, add_special_tokens=False).ids
        processed = self._inner.encode(text, add_special_tokens=True).ids
        for first in range(len(processed) - len(alone) + 1):
            if processed[first : first + len(alone)] == alone:
                return tuple(processed[:first])
        return ()

    @cached_property
    def identity(self) -> str:
        """SHA-256 (hex) of what decides ids, the same whatever version of the library wrote the file."""
        content = json.loads(self._inner.to_str())
        deciding = {name: _essence(content.get(name)) for name in _DECIDE_IDS}
        return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The token ids of `text`; raises `ValueError` if it holds lone surrogates, which are no UTF-8."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text. Uses several threads unless TOKENIZERS_PARALLELISM=false."""
        # the fast variant leaves out offsets, which nobody reads
        try:
            encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError as error:
            for i, text in enumerate(texts):
                refuse_surrogates(text, i)
            raise error  # not text at all
        return [encoding.ids for encoding in encodings]

    def encode_marked(self, texts: Sequence[str]) -> list[list[int]]:
        """As `encode_batch`, but special tokens that a text spells out are these tokens: a rendered chat."""
        self._inner.encode_special_tokens = False
        try:
            return self.encode_batch(texts)
        finally:
            self._inner.encode_special_tokens = True

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """What special tokens are spelt like."""
        added_tokens = self._inner.get_added_tokens_decoder().values()
        return tuple(str(token.content) for token in added_tokens if token.special)

    def encode_prompt(self, text: str) -> list[int]:
        """The token ids of what a person writes to a model, as transformers makes them.

        With what the file's post-processor puts around a text; special tokens that it spells out are these tokens.
        """
        refuse_surrogates(text, 0)
        self._inner.encode_special_tokens = False
        try:
            return self._inner.encode(text, add_special_tokens=True).ids
        finally:
            self._inner.encode_special_tokens = True

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; a token that cuts a character in two decodes to U+FFFD when it stands alone."""
        return self._inner.decode(list(ids), skip_special_tokens=False)


def _find_end_of_text(
    inner: hf.Tokenizer, requested: str | int | None, eos_token: str | None
) -> int:
    """The id of the token that ends a document: the requested one, the first special token of a known name, or
    `eos_token`."""
    if isinstance(requested, int):
        if inner.id_to_token(requested) is None:
            raise ValueError(
                f"end_of_text={requested} is no id of the tokenizer's {inner.get_vocab_size()} tokens"
            )
        return requested
    if requested is not None:
        token_id = inner.token_to_id(requested)
        if token_id is None:
            raise ValueError(
                f"end_of_text={requested!r} is not among the tokenizer's {inner.get_vocab_size()} tokens"
            )
        return token_id
    added_tokens = inner.get_added_tokens_decoder().items()
    special = {str(token.content): token_id for token_id, token in added_tokens if token.special}
    for name in _ENDS_OF_TEXT:
        if name in special:
            return special[name]
    if eos_token is not None and (token_id := inner.token_to_id(eos_token)) is not None:
        return token_id
    raise ValueError(
        f"no {END_OF_TEXT}, </s> or the like among the tokenizer's {inner.get_vocab_size()} tokens, special are "
        f"{', '.join(sorted(special)[:8]) or 'none'}; say which token ends a document: end_of_text (--end-of-text)"
    )


def _essence(content: Any) -> Any:
    """Without settings that are off or unset, which later versions of the library add."""
    if isinstance(content, dict):
        return {
            key: _essence(value)
            for key, value in content.items()
            if value is not None and value is not False
        }
    if isinstance(content, list):
        return [_essence(value) for value in content]
    return content


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn byte pair merges from `texts`; `<|endoftext|>` is token 0, the 256 bytes follow.

    The same texts give the same tokenizer. Too little text gives fewer tokens than `vocab_size`.
    Raises `ValueError` if `vocab_size` is too small to hold every byte.
    """
    if vocab_size < _MIN_VOCABULARY:
        raise ValueError(
            f"vocab_size={vocab_size} cannot hold every byte; use {_MIN_VOCABULARY} or more"
        )
    inner = hf.Tokenizer(hf.models.BPE())
    # byte-level: every text can be written, and comes back byte for byte
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
