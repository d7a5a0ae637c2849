"""The text of a run: which files, which parts of them, which tokenizer; prepared once, opened by every rank."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor

from core.datasets import (
    AnyTokenizer,
    BlendedBatches,
    GPTBatches,
    TokenFile,
    TokenRange,
    TokenSource,
    check_tokenizer,
    gzip_bits_per_byte,
    load_tokenizer,
    open_blend,
    prepare_default_corpus,
    split_documents,
    tokenizer_of,
    unigram_bits_per_byte,
)
from core.datasets.card import sampled_hash
from core.datasets.token_file import Array
from core.parallel_state import ParallelState
from core.parallel_state.collectives import all_gather_objects
from core.training.config import DataConfig, TrainingConfig

_LOOKED_AT = 1 << 18  # tokens of a text of which its bytes per token are taken

Part = tuple[float | None, TokenSource]  # weight in the blend (None: its number of tokens), text


class BatchSource(Protocol):
    """Global batches by their number: `GPTBatches`, `BlendedBatches`, or anything that cuts rows alike."""

    def batch(self, step: int, rank: int = 0, size: int = 1) -> Mapping[str, Tensor]:
        """The rows of data rank `rank` of `size`, tensors [b/size, ...] on the CPU."""
        ...


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Open tokens of a run and their tokenizer. `valid_parts` is empty where the split leaves nothing to validate.

    closes: the token that ends each document, None where none does.
    """

    tokenizer: AnyTokenizer
    closes: int | None
    train_parts: tuple[Part, ...]
    valid_parts: tuple[Part, ...]
    data: DataConfig
    training: TrainingConfig

    @cached_property
    def train(self) -> GPTBatches | BlendedBatches:
        """Training batches. Raises ValueError: a sequence longer than the text."""
        return self._batches(self.train_parts, self.data.eod_mask_loss, short=False)

    @cached_property
    def valid(self) -> GPTBatches | BlendedBatches | None:
        """Validation batches, to be read in order; every label counts: bits per byte are of the whole text."""
        return self._batches(self.valid_parts, False, short=True) if self.valid_parts else None

    @property
    def num_tokens(self) -> tuple[int, int]:
        """Tokens to train on, tokens to validate on (before `eval_batches` limits these)."""
        train, valid = self.train_parts, self.valid_parts
        return sum(source.num_tokens for _, source in train), sum(source.num_tokens for _, source in valid)

    @property
    def order(self) -> dict[str, Any]:
        """What the order of the samples, and the meaning of a token, depend on beside `DataConfig`'s numbers."""
        weights = [weight for weight, _ in self.train_parts]
        whole = sum(weight or 0.0 for weight in weights)
        options = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
        return {
            "tokenizer": self.tokenizer.identity,
            "blend": [weight if weight is None else weight / whole for weight in weights],
            "train_tokens": [source.num_tokens for _, source in self.train_parts],
            "train_hash": [_hash_of(source) for _, source in self.train_parts],
            "documents": [name for name in options if getattr(self.data, name)],
        }

    def validation(self, rank: int, size: int) -> Iterator[Mapping[str, Tensor]]:
        """The validation text in order, `eval_batches` of it (0: all): this data rank's rows."""
        if self.valid is None:
            return iter(())
        rows = self.valid.sequential(self.training.global_batch_size, rank, size)
        return islice(rows, self.training.eval_batches or None)

    def _validated(self) -> Iterator[Array]:
        """The tokens that `validation` reads, a text after the other."""
        rows = self.data.sequence_length * self.training.global_batch_size
        left = self.training.eval_batches or 1 << 62
        for _, source in self.valid_parts:
            batches = min(left, -(-(source.num_tokens - 1) // rows))
            yield source.tokens(0, min(source.num_tokens, batches * rows))
            left -= batches

    @cached_property
    def valid_text(self) -> bytes:
        """The text that `validation` reads, as the tokenizer decodes it, without what closes a document."""
        end = self.tokenizer.end_of_text
        return b"".join(self.tokenizer.decode(ids[ids != end].tolist()).encode() for ids in self._validated())

    @cached_property
    def bytes_per_token(self) -> float:
        """Of the training text, by its first tokens: nats per token of a training loss become bits per byte with it.
        Of a blend, weighted by how often a text is drawn."""
        found = []
        for weight, source in self.train_parts:
            ids = source.tokens(0, min(source.num_tokens, _LOOKED_AT))
            size = len(self.tokenizer.decode(ids[ids != self.tokenizer.end_of_text].tolist()).encode())
            found.append((source.num_tokens if weight is None else weight, size / len(ids)))
        return sum(weight * ratio for weight, ratio in found) / sum(weight for weight, _ in found)

    def prompt(self, longest: int = 16) -> list[int]:
        """How the validation text begins, or else the training text: what a sample goes on from."""
        _, source = (self.valid_parts or self.train_parts)[0]
        return source.tokens(0, min(longest, source.num_tokens)).tolist()

    @cached_property
    def baselines(self) -> dict[str, float]:
        """Bits per byte of the validation text without a model, by name."""
        text = self.valid_text
        return {"unigram": unigram_bits_per_byte(text), "gzip -9": gzip_bits_per_byte(text)} if text else {}

    def check_model(self, vocab_size: int, positions: int, sequence_length: int) -> None:
        """Raise ValueError for a model that cannot read this text."""
        if vocab_size < self.tokenizer.vocab_size:
            raise ValueError(
                f"the model has a vocabulary of {vocab_size}, the text's tokenizer of {self.tokenizer.vocab_size}; "
                f"build the model with vocab_size={self.tokenizer.vocab_size}"
            )
        if positions < sequence_length:
            raise ValueError(
                f"the model has {positions} positions, fewer than data.sequence_length={sequence_length}; use "
                f"at most {positions}, or a model with more"
            )

    def _batches(self, parts: tuple[Part, ...], eod_mask_loss: bool, *, short: bool) -> GPTBatches | BlendedBatches:
        data, rows = self.data, self.training.global_batch_size
        made = [
            (
                weight,
                GPTBatches(
                    token_file=source,
                    sequence_length=data.sequence_length,
                    global_batch_size=rows,
                    seed=data.seed,
                    end_of_text=self.closes,
                    reset_position_ids=data.reset_position_ids,
                    reset_attention_mask=data.reset_attention_mask,
                    eod_mask_loss=eod_mask_loss,
                    allow_short=short,
                ),
            )
            for weight, source in parts
        ]
        if len(made) == 1:
            return made[0][1]
        return BlendedBatches(parts=made, global_batch_size=rows, seed=data.seed)


def open_corpus(data: DataConfig, training: TrainingConfig, parallel: ParallelState) -> Corpus:
    """The files that `data` names, or the default corpus, written by rank 0 while the others wait.

    Raises ValueError: a damaged or foreign file (by its name), a tokenizer that does not fit, files that differ from
    rank to rank. All-gather of objects over the world.
    """
    if data.train:
        train, valid = _opened(data.train), _opened(data.valid)
        first = train[0][1]
        told = first.card.end_of_text if first.card is not None else None
        tokenizer = tokenizer_of(first) if data.tokenizer is None else load_tokenizer(data.tokenizer, told)
    else:
        # made by rank 0 alone: what it depends on (times of files, say) may differ from machine to machine
        mine = prepare_default_corpus(data.directory, vocab_size=data.vocab_size) if parallel.rank == 0 else None
        made = all_gather_objects(mine, parallel.world)[0]
        assert made is not None
        train, valid = _opened([str(made.train)]), _opened([str(made.valid)])
        tokenizer = load_tokenizer(made.tokenizer)
    parts, rest = (train, valid) if valid else _split(train, data.split)
    corpus = Corpus(
        tokenizer=tokenizer,
        closes=_closing([file for _, file in (*train, *valid)], tokenizer),
        train_parts=tuple(parts),
        valid_parts=tuple(rest),
        data=data,
        training=training,
    )
    _same_text(corpus, parallel)
    return corpus


def _closing(files: Sequence[TokenFile], tokenizer: AnyTokenizer) -> int | None:
    """The token that ends documents, one for all files. Raises ValueError: another tokenizer made one of them, or
    documents end with a token in some files only."""
    for file in files:
        check_tokenizer(file, tokenizer)
    ends = {file.prefix: file.card.end_of_text if file.card else tokenizer.end_of_text for file in files}
    if len(set(ends.values())) > 1:
        told = ", ".join(f"{prefix} with {'none' if end is None else end}" for prefix, end in ends.items())
        raise ValueError(
            f"documents end with {len(set(ends.values()))} different tokens: {told}; prepare all files alike, with "
            "--append-eod or without"
        )
    return next(iter(ends.values()))


def _same_text(corpus: Corpus, parallel: ParallelState) -> None:
    """Raise ValueError, on every rank, where a name is another text on another machine. All-gather over the world."""
    mine = corpus.order | {"valid_hash": [_hash_of(source) for _, source in corpus.valid_parts]}
    first, *others = all_gather_objects(mine, parallel.world)
    for rank, theirs in enumerate(others, 1):
        if wrong := [name for name in first if first[name] != theirs[name]]:
            raise ValueError(
                f"rank {rank} reads another text than rank 0: "
                f"{', '.join(f'{name} {theirs[name]} != {first[name]}' for name in wrong)}; give all machines "
                "the same files"
            )


def _hash_of(source: TokenSource) -> str:
    """Of the file behind a text: a copy has the same, another text of the same length has not."""
    file = source.file if isinstance(source, TokenRange) else source
    assert isinstance(file, TokenFile)
    return file.card.bin_hash if file.card is not None else sampled_hash(f"{file.prefix}.bin")


def _opened(names: Sequence[str]) -> list[tuple[float | None, TokenFile]]:
    """(weight, file) of a blend; None takes the number of tokens."""
    return [(weight, TokenFile(prefix)) for weight, prefix in open_blend(names)] if names else []


def _split(files: Sequence[tuple[float | None, TokenFile]], split: str) -> tuple[list[Part], list[Part]]:
    """(training parts, validation parts), cut between documents."""
    sides: tuple[list[Part], list[Part]] = ([], [])
    for weight, file in files:
        for side, part in zip(sides, split_documents(file, split), strict=False):
            if part is not None:
                side.append((weight, part))
    return sides


def moved_to(device: torch.device) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
    """A function that takes a batch to `device`."""
    return lambda batch: {name: tensor.to(device) for name, tensor in batch.items()}
