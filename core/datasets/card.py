"""The card of a token file: what Megatron's format cannot say, and hashes that a changed file does not have.

`prefix.json` lies beside `prefix.bin` and `prefix.idx`. Files written by others have none, and open without.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

FORMAT = "paracore tokens 1"
# tokens of answers, whose loss counts, are stored as ~token, which is negative
FORMAT_ANSWERS = "paracore tokens 2"
# the same, and documents 2 i and 2 i + 1 are the chosen and the rejected response to one prompt
FORMAT_PREFERENCES = "paracore tokens 3"
MARKED = (FORMAT_ANSWERS, FORMAT_PREFERENCES)
_FAMILY = "paracore tokens"
# finds a card of ours in what does not parse
_FORMAT_KEY = re.compile(rb'\s*\{.*"format"\s*:\s*"' + _FAMILY.encode(), re.DOTALL)
# bytes: a file of more is somebody's text
_LARGEST_CARD = 16 << 20
SAMPLED_BLOCKS = 64
BLOCK_BYTES = 4096
_CHUNK = 1 << 22

# what a value should be, and whether it is
_Kind = tuple[str, Callable[[Any], bool]]


@dataclass(frozen=True, kw_only=True)
class TokenCard:
    """What `prefix.json` says about `prefix.bin` and `prefix.idx`.

    documents, tokens: their numbers. text_bytes: of UTF-8 text that became tokens. skipped: reason -> how many
    pieces of the input did. end_of_text: the token that closes each document, None where none was appended.
    tokenizer: its identity. sources: the inputs as they were named. idx_bytes, bin_bytes: file sizes.
    idx_hash, bin_hash: `sampled_hash` of the files, compared at every opening; bin_sha256, idx_sha256: of all bytes.
    """

    format: str = FORMAT
    dtype: str
    documents: int
    tokens: int
    text_bytes: int
    skipped: Mapping[str, int]
    vocab_size: int
    end_of_text: int | None
    tokenizer: str
    sources: tuple[str, ...]
    idx_bytes: int
    bin_bytes: int
    idx_hash: str
    bin_hash: str
    bin_sha256: str
    idx_sha256: str

    def to_json(self) -> bytes:
        """The card as the bytes of `prefix.json`; the same card gives the same bytes."""
        content = asdict(self) | {"skipped": dict(sorted(self.skipped.items()))}
        return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def card_path(prefix: str | Path) -> Path:
    """Where the card of `prefix` is."""
    return Path(f"{prefix}.json")


def tokenizer_path(prefix: str | Path) -> Path:
    """Where the tokenizer that made the file is stored; there is none if it was bytes."""
    return Path(f"{prefix}.tokenizer.json")


def kept_tokenizer_path(path: Path, identity: str) -> Path:
    """Where an earlier tokenizer of that path went when a text of another one took its place."""
    return path.with_name(f"{path.stem}.{identity[:12]}{path.suffix}")


def recorded_tokenizer(path: str | Path, identity: str) -> Path:
    """The file of a tokenizer that a run had from `path`, also where another text was prepared in its place since."""
    kept = kept_tokenizer_path(Path(path), identity)
    return kept if kept.is_file() else Path(path)


def has_card(prefix: str | Path) -> bool:
    """Whether `prefix.json` is a card, whole or damaged, and not somebody's JSON: the text itself may lie there."""
    content = _content(prefix)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return _FORMAT_KEY.match(content) is not None
    version = value.get("format") if isinstance(value, dict) else None
    return isinstance(version, str) and version.startswith(_FAMILY)


def _content(prefix: str | Path) -> bytes:
    """The bytes of `prefix.json`; empty if there is none, or one too large for a card."""
    try:
        with card_path(prefix).open("rb") as file:
            if os.fstat(file.fileno()).st_size <= _LARGEST_CARD:
                return file.read()
            return b""
    except FileNotFoundError:
        return b""


def read_card(prefix: str | Path) -> TokenCard | None:
    """The card beside the token file, None if there is none or if a foreign file has its name.

    Raises `ValueError` if it is damaged or of a later format, naming the file and every field that is wrong.
    """
    if not has_card(prefix):
        return None
    path = card_path(prefix)
    content = _content(prefix)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} of {len(content)} bytes is damaged: {error}; {remedy(prefix)}"
        ) from None
    version = value.get("format")
    if version not in (FORMAT, *MARKED):
        known = f"{FORMAT!r}, {FORMAT_ANSWERS!r} and {FORMAT_PREFERENCES!r}"
        raise ValueError(f"{path} has format {version!r}, this reads {known}; {remedy(prefix)}")
    # every field, and no other: a card with less would leave something unchecked
    names = {field.name for field in fields(TokenCard)}
    if value.keys() != names:
        raise ValueError(
            f"{path}: {sorted(value.keys() ^ names)} are missing or too many; {remedy(prefix)}"
        )
    problems = []
    for name, (kind, fits) in _FIELD_KINDS.items():
        if not fits(value[name]):
            problems.append(f"{name} is {repr(value[name])[:60]}, not {kind}")
    if version in MARKED and value["dtype"] != "int32":
        problems.append(f"dtype is {value['dtype']!r}, and marks of answers need int32")
    if problems:
        raise ValueError(f"{path} is damaged: {'; '.join(problems)}; {remedy(prefix)}")
    return TokenCard(**value | {"sources": tuple(value["sources"])})


def _is_number(value: Any) -> bool:
    # True would be an int, too
    return type(value) is int and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_NUMBER: _Kind = ("a number from 0 on", _is_number)
_TEXT: _Kind = ("text", _is_text)
# what each field of the JSON must be
_FIELD_KINDS: dict[str, _Kind] = {
    **dict.fromkeys(
        ("documents", "tokens", "text_bytes", "vocab_size", "idx_bytes", "bin_bytes"), _NUMBER
    ),
    **dict.fromkeys(
        ("dtype", "tokenizer", "idx_hash", "bin_hash", "bin_sha256", "idx_sha256"), _TEXT
    ),
    "end_of_text": ("a token or null", lambda value: value is None or _is_number(value)),
    "sources": (
        "a list of text",
        lambda value: isinstance(value, list) and all(map(_is_text, value)),
    ),
    "skipped": (
        "numbers by reason",
        lambda value: isinstance(value, dict) and all(map(_is_number, value.values())),
    ),
}


def remedy(prefix: str | Path) -> str:
    """What to do about a file that is not as its card says."""
    return (
        f"prepare it again, or copy it whole; without {card_path(prefix).name} it opens unchecked"
    )


def sampled_hash(path: str | Path) -> str:
    """SHA-256 (hex) of the size and of 64 blocks of 4 KiB at places that only the size decides, both ends included.

    A file of at most 64 blocks is hashed whole.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(str(size).encode())
        if size <= SAMPLED_BLOCKS * BLOCK_BYTES:
            digest.update(file.read())
            return digest.hexdigest()
        # evenly spread, the first and the last block included: a cut or grown file differs by its size already
        for i in range(SAMPLED_BLOCKS):
            offset = i * (size - BLOCK_BYTES) // (SAMPLED_BLOCKS - 1)
            digest.update(os.pread(file.fileno(), BLOCK_BYTES, offset))
    return digest.hexdigest()


def full_hash(path: str | Path) -> str:
    """SHA-256 (hex) of every byte."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
