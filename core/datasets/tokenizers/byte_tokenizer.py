"""The tokenizer that needs no library and no training: a token is a byte."""

import json
from collections.abc import Sequence
from pathlib import Path

END_OF_TEXT_ID = 256
CONTENT = {"paracore": "bytes"}  # of the file that `save` writes


class ByteTokenizer:
    """Token ids 0 .. 255 are the bytes of the text in UTF-8, 256 is the end of text."""

    end_of_text: int = END_OF_TEXT_ID
    vocab_size: int = END_OF_TEXT_ID + 1
    starts: tuple[int, ...] = ()
    identity: str = "bytes"

    def encode(self, text: str) -> list[int]:
        """The bytes of `text`; raises `ValueError` if it holds lone surrogates, which are no UTF-8."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The bytes of each text."""
        for number, text in enumerate(texts):
            refuse_surrogates(text, number)
        return [list(text.encode()) for text in texts]

    # no text spells out the end of text
    special_texts: tuple[str, ...] = ()

    def encode_marked(self, texts: Sequence[str]) -> list[list[int]]:
        """As `encode_batch`."""
        return self.encode_batch(texts)

    def encode_prompt(self, text: str) -> list[int]:
        """As `encode`: no text spells out the end of text, and nothing stands around one."""
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD, the end of text becomes nothing.

        Raises `ValueError` on an id that does not exist.
        """
        if len(ids) and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise ValueError(
                f"ids {min(ids)} to {max(ids)}, bytes and the end of text are 0 to {END_OF_TEXT_ID}"
            )
        return bytes(i for i in ids if i != END_OF_TEXT_ID).decode(errors="replace")

    def save(self, path: str | Path) -> None:
        """Write a small JSON file that `load_tokenizer` knows."""
        Path(path).write_text(json.dumps(CONTENT) + "\n", encoding="utf-8")


def refuse_surrogates(text: str, number: int) -> None:
    """Raise `ValueError` where text number `number` cannot be UTF-8; pass what is no text at all."""
    if not isinstance(text, str):
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text {number} of length {len(text)} holds a lone surrogate at {error.start}; "
            "decode the file with errors='replace'"
        ) from error
