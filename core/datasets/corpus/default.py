"""One call from nothing to token files: `prepare_default_corpus(directory)`."""

import hashlib
import json
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.datasets.baselines import gzip_bits_per_byte, unigram_bits_per_byte
from core.datasets.card import kept_tokenizer_path, tokenizer_path
from core.datasets.corpus.standard_library import (
    SourceFiles,
    read_texts,
    split_by_hash,
    standard_library,
)
from core.datasets.token_file import TokenFile
from core.datasets.token_file_writer import TokenFileWriter

if TYPE_CHECKING:
    # needs an extra: imported where it is used
    from core.datasets.tokenizers.trained import (
        Tokenizer,
    )

_FORMAT = 3
# bounds memory: the library keeps offsets for every token of a batch
_TEXTS_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True)
class _Figures:
    """What `corpus.json` says: nothing about where it lies, so that the directory may move."""

    vocab_size: int
    train_documents: int
    valid_documents: int
    train_tokens: int
    valid_tokens: int
    train_bytes: int
    valid_bytes: int
    skipped_files: int
    gzip_bits_per_byte: float
    unigram_bits_per_byte: float


@dataclass(frozen=True, kw_only=True)
class PreparedCorpus(_Figures):
    """Where the tokenizer and the token files are, and what is in them.

    `train` and `valid` are prefixes for `TokenFile`; bytes are bytes of text, without the end-of-text token
    that closes each document. The two bits per byte are those of the validation text.
    """

    tokenizer: Path
    train: Path
    valid: Path


def prepare_default_corpus(
    directory: str | Path,
    *,
    vocab_size: int = 4096,
    valid_fraction: float = 0.05,
    sources: SourceFiles | None = None,
) -> PreparedCorpus:
    """Write `tokenizer.json`, `train.bin/.idx`, `valid.bin/.idx` and, last, `corpus.json` to `directory`.

    The tokenizer learns from training files only. `sources` defaults to the standard library. A second call
    with the same inputs reuses what is there. Call it on one process, the others wait.
    Raises `ValueError` if either side of the split is empty or `vocab_size` too small.
    """
    directory = Path(directory)
    if sources is None:
        sources = standard_library()
    sides = split_by_hash(sources.names, valid_fraction)
    if not all(sides):
        raise ValueError(
            f"valid_fraction={valid_fraction} leaves {len(sides[0])} training and {len(sides[1])} "
            "validation files; give more files or another fraction"
        )
    # what an earlier call with the same inputs wrote is reused
    key = _corpus_key(sources, vocab_size, valid_fraction)
    figures = _reusable(directory, key) or _build(directory, sources, sides, vocab_size, key)
    return PreparedCorpus(
        **asdict(figures),
        tokenizer=directory / "tokenizer.json",
        train=directory / "train",
        valid=directory / "valid",
    )


def _corpus_key(sources: SourceFiles, vocab_size: int, valid_fraction: float) -> str:
    """Everything the result depends on, as one hash."""
    from core.datasets.tokenizers.trained import LIBRARY_VERSION

    inputs = [
        _FORMAT,
        sys.version,
        LIBRARY_VERSION,
        vocab_size,
        valid_fraction,
        sources.fingerprint(),
    ]
    return _sha256(json.dumps(inputs).encode())


def _reusable(directory: Path, key: str) -> _Figures | None:
    """The figures of an earlier call with the same inputs, if all that it wrote is still whole."""
    try:
        written = json.loads((directory / "corpus.json").read_text(encoding="utf-8"))
        figures = _Figures(**written["figures"])
        if written["key"] != key:
            return None
        if written["tokenizer_sha256"] != _sha256((directory / "tokenizer.json").read_bytes()):
            return None
        num_tokens = [TokenFile(directory / side).num_tokens for side in ("train", "valid")]
    except (OSError, ValueError, TypeError, KeyError):
        # missing, damaged or foreign: build it anew
        return None
    if num_tokens == [figures.train_tokens, figures.valid_tokens]:
        return figures
    return None


