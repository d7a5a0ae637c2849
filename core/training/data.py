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
from core.parallel_state import ParallelState
from core.parallel_state.collectives import barrier
from core.training.config import DataConfig, TrainingConfig

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
        return self._batches(self.train_parts, short=False)

    @cached_property
    def valid(self) -> GPTBatches | BlendedBatches | None:
        """Validation batches, to be read in order."""
        return self._batches(self.valid_parts, short=True) if self.valid_parts else None

    @property
    def num_tokens(self) -> tuple[int, int]:
        """Tokens to train on, tokens to validate on (before `eval_batches` limits these)."""
        train, valid = self.train_parts, self.valid_parts
        return sum(source.num_tokens for _, source in train), sum(source.num_tokens for _, source in valid)

    @property
    def order(self) -> dict[str, Any]:
        """What the order of the samples, and the meaning of a token, depend on beside `DataConfig`'s numbers."""
        weights = [weight for weight, _ in self.train_parts]
        sizes = [source.num_tokens for _, source in self.train_parts]
        return {"tokenizer": self.tokenizer.identity, "train_tokens": sizes, "blend": weights}

    def validation(self, rank: int, size: int) -> Iterator[Mapping[str, Tensor]]:
        """The validation text in order, `eval_batches` of it (0: all): this data rank's rows."""
        if self.valid is None:
            return iter(())
        rows = self.valid.sequential(self.training.global_batch_size, rank, size)
        return islice(rows, self.training.eval_batches or None)

    @cached_property
    def valid_text(self) -> bytes:
        """The text behind the labels of `validation`, without what closes a document."""
        s, rows = self.data.sequence_length, self.training.global_batch_size
        left, texts = self.training.eval_batches or 1 << 62, []
        for _, source in self.valid_parts:
            batches = min(left, -(-(source.num_tokens - 1) // (s * rows)))
            ids = source.tokens(0, min(source.num_tokens, batches * s * rows))
            texts.append(self.tokenizer.decode(ids[ids != self.tokenizer.end_of_text].tolist()).encode())
            left -= batches
        return b"".join(texts)

    @property
    def bytes_per_token(self) -> float:
        """Of the validation text; of English in a byte-level vocabulary of 4096 where there is none."""
        if not self.valid_text:
            return 3.0
        rows = self.training.eval_batches * self.training.global_batch_size * self.data.sequence_length
        tokens = self.num_tokens[1] if not rows else min(rows, self.num_tokens[1])
        return len(self.valid_text) / tokens

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

    def _batches(self, parts: tuple[Part, ...], *, short: bool) -> GPTBatches | BlendedBatches:
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
                    eod_mask_loss=data.eod_mask_loss,
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

    Raises ValueError: a damaged or foreign file (by the file's name), a tokenizer that does not fit.
    """
    if data.train:
        train, valid = _opened(data.train), _opened(data.valid)
        first = train[0][1]
        told = first.card.end_of_text if first.card is not None else None
        tokenizer = tokenizer_of(first) if data.tokenizer is None else load_tokenizer(data.tokenizer, told)
    else:
        if parallel.rank == 0:
            prepare_default_corpus(data.directory, vocab_size=data.vocab_size)
        barrier(parallel.world)
        made = prepare_default_corpus(data.directory, vocab_size=data.vocab_size)  # the others find it ready
        train, valid, tokenizer = (
            _opened([str(made.train)]),
            _opened([str(made.valid)]),
            load_tokenizer(made.tokenizer),
        )
    for _, file in (*train, *valid):
        check_tokenizer(file, tokenizer)
    parts, rest = (train, valid) if valid else _split(train, data.split)
    card = train[0][1].card
    return Corpus(
        tokenizer=tokenizer,
        closes=tokenizer.end_of_text if card is None else card.end_of_text,
        train_parts=tuple(parts),
        valid_parts=tuple(rest),
        data=data,
        training=training,
    )


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
