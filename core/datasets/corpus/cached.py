"""Text that a run names directly: prepared once, in a directory of prepared texts, and found there again."""

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from core.datasets.answer_ends import answer_ends
from core.datasets.card import tokenizer_path
from core.datasets.corpus.build import TextFiles, prepare_files, skipped_text
from core.datasets.corpus.conversations import are_conversations, prepare_conversations
from core.datasets.corpus.documents import Encoder
from core.datasets.corpus.hub import hub_files, is_hub_name
from core.datasets.corpus.preferences import are_preferences, prepare_preferences
from core.datasets.corpus.progress import progress
from core.datasets.corpus.sources import SUFFIXES
from core.datasets.prefix_lock import LockedError, is_locked, release_lock, take_lock
from core.datasets.shards.manifest import SUFFIX
from core.datasets.token_file import TokenFile, file_paths
from core.datasets.tokenizers.any_tokenizer import AnyTokenizer, load_tokenizer
from core.datasets.tokenizers.byte_tokenizer import ByteTokenizer
from core.datasets.tokenizers.folder import answer_end, ends_told, shaping_digest

_FORMAT = 1
_CHATS_FORMAT = 3  # answers end with the eos_token beside the tokenizer; parts of text are joined
# of fewer, paragraphs are the documents: training and validation parts consist of whole ones
_FEW_FILES = 3
# a process that waits looks so often, and so long for one that prepares
_POLL_S = 0.3
_PATIENCE_S = 120.0


def is_text(name: str) -> bool:
    """Whether it is a file or directory of text, or a data set of the Hub, and no prefix of a token file."""
    if is_hub_name(name):
        return True
    is_prefix = any(path.exists() for path in file_paths(name))
    of_tokens = name.endswith((".bin", ".idx", SUFFIX))
    return not is_prefix and not of_tokens and Path(name).exists()


def prepared_text(
    name: str,
    directory: str | Path,
    *,
    tokenizer: str | Path | None,
    vocab_size: int,
    writes: bool,
    say: Callable[[str], None],
    preferences: bool = False,
) -> Path:
    """The prefix of the token file of a text, below `directory`; written if it is not there yet.

    tokenizer: a tokenizer.json; None: one of `vocab_size` tokens is learned from the text (conversations: bytes).
    writes: whether this process does it, the first one of its machine; others wait for it. preferences: it is to
    hold pairs of a chosen and a rejected response.
    The same files, tokenizer and settings give the same prefix; a file that has changed (its size or time) another.
    Raises ValueError: nothing to read; nobody writes what this process waits for; preferences where there should be
    none, and the reverse. ImportError: a missing extra.
    """
    if is_hub_name(name):
        hub_files(name, SUFFIXES, say if writes else None)
    text = TextFiles(inputs=(name,))
    kind = _kind_of(name, text, preferences)
    if kind == "documents" and len(text.sources) < _FEW_FILES:
        text = TextFiles(inputs=(name,), documents="paragraph")
    prefix = (
        Path(directory)
        / f"{Path(name).resolve().stem}-{_cache_key(text, tokenizer, vocab_size, kind)}"
    )
    waited = 0.0
    while not _is_ready(prefix):
        if not writes:
            if is_locked(_lock_name(prefix)):
                waited = 0.0
            else:
                waited = waited + _POLL_S
            if waited > _PATIENCE_S:
                raise ValueError(
                    f"the first process of this machine prepares {prefix}, and this one has waited {waited:.0f} s in "
                    "which nobody did; look at its message, or prepare the text first: python -m "
                    f"core.datasets.prepare --input {name} --output PREFIX"
                )
            time.sleep(_POLL_S)
            continue
        try:
            _prepare(text, prefix, tokenizer, vocab_size, kind, say)
        except LockedError:
            # a process of another machine, on a shared disk
            time.sleep(_POLL_S)
    return prefix


def _kind_of(name: str, text: TextFiles, preferences: bool) -> str:
    """What a document of the text is: "documents", "conversations" or "preferences".

    Raises ValueError: preferences where there should be none, and the reverse.
    """
    pairs = are_preferences(text.sources)
    if preferences and not pairs:
        raise ValueError(
            f"{name} holds no preferences, which training.objective=dpo learns from: its first row has no "
            '"chosen" and no "rejected"; give JSON lines of prompt, chosen and rejected, or another objective'
        )
    if preferences:
        return "preferences"
    if are_conversations(text.sources):
        return "conversations"
    if pairs:
        raise ValueError(
            f"{name} holds preferences (chosen, rejected), which only training.objective=dpo learns from; use "
            "that, or give text, chats, or prompts with a response"
        )
    return "documents"


