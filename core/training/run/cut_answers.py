"""Conversations of a validation text that are longer than a row: what of them is not counted, and what counts it."""

from collections.abc import Iterator
from typing import NamedTuple

from core.datasets import ConversationBatches
from core.training.config import RunConfig
from core.training.run.data import Corpus


class Cut(NamedTuple):
    """Answers of a text that lie beyond its rows: in so many conversations, so many tokens; see `note`."""

    conversations: int
    tokens: int
    note: str


def cut_answers(corpus: Corpus, run: RunConfig) -> Iterator[tuple[str, Cut]]:
    """(name, cut) of each validation text that loses answers."""
    for name, text in corpus.validation_texts.items():
        if not isinstance(batches := text.valid, ConversationBatches):
            continue
        conversations, tokens, needed = batches.cut
        if conversations:
            total = batches.token_file.num_documents
            beyond = (
                f"{conversations:,} of {total:,} conversations are longer than a row of {batches.sequence_length:,} "
                f"tokens; {tokens:,} tokens of their answers are not counted"
            )
            yield name, Cut(conversations, tokens, f"{beyond}: {_remedy(run, needed)}")


def _remedy(run: RunConfig, needed: int) -> str:
    """The rows that lose nothing, or the longest that the model reads."""
    parallel = run.parallel
    step = 2 * parallel.context * parallel.tensor
    length = -(-needed // step) * step
    reach = length
    if run.model.build is None:
        # a table of learned positions has as many as the run had
        own_table = run.model.spec().positions is not None
        grows = run.model.huggingface is not None or run.model.max_position_embeddings
        reach = run.model.positions(length) if grows or not own_table else run.data.sequence_length
    if reach <= run.data.sequence_length:
        return f"the model has {reach:,} positions, and reads no longer ones"
    if reach < length:
        return f"--data.sequence-length {reach} counts more of them, which is all that the model has positions for"
    return f"--data.sequence-length {length} counts all of them"
