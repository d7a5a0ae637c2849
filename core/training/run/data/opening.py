"""Which files a run reads, and with which tokenizer: every rank opens the same ones."""

import warnings
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from core.datasets import (
    AnyTokenizer,
    TokenFile,
    check_tokenizer,
    load_tokenizer,
    open_blend,
    prepare_default_corpus,
    split_documents,
    tokenizer_of,
)
from core.datasets.card import tokenizer_path
from core.datasets.shards import CommandFetch, LocalShards, ShardManifest
from core.datasets.shards.manifest import is_list
from core.datasets.tokenizers.byte_tokenizer import ByteTokenizer
from core.parallel_state import ParallelState
from core.parallel_state.collectives import all_gather_objects
from core.training.config import DataConfig, RunConfig, TrainingConfig
from core.training.model.weights import tokenizer_of_run
from core.training.run.data.corpus import Corpus, Part, file_hash


def open_corpus(data: DataConfig, training: TrainingConfig, parallel: ParallelState) -> Corpus:
    """The files that `data` names, or the default corpus, written by rank 0 while the others wait.

    Raises ValueError: a damaged or foreign file (by its name), a tokenizer that does not fit, files that differ from
    rank to rank. All-gather of objects over the world.
    """
    shards = _shards_of_list(data)
    if data.train:
        train_files = [(None, shards.open(0))] if shards is not None else _open_files(data.train)
        valid_files = _open_files(data.valid)
        first_file = train_files[0][1]
        # `_document_end` refuses a file that another tokenizer made
        if data.tokenizer is None:
            tokenizer_file = tokenizer_path(first_file.prefix)
            tokenizer = tokenizer_of(first_file)
            _tell_of_bytes(first_file, tokenizer)
        else:
            tokenizer_file = Path(data.tokenizer)
            end_of_text = None
            if first_file.card is not None:
                end_of_text = first_file.card.end_of_text
            tokenizer = load_tokenizer(data.tokenizer, end_of_text)
    else:
        # rank 0 alone prepares it: what it depends on (times of files, say) may differ from machine to machine
        local_files = None
        if parallel.rank == 0:
            local_files = prepare_default_corpus(data.directory, vocab_size=data.vocab_size)
        files = all_gather_objects(local_files, parallel.world)[0]
        assert files is not None
        train_files = _open_files([str(files.train)])
        valid_files = _open_files([str(files.valid)])
        tokenizer_file = files.tokenizer
        tokenizer = load_tokenizer(tokenizer_file)

    train_parts: Sequence[Part] = train_files
    valid_parts: Sequence[Part] = valid_files
    if not valid_files and shards is None:
        train_parts, valid_parts = _split_parts(train_files, data.split)
    valid_sets = {name: _open_files([prefix]) for name, prefix in data.valid_sets.items()}
    named_files = list(chain.from_iterable(valid_sets.values()))
    corpus = Corpus(
        tokenizer=tokenizer,
        tokenizer_file=None if isinstance(tokenizer, ByteTokenizer) else tokenizer_file.absolute(),
        closes=_document_end(
            [file for _, file in (*train_files, *valid_files, *named_files)], tokenizer
        ),
        train_parts=tuple(train_parts),
        valid_parts=tuple(valid_parts),
        data=data,
        training=training,
        valid_sets={name: tuple(files) for name, files in valid_sets.items()},
        shards=shards,
    )
    _refuse_different_texts(corpus, parallel)
    return corpus


def _tell_of_bytes(file: TokenFile, tokenizer: AnyTokenizer) -> None:
    """Of a file that another program made, nothing says what its ids are."""
    if file.card is None and isinstance(tokenizer, ByteTokenizer):
        warnings.warn(
            f"{file.prefix} has no card and no tokenizer beside it: its ids are taken for bytes, and 256 for the end "
            "of a text. If another program made it of tokens, give its tokenizer.json as data.tokenizer; "
            "docs/concepts/data.md makes one of plain numbers",
            stacklevel=3,
        )


