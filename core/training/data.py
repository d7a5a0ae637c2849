"""The tokens of a run: prepared once, opened by every rank."""

from dataclasses import dataclass

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
    if data.train is not None and data.valid is not None and data.tokenizer is not None:
        tokenizer, valid = Tokenizer.load(data.tokenizer), TokenFile(data.valid)
        text = tokenizer.decode(valid.tokens(0, valid.num_tokens).tolist()).encode()
        return Corpus(
            tokenizer=tokenizer,
            train=TokenFile(data.train),
            valid=valid,
            valid_bytes=len(text),
            unigram=unigram_bits_per_byte(text),
            gzip=gzip_bits_per_byte(text),
        )
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
