"""What every tokenizer can do, and which one belongs to a file."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from core.datasets.card import card_path, tokenizer_path
from core.datasets.token_file import TokenFile
from core.datasets.tokenizers.byte_tokenizer import CONTENT, ByteTokenizer

# tokens of a file without card that are compared with the size of the vocabulary: all would be slow
_CHECKED_TOKENS = 1 << 22  # at its beginning
# and so many blocks of so many tokens, spread over the file
_BLOCKS = 64
_BLOCK = 4096


class AnyTokenizer(Protocol):
    """Text to token ids and back. `Tokenizer` and `ByteTokenizer` are two.

    vocab_size: ids are below it. end_of_text: the id that closes a document, which no text becomes.
    starts: the ids that open a document, as `<|begin_of_text|>`; of most tokenizers none. identity: equal for two
    tokenizers exactly if they give the same ids for a text.
    """

    @property
    def vocab_size(self) -> int:
        """Number of token ids, the end of text included."""
        ...

    @property
    def end_of_text(self) -> int:
        """The token that closes a document."""
        ...

    @property
    def starts(self) -> tuple[int, ...]:
        """What the tokenizer's file puts before a text, where it does."""
        ...

    @property
    def identity(self) -> str:
        """SHA-256 (hex) of all that decides ids, or a short name."""
        ...

    @property
    def special_texts(self) -> tuple[str, ...]:
        """What special tokens are spelt like."""
        ...

    def encode(self, text: str) -> list[int]:
        """The token ids of one text."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text."""
        ...

    def encode_marked(self, texts: Sequence[str]) -> list[list[int]]:
        """As `encode_batch`, but special tokens that a text spells out are these tokens."""
        ...

    def encode_prompt(self, text: str) -> list[int]:
        """The token ids of what a person writes to a model, as transformers makes them.

        With what the tokenizer's file puts around a text; special tokens that it spells out are these tokens.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`."""
        ...

    def save(self, path: str | Path) -> None:
        """Write it to a file that `load_tokenizer` reads."""
        ...


def load_tokenizer(path: str | Path | None, end_of_text: str | int | None = None) -> AnyTokenizer:
    """The tokenizer in a file: a Hugging Face `tokenizer.json`, or what `ByteTokenizer.save` wrote; None is bytes.

    A folder is one with a `tokenizer.json`.

    `end_of_text` (a token or its id) is for a `tokenizer.json` whose special tokens do not tell.
    Raises `ValueError` if the file is none; `ImportError` with the remedy if it needs the library.
    """
    if path is None:
        return ByteTokenizer()
    path = Path(path)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise ValueError(
            f"{path} is no file; give a tokenizer.json, or a folder with one, as "
            "`save_pretrained` of transformers writes it (nothing is downloaded)"
        )
    if _is_bytes(path):
        return ByteTokenizer()
    # needs an extra
    from core.datasets.tokenizers.trained import Tokenizer

    return Tokenizer.load(path, end_of_text)


def _is_bytes(path: Path) -> bool:
    if path.stat().st_size > 1000:  # a vocabulary
        return False
    try:
        return json.loads(path.read_bytes()) == CONTENT
    except ValueError:
        return False


def tokenizer_of(file: TokenFile) -> AnyTokenizer:
    """The tokenizer stored beside a token file, with its end of text; bytes where none is.

    Raises `ValueError` if it is not the one that made the file; `ImportError` if it needs the library.
    """
    path = tokenizer_path(file.prefix)
    end_of_text = None if file.card is None else file.card.end_of_text
    if path.is_file():
        tokenizer = load_tokenizer(path, end_of_text)
    else:
        tokenizer = ByteTokenizer()
    check_tokenizer(file, tokenizer)
    return tokenizer


def check_tokenizer(file: TokenFile, tokenizer: AnyTokenizer, *, is_fixed: bool = False) -> None:
    """Raise `ValueError` unless `tokenizer` made the file; without a card, unless the ids fit its size.

    Those are the first 2^22 tokens, and 64 blocks spread over the file. is_fixed: it is the model's, no other can be
    given.

    Where documents are closed by an end of text, it must be the tokenizer's.
    """
    # a file of another program: only ids that cannot be of this tokenizer give a mistake away
    if file.card is None:
        first_smallest, first_largest = file.smallest_and_largest([0], _CHECKED_TOKENS)
        last_start = max(0, file.num_tokens - _BLOCK)
        starts = [i * last_start // (_BLOCKS - 1) for i in range(_BLOCKS)]
        smallest, largest = file.smallest_and_largest(starts, _BLOCK)
        smallest = min(first_smallest, smallest)
        largest = max(first_largest, largest)
        if smallest < 0 or largest >= tokenizer.vocab_size:
            raise ValueError(
                f"{file.prefix}.bin holds token {smallest if smallest < 0 else largest}, the tokenizer has "
                f"{tokenizer.vocab_size} tokens, and no {card_path(file.prefix).name} beside it says which one made "
                f"the file; give that one's tokenizer.json: --data.tokenizer, or as {tokenizer_path(file.prefix)}; "
                "where there is none (tiktoken, Megatron's NullTokenizer), docs/concepts/data.md makes one of numbers"
            )
        return
    identity = tokenizer.identity
    expected = file.card.tokenizer
    if identity != expected:
        remedy = "" if is_fixed else f"give {tokenizer_path(file.prefix)}, or "
        raise ValueError(
            f"{file.prefix}.bin was made by tokenizer {expected[:12]} of {file.card.vocab_size} tokens, this is "
            f"{identity[:12]} of {tokenizer.vocab_size}; {remedy}prepare the text again"
        )
    if file.card.end_of_text not in (None, tokenizer.end_of_text):
        raise ValueError(
            f"documents of {file.prefix}.bin end with token {file.card.end_of_text}, the tokenizer's end of text is "
            f"{tokenizer.end_of_text}; load it with end_of_text={file.card.end_of_text}"
        )
