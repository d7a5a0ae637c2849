"""The open token files of a run: its batches, its validation, and what a checkpoint remembers of them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn

from core.datasets import (
    AnyTokenizer,
    BlendedBatches,
    ConversationBatches,
    GPTBatches,
    Packing,
    PreferenceBatches,
    TokenFile,
    TokenRange,
    TokenSource,
    first_documents,
    gzip_bits_per_byte,
    unigram_bits_per_byte,
)
from core.datasets.card import sampled_hash
from core.datasets.shards import LocalShards, StreamedBatches
from core.datasets.token_file import Array
from core.pipeline.run.arguments import forward_arguments
from core.training.config import DataConfig, TrainingConfig
from core.training.log.validation import MAIN

# of each text, to estimate its bytes per token: pieces all over it, as it may change from place to place
_SAMPLED_PIECES = 64
_PIECE_TOKENS = 1 << 12
_ALL_BATCHES = 1 << 62

# weight in the blend (None: its number of tokens), text
Part = tuple[float | None, TokenSource]


class BatchSource(Protocol):
    """Global batches by their number: `GPTBatches`, `BlendedBatches`, or a user's own."""

    def batch(self, step: int, rank: int = 0, size: int = 1) -> Mapping[str, Tensor]:
        """The rows of data rank `rank` of `size`: name -> tensor [b/size, ...] on the CPU."""
        ...


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The open token files of a run and their tokenizer.

    tokenizer_file: the `tokenizer.json` that the tokenizer was read from, None for bytes. closes: the token that ends
    each document, None where none does. valid_parts: empty where the split leaves nothing to validate. valid_sets:
    more texts to validate on, by name. shards: of a training streamed text, whose first is `train_parts`.
    """

    tokenizer: AnyTokenizer
    tokenizer_file: Path | None = None
    closes: int | None
    train_parts: tuple[Part, ...]
    valid_parts: tuple[Part, ...]
    data: DataConfig
    training: TrainingConfig
    valid_sets: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)
    shards: LocalShards | None = None

    def check_stages(self, stages: Mapping[int, nn.Module]) -> None:
        """Raise ValueError where none of these stages takes what batches tell of documents."""
        tells = not self.holds_preferences and (
            self.data.reset_attention_mask
            or any(source.marks_answers for _, source in self.train_parts)
        )
        taken = [name for module in stages.values() for name in forward_arguments(module)]
        if tells and stages and "document_begin" not in taken:
            kinds = ", ".join(type(module).__name__ for module in stages.values())
            raise ValueError(
                "batches tell where documents begin (reset_attention_mask, conversations) by document_begin [b, s], "
                f"which forward of {kinds} does not take among its {len(taken)} arguments: attention would cross "
                "documents; take it (visible_mask of core.context_parallel makes a bool mask of it)"
            )

    @property
    def holds_preferences(self) -> bool:
        """Whether it trains on pairs of a chosen and a rejected response."""
        return any(source.holds_preferences for _, source in self.train_parts)

    @cached_property
    def train(self) -> GPTBatches | BlendedBatches | StreamedBatches:
        """Training batches. Raises ValueError: a sequence longer than the text."""
        if self.shards is not None:
            data = self.data
            return StreamedBatches(
                local=self.shards,
                sequence_length=data.sequence_length,
                global_batch_size=self.training.global_batch_size,
                seed=data.seed,
                packing=Packing(
                    end_of_text=self.closes,
                    reset_position_ids=data.reset_position_ids,
                    reset_attention_mask=data.reset_attention_mask,
                    eod_mask_loss=data.eod_mask_loss,
                ),
            )
        return self._batches(self.train_parts, self.data.eod_mask_loss, short=False)

    @cached_property
    def valid(self) -> GPTBatches | BlendedBatches | None:
        """Validation batches, to be read in order; every label counts: bits per byte are of the whole text, or of
        the answers of conversations."""
        if self.valid_parts:
            return self._batches(self.valid_parts, False, short=True)
        return None

    @property
    def validation_texts(self) -> "dict[str, Corpus]":
        """Name -> a corpus that validates on this text: "validation" where there is one, and `valid_sets`."""
        main = {MAIN: self} if self.valid_parts else {}
        return main | self._named_texts

    @cached_property
    def _named_texts(self) -> "dict[str, Corpus]":
        return {
            name: replace(self, valid_parts=parts, valid_sets={})
            for name, parts in self.valid_sets.items()
        }

    @property
    def num_tokens(self) -> tuple[int, int]:
        """Tokens to train on, tokens to validate on (before `eval_batches` limits these)."""
        train_tokens = sum(source.num_tokens for _, source in self.train_parts)
        if self.shards is not None:
            train_tokens = self.shards.manifest.num_tokens
        valid_tokens = sum(source.num_tokens for _, source in self.valid_parts)
        return train_tokens, valid_tokens

    @property
    def order(self) -> dict[str, Any]:
        """What the order of the samples, and the meaning of a token, depend on beside `DataConfig`'s numbers."""
        total_weight = sum(weight or 0.0 for weight, _ in self.train_parts)
        blend = []
        for weight, _ in self.train_parts:
            blend.append(None if weight is None else weight / total_weight)
        hashes = [file_hash(source) for _, source in self.train_parts]
        if self.shards is not None:
            hashes = [shard.hash for shard in self.shards.manifest.shards]
        document_options = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
        return {
            "tokenizer": self.tokenizer.identity,
            "blend": blend,
            "train_tokens": [source.num_tokens for _, source in self.train_parts],
            "train_hash": hashes,
            "documents": [name for name in document_options if getattr(self.data, name)],
        }

    def validation(self, rank: int, size: int) -> Iterator[Mapping[str, Tensor]]:
        """The validation text in order, `eval_batches` of it (0: all): this data rank's rows."""
        if self.valid is None:
            return iter(())
        # in order and not shuffled: bits per byte are of the text as it stands
        rows = self.valid.sequential(self.training.global_batch_size, rank, size)
        return islice(rows, self.training.eval_batches or None)

    @property
    def validation_batches(self) -> int:
        """How many `validation` gives."""
        valid = self.valid
        rows = self.training.global_batch_size
        parts = [part for _, part in valid.parts] if isinstance(valid, BlendedBatches) else [valid]
        batches = sum(-(-part.num_samples // rows) for part in parts if part is not None)
        return min(batches, self.training.eval_batches or batches)

    def shortened(self, num_tokens: int) -> "Corpus":
        """With the first documents of each validation text only, of about `num_tokens`: the same on any layout."""

        def first(parts: tuple[Part, ...]) -> tuple[Part, ...]:
            return tuple((weight, first_documents(source, num_tokens)) for weight, source in parts)

        sets = {name: first(parts) for name, parts in self.valid_sets.items()}
        return replace(self, valid_parts=first(self.valid_parts), valid_sets=sets)

    def _validation_tokens(self) -> Iterator[Array]:
        """The tokens that `validation` reads, one text after the other."""
        tokens_per_batch = self.data.sequence_length * self.training.global_batch_size
        remaining_batches = self.training.eval_batches or _ALL_BATCHES
        if isinstance(self.valid, ConversationBatches):
            rows = self.training.eval_batches * self.training.global_batch_size
            yield self.valid.answer_tokens(rows or None)
            return
        for _, source in self.valid_parts:
            # the first token is no label
            labels = source.num_tokens - 1
            # the last one may be short
            batches = min(remaining_batches, -(-labels // tokens_per_batch))
            yield source.tokens(0, min(source.num_tokens, batches * tokens_per_batch))
            remaining_batches -= batches

    @cached_property
    def valid_text(self) -> bytes:
        """The text that `validation` reads, as the tokenizer decodes it, without the tokens that end documents."""
        return b"".join(self._decode(tokens) for tokens in self._validation_tokens())

    def _decode(self, tokens: Array) -> bytes:
        text_tokens = tokens[tokens != self.tokenizer.end_of_text]
        return self.tokenizer.decode(text_tokens.tolist()).encode()

    @cached_property
    def bytes_per_token(self) -> float:
        """Of the training text; it turns a loss in nats per token into bits per byte.

        Of a prepared file, or a split of it, as its card says of all; without a card, of pieces all over the text.
        Of a blend, weighted by how often a text is drawn; 0 of preferences, whose loss is of pairs.
        """
        if self.holds_preferences:
            return 0.0
        weighted_bytes = total_weight = 0.0
        for blend_weight, source in self.train_parts:
            weight = blend_weight
            if weight is None:  # drawn in proportion to its tokens
                weight = source.num_tokens
            weighted_bytes += weight * self._bytes_per_token(source)
            total_weight += weight
        return weighted_bytes / total_weight

    def _bytes_per_token(self, source: TokenSource) -> float:
        card = _file_of(source).card
        if card is not None:
            return card.text_bytes / card.tokens
        tokens = _pieces(source)
        return len(self._decode(tokens)) / len(tokens)

    def prompt(self, length: int = 16) -> list[int]:
        """The first tokens of the validation text, or else of the training text: what a sample continues."""
        _, source = (self.valid_parts or self.train_parts)[0]
        return source.tokens(0, min(length, source.num_tokens)).tolist()

    @cached_property
    def baselines(self) -> dict[str, float]:
        """Bits per byte of the validation text without a model, by name; none of preferences."""
        text = b"" if self.holds_preferences else self.valid_text
        if not text:
            return {}
        return {"unigram": unigram_bits_per_byte(text), "gzip -9": gzip_bits_per_byte(text)}

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

    def _batches(
        self, parts: tuple[Part, ...], eod_mask_loss: bool, *, short: bool
    ) -> GPTBatches | BlendedBatches:
        data = self.data
        rows = self.training.global_batch_size
        conversations = [source for _, source in parts if source.marks_answers]
        if conversations and len(parts) > 1:
            raise ValueError(
                f"{len(conversations)} of {len(parts)} texts are conversations or preferences, which are no part of "
                "a blend; prepare them into one file (--input takes several)"
            )
        if conversations:
            kind: type[ConversationBatches] | type[PreferenceBatches] = ConversationBatches
            if conversations[0].holds_preferences:
                kind = PreferenceBatches
            return kind(
                token_file=conversations[0],
                sequence_length=data.sequence_length,
                global_batch_size=rows,
                seed=data.seed,
                end_of_text=self.closes,
            )
        weighted_batches: list[tuple[float | None, GPTBatches]] = []
        for weight, source in parts:
            batches = GPTBatches(
                token_file=source,
                sequence_length=data.sequence_length,
                global_batch_size=rows,
                seed=data.seed,
                end_of_text=self.closes,
                reset_position_ids=data.reset_position_ids,
                reset_attention_mask=data.reset_attention_mask,
                eod_mask_loss=eod_mask_loss,
                allow_short=short,
            )
            weighted_batches.append((weight, batches))
        if len(weighted_batches) == 1:
            return weighted_batches[0][1]
        return BlendedBatches(parts=weighted_batches, global_batch_size=rows, seed=data.seed)


def _pieces(source: TokenSource) -> Array:
    """Tokens of pieces that lie evenly over the text; all of a short one."""
    total = source.num_tokens
    if total <= _SAMPLED_PIECES * _PIECE_TOKENS:
        return source.tokens(0, total)
    starts = [n * (total - _PIECE_TOKENS) // (_SAMPLED_PIECES - 1) for n in range(_SAMPLED_PIECES)]
    return np.concatenate([source.tokens(start, start + _PIECE_TOKENS) for start in starts])


def _file_of(source: TokenSource) -> TokenFile:
    """The file that a text is all, or a part, of."""
    file = source.file if isinstance(source, TokenRange) else source
    assert isinstance(file, TokenFile)
    return file


def file_hash(source: TokenSource) -> str:
    """Of the file behind a text: equal for a copy, different for another text of the same length."""
    file = _file_of(source)
    if file.card is not None:
        return file.card.bin_hash
    return sampled_hash(f"{file.prefix}.bin")