def note_on_tokenizer(run: RunConfig, corpus: Corpus) -> str:
    """What is said of a text whose tokens are not those that `checkpoint.weights` was trained on; empty: they are."""
    url = run.checkpoint.weights
    if url is None:
        return ""
    try:
        known = tokenizer_of_run(url)
    except (OSError, ValueError):  # told when the weights are loaded
        known = {}
    identity = corpus.tokenizer.identity
    if known.get("identity", identity) == identity or run.checkpoint.resumes():
        return ""
    theirs = f"{known.get('path') or 'bytes'} ({known['identity'][:12]})"
    ours = f"{corpus.tokenizer_file or 'bytes'} ({identity[:12]})"
    return (
        f"checkpoint.weights={url} knows the tokens of {theirs}, this text has those of {ours}: the numbers mean "
        "other pieces of text; prepare it with that tokenizer, or give that as data.tokenizer"
    )


def _shards_of_list(data: DataConfig) -> LocalShards | None:
    """Those of a list of shards; None where `train` is none. Raises ValueError, FileNotFoundError: a damaged list."""
    if not (data.train and is_list(data.train[0])):
        return None
    path = Path(data.train[0])
    fetch = CommandFetch(data.fetch) if data.fetch else None
    return LocalShards(ShardManifest.read(path), data.shard_directory or path.parent, fetch)


def _document_end(files: Sequence[TokenFile], tokenizer: AnyTokenizer) -> int | None:
    """The token that ends documents, one for all files. Raises ValueError: another tokenizer made one of them, or
    documents end with a token in some files only."""
    for file in files:
        check_tokenizer(file, tokenizer)
    # the card beside a file says how it was prepared; Megatron's files have none, and end documents as usual
    ends = {}
    for file in files:
        ends[file.prefix] = file.card.end_of_text if file.card else tokenizer.end_of_text
    if len(set(ends.values())) > 1:
        descriptions = []
        for prefix, end in ends.items():
            token = "none" if end is None else end
            descriptions.append(f"{prefix} with {token}")
        raise ValueError(
            f"documents end with {len(set(ends.values()))} different tokens: {', '.join(descriptions)}; prepare all "
            "files alike, with --append-eod or without"
        )
    return next(iter(ends.values()))


def _refuse_different_texts(corpus: Corpus, parallel: ParallelState) -> None:
    """Raise ValueError, on every rank, where a name is another text on another machine. All-gather over the world."""
    local_order = corpus.order | {
        "valid_hash": [file_hash(source) for _, source in corpus.valid_parts]
    }
    for name, parts in corpus.valid_sets.items():
        local_order[f"valid_sets.{name}"] = [file_hash(source) for _, source in parts]
    # every rank compares all, so that all raise, and none waits for one that has left
    first, *others = all_gather_objects(local_order, parallel.world)
    for rank, order in enumerate(others, 1):
        differences = [
            f"{name} {order[name]} != {first[name]}" for name in first if first[name] != order[name]
        ]
        if differences:
            raise ValueError(
                f"rank {rank} reads another text than rank 0: {', '.join(differences)}; give all machines the same "
                "files"
            )


def _open_files(names: Sequence[str]) -> list[tuple[float | None, TokenFile]]:
    """(weight, file) of a blend; None takes the number of tokens."""
    if not names:
        return []
    return [(weight, TokenFile(prefix)) for weight, prefix in open_blend(names)]


def _split_parts(
    files: Sequence[tuple[float | None, TokenFile]], split: str
) -> tuple[list[Part], list[Part]]:
    """(training parts, validation parts), cut between documents."""
    train_parts: list[Part] = []
    valid_parts: list[Part] = []
    for weight, file in files:
        train_range, valid_range, *_ = split_documents(file, split)
        if train_range is not None:
            train_parts.append((weight, train_range))
        if valid_range is not None:
            valid_parts.append((weight, valid_range))
    return train_parts, valid_parts