def _is_ready(prefix: Path) -> bool:
    try:
        TokenFile(prefix)
    except (OSError, ValueError):
        # being written, or damaged: it is written anew
        return False
    return True


def _cache_key(
    text_files: TextFiles, tokenizer: str | Path | None, vocab_size: int, kind: str
) -> str:
    """Of everything that the token file depends on."""
    if tokenizer is None:
        identity = f"learned {vocab_size}"
    else:
        loaded = load_tokenizer(tokenizer)
        identity = loaded.identity
    files = [
        (source.name, source.size, source.path.stat().st_mtime_ns) for source in text_files.sources
    ]
    content = [
        _FORMAT,
        str(Path(text_files.inputs[0]).resolve()),
        text_files.documents,
        kind == "conversations",
        identity,
        files,
    ]
    if kind == "preferences":
        content.append(kind)
    if tokenizer is not None:
        # what identity leaves out: how documents begin and end, and for chats all that lies beside the tokenizer
        content += [*loaded.starts, loaded.end_of_text]
        if kind != "documents":
            content += [_CHATS_FORMAT, shaping_digest(Path(tokenizer).parent)]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def _prepare(
    text_files: TextFiles,
    prefix: Path,
    tokenizer_file: str | Path | None,
    vocab_size: int,
    kind: str,
    report: Callable[[str], None],
) -> None:
    """Under a lock from its beginning, as learning a vocabulary takes a while. Raises LockedError."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    lock_name = _lock_name(prefix)
    lock = take_lock(lock_name)
    try:
        name = text_files.inputs[0]
        megabytes = text_files.num_bytes / 1e6
        report(
            f"preparing {name} ({len(text_files.sources):,} files, {megabytes:.1f} MB) as {prefix}, once"
        )
        folder = None
        if tokenizer_file is not None:
            folder = Path(tokenizer_file).parent
            tokenizer = load_tokenizer(tokenizer_file)
        else:
            if kind == "documents":
                tokenizer = _learn_tokenizer(text_files, vocab_size, report)
            else:
                tokenizer = ByteTokenizer()
        with progress("tokenising", text_files.num_bytes) as advance:
            if kind == "documents":
                corpus = prepare_files(text_files, prefix, tokenizer, advance=advance)
            else:
                prepare = prepare_preferences if kind == "preferences" else prepare_conversations
                corpus = prepare(
                    text_files,
                    prefix,
                    tokenizer,
                    template_folder=folder,
                    answer_end=answer_end(tokenizer_file, tokenizer),
                    advance=advance,
                )
        card = corpus.card
        count = card.documents // 2 if kind == "preferences" else card.documents
        report(
            f"prepared: {count:,} {kind}, {card.tokens:,} tokens of {card.vocab_size:,} in "
            f"{corpus.seconds:.1f} s; skipped: {skipped_text(dict(card.skipped))}"
        )
        if tokenizer_file is not None:
            ends = answer_ends(TokenFile(prefix), tokenizer, tokenizer_file)
            report(ends_told(tokenizer, tokenizer_file, answers=kind != "documents", ends=ends))
    finally:
        release_lock(lock_name, lock)


def _learn_tokenizer(
    text_files: TextFiles, vocab_size: int, report: Callable[[str], None]
) -> AnyTokenizer:
    # needs an extra
    from core.datasets.tokenizers.trained import train_tokenizer

    report(f"learning {vocab_size:,} tokens from it (data.tokenizer=FILE takes others)")
    reader = Encoder(
        tokenizer=ByteTokenizer(),
        dtype=np.dtype("<u2"),
        end_of_text=None,
        text_key=text_files.text_key,
    )
    return train_tokenizer(text_files.texts(reader), vocab_size)


def _lock_name(prefix: Path) -> Path:
    return Path(f"{prefix}.text")


def tokenizer_beside(prefix: str | Path) -> Path | None:
    """The tokenizer.json stored with a token file; None where tokens are bytes, or it is foreign."""
    path = tokenizer_path(prefix)
    if path.is_file():
        return path
    return None