def _build(
    directory: Path,
    sources: SourceFiles,
    sides: tuple[list[str], list[str]],
    vocab_size: int,
    key: str,
) -> _Figures:
    from core.datasets.tokenizers.trained import train_tokenizer

    (train, train_skipped), (valid, valid_skipped) = (
        read_texts(sources.root, names) for names in sides
    )
    directory.mkdir(parents=True, exist_ok=True)
    # from here on the directory is incomplete
    (directory / "corpus.json").unlink(missing_ok=True)
    # from the training side only: the validation text must be new to the tokenizer, too
    tokenizer = train_tokenizer(train, vocab_size)
    _keep_earlier_tokenizer(directory, tokenizer)
    tokenizer.save(directory / "tokenizer.json")
    _write(directory / "train", train, tokenizer, [str(sources.root)])
    _write(directory / "valid", valid, tokenizer, [str(sources.root)])
    train_file = TokenFile(directory / "train")
    valid_file = TokenFile(directory / "valid")
    # yardsticks for a model's validation loss, in bits per byte of the same text
    valid_text = "".join(valid).encode()
    figures = _Figures(
        vocab_size=tokenizer.vocab_size,
        train_documents=train_file.num_documents,
        valid_documents=valid_file.num_documents,
        train_tokens=train_file.num_tokens,
        valid_tokens=valid_file.num_tokens,
        train_bytes=sum(len(text.encode()) for text in train),
        valid_bytes=len(valid_text),
        skipped_files=train_skipped + valid_skipped,
        gzip_bits_per_byte=gzip_bits_per_byte(valid_text),
        unigram_bits_per_byte=unigram_bits_per_byte(valid_text),
    )
    _write_commit_file(directory, key, figures)
    return figures


def _keep_earlier_tokenizer(directory: Path, tokenizer: "Tokenizer") -> None:
    """Runs that were trained on an earlier corpus here need it: it is moved aside, and told, if it is another."""
    from core.datasets.tokenizers.trained import Tokenizer

    path = directory / "tokenizer.json"
    try:
        identity = Tokenizer.load(path).identity
    except (OSError, ValueError):  # none, or damaged
        return
    if identity == tokenizer.identity:
        return
    kept = kept_tokenizer_path(path, identity)
    path.replace(kept)
    # the same one lies beside each side of the split
    for side in ("train", "valid"):
        tokenizer_path(directory / side).unlink(missing_ok=True)
    warnings.warn(
        f"{directory} held a corpus of other inputs and another tokenizer, which is kept as {kept}, where runs that "
        "were trained on it find it; give another data.directory to keep the text, too",
        stacklevel=4,
    )


def _write(
    prefix: Path, texts: Sequence[str], tokenizer: "Tokenizer", sources: Sequence[str]
) -> None:
    """One document per text, closed by the end of text."""
    end = tokenizer.end_of_text
    with TokenFileWriter(
        prefix,
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer,
        end_of_text=end,
        sources=sources,
    ) as writer:
        writer.text_bytes = sum(len(text.encode()) for text in texts)
        for ids in _encode(texts, tokenizer):
            writer.add_document([*ids, end])


def _encode(texts: Sequence[str], tokenizer: "Tokenizer") -> Iterator[list[int]]:
    for first in range(0, len(texts), _TEXTS_AT_ONCE):
        yield from tokenizer.encode_batch(texts[first : first + _TEXTS_AT_ONCE])


def _write_commit_file(directory: Path, key: str, figures: _Figures) -> None:
    """Write `corpus.json`, whose presence says that everything else is there; by rename, so never half."""
    content: dict[str, Any] = {
        "key": key,
        "tokenizer_sha256": _sha256((directory / "tokenizer.json").read_bytes()),
        "figures": asdict(figures),
    }
    temporary = directory / f"corpus.json.{os.getpid()}.tmp"
    temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    temporary.replace(directory / "corpus.json")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
