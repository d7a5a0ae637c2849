"""The tokens of a run: prepared once, opened by every rank."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from core.datasets import (
    GPTBatches,
    TokenFile,
    Tokenizer,
    gzip_bits_per_byte,
    prepare_default_corpus,
    unigram_bits_per_byte,
)
from core.parallel_state import ParallelState
from core.parallel_state.collectives import barrier
from core.training.config import DataConfig, TrainingConfig

_LOOKED_AT = 1 << 22  # tokens of a file that are held against the tokenizer: all would be slow for a large one


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Open token files, their tokenizer, and what the validation text costs without a model (bits per byte)."""

    tokenizer: Tokenizer
    train: TokenFile
    valid: TokenFile
    valid_bytes: int
    unigram: float
    gzip: float

    @property
    def bytes_per_token(self) -> float:
        """Of the validation text."""
        return self.valid_bytes / self.valid.num_tokens

    def validation(self, data: DataConfig, training: TrainingConfig) -> GPTBatches:
        """The validation text, to be read in order once."""
        return GPTBatches(
            token_file=self.valid,
            sequence_length=data.sequence_length,
            global_batch_size=training.global_batch_size,
            seed=data.seed,
        )

    def batches(self, data: DataConfig, training: TrainingConfig) -> GPTBatches:
        """Training batches; raises ValueError when a sequence is longer than the data."""
        return GPTBatches(
            token_file=self.train,
            sequence_length=data.sequence_length,
            global_batch_size=training.global_batch_size,
            seed=data.seed,
        )


def open_corpus(data: DataConfig, parallel: ParallelState) -> Corpus:
    """The files that `data` names, or the default corpus, written by rank 0 while the others wait.

    Raises ValueError: a damaged or foreign file (by the file's name), a tokenizer that does not fit.
    """
    if data.train:
        if not data.valid or data.tokenizer is None:
            raise ValueError("own text needs train, valid and tokenizer; give all 3, or none of them")
        return _own_corpus(data.train[0], data.valid[0], data.tokenizer)
    if parallel.rank == 0:
        prepare_default_corpus(data.directory, vocab_size=data.vocab_size)
    barrier(parallel.world)
    made = prepare_default_corpus(data.directory, vocab_size=data.vocab_size)  # the others find it ready
    return Corpus(
        tokenizer=Tokenizer.load(made.tokenizer),
        train=TokenFile(made.train),
        valid=TokenFile(made.valid),
        valid_bytes=made.valid_bytes,
        unigram=made.unigram_bits_per_byte,
        gzip=made.gzip_bits_per_byte,
    )


def _own_corpus(train: str, valid: str, tokenizer_file: str) -> Corpus:
    tokenizer = Tokenizer.load(tokenizer_file)
    files = TokenFile(train), TokenFile(valid)
    for prefix, file in zip((train, valid), files, strict=True):
        largest = int(file.tokens(0, min(file.num_tokens, _LOOKED_AT)).max(initial=0))
        if largest >= tokenizer.vocab_size:
            raise ValueError(
                f"{prefix}.bin holds token {largest}, {tokenizer_file} has {tokenizer.vocab_size} tokens; give the "
                "tokenizer that made the file"
            )
    ids = files[1].tokens(0, files[1].num_tokens)
    # as for the default corpus: bytes of text, without the token that closes a document
    text = tokenizer.decode(ids[ids != tokenizer.end_of_text].tolist()).encode()
    return Corpus(
        tokenizer=tokenizer,
        train=files[0],
        valid=files[1],
        valid_bytes=len(text),
        unigram=unigram_bits_per_byte(text),
        gzip=gzip_bits_per_byte(text),
    )


def moved_to(device: torch.device) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
    """A function that takes a batch to `device`."""
    return lambda batch: {name: tensor.to(device) for name, tensor in batch.items()}
