"""The reference of direct preference optimization: log-probabilities under the weights that the run began with.

They are computed once, by the model itself before its first update, and lie in every checkpoint of the run: after a
resume the weights have moved, and the reference has not.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from core.datasets import PreferenceBatches
from core.dist_checkpointing.reading.stored import StoredCheckpoint
from core.dist_checkpointing.state.mapping import ShardedTensor
from core.parallel_state import ParallelState
from core.parallel_state.collectives import all_reduce
from core.pipeline import Pipeline, SingleStage
from core.training.preferences.loss import DPOLoss, response_log_probs
from core.training.resume.adapters import begun_with
from core.training.run.data import BatchSource, Corpus
from core.training.run.data.corpus import file_hash
from core.training.run.loader import moved_to

_KEY = "reference"


class References:
    """Of every text of a run, by a fingerprint of its pairs: a table `[pairs, 2]` of float64, chosen and rejected.

    Raises ValueError: a text that holds no preferences.
    """

    def __init__(self, corpus: Corpus, ps: ParallelState) -> None:
        self._ps = ps
        self._rows = corpus.training.global_batch_size
        self._texts: dict[str, PreferenceBatches] = {}
        for batches in (corpus.train, *(t.valid for t in corpus.validation_texts.values())):
            if not isinstance(batches, PreferenceBatches):
                raise ValueError(
                    f"training.objective=dpo reads pairs, {type(batches).__name__} gives none; prepare JSON "
                    "lines of prompt, chosen and rejected"
                )
            self._texts[fingerprint(batches)] = batches
        # on the host, as batches are when their reference is looked up
        self._tables = {
            key: torch.zeros(batches.num_samples, 2, dtype=torch.float64)
            for key, batches in self._texts.items()
        }

    def state(self) -> dict[str, ShardedTensor]:
        """What a checkpoint keeps: all tables, the same on every rank."""
        return {
            key: ShardedTensor(f"{_KEY}/{key}", table, tuple(table.shape), (0, 0))
            for key, table in self._tables.items()
        }

    def refuse_other(self, url: str) -> None:
        """Raise ValueError for a checkpoint without the reference of all texts of this run."""
        stored = StoredCheckpoint.open(url).keys
        known = [key for key in stored if key.startswith(f"{_KEY}/")]
        missing = [key for key in self._tables if f"{_KEY}/{key}" not in known]
        if missing:
            raise ValueError(
                f"{url} holds the reference of {len(known)} texts, {len(missing)} of the {len(self._tables)} of this "
                "run are not among them, and its weights are not those that the run began with: go on with the same "
                "data.train, data.valid, data.valid_sets and sequence_length, or begin a run from these weights: "
                f"{begun_with(url)}, with another checkpoint.directory"
            )

    def compute(self, executor: SingleStage | Pipeline, say: Callable[[str], None]) -> None:
        """Fill in all tables with the model as it is. Collective: before its first update."""
        begin = time.perf_counter()
        for key, batches in self._texts.items():
            self._tables[key].copy_(self._table(executor, batches))
        pairs = sum(len(table) for table in self._tables.values())
        say(
            f"reference: {pairs:,} pairs in {time.perf_counter() - begin:.1f} s, by the first weights"
        )

    def _table(self, executor: SingleStage | Pipeline, batches: PreferenceBatches) -> Tensor:
        ps = self._ps
        table = torch.zeros(batches.num_samples, 2, dtype=torch.float64, device=ps.device)

        def note(output: Tensor, microbatch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
            log_probs, tokens = response_log_probs(output.detach(), microbatch["labels"])
            pairs = microbatch["pair"][0::2]
            table[pairs[pairs >= 0]] = log_probs.view(-1, 2)[pairs >= 0]
            return -log_probs.sum(), tokens.sum()

        move = moved_to(ps.device)
        for batch in batches.sequential(self._rows, ps.index("dp"), ps.size("dp")):
            executor.evaluate(move(batch), note)
        # each pair was on one replica, in its last stage
        return all_reduce(all_reduce(table, ps.group("pp")), ps.group("dp-cp"))

    def around(self, batches: PreferenceBatches) -> "ReferencedBatches":
        """The same batches with their `reference` `[2 p]`."""
        return ReferencedBatches(batches, self.attach(batches))

    def attach(
        self, batches: PreferenceBatches
    ) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
        """A function that adds `reference` `[2 p]`, float64, to a batch of them."""
        table = self._tables[fingerprint(batches)]
        return lambda batch: {**batch, "reference": table[batch["pair"][0::2]].reshape(-1)}


class ReferencedBatches(NamedTuple):
    """Batches of pairs with the log-probabilities of their reference."""

    source: PreferenceBatches
    attach: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]

    def batch(self, step: int, rank: int = 0, size: int = 1) -> Mapping[str, Tensor]:
        """A batch of `PreferenceBatches`, with the reference's log-probabilities beside it."""
        return self.attach(self.source.batch(step, rank, size))

    def rows(self, first: int, count: int, rank: int = 0, size: int = 1) -> Mapping[str, Tensor]:
        """Rows of `PreferenceBatches`, with the reference's log-probabilities beside them."""
        return self.attach(self.source.rows(first, count, rank, size))


class Preferences(NamedTuple):
    """What a run with `training.objective=dpo` has beside others."""

    loss: DPOLoss
    references: References


def fingerprint(batches: PreferenceBatches) -> str:
    """Of everything that the log-probabilities depend on beside the weights."""
    source = batches.token_file
    first = getattr(source, "first_document", 0)
    content = [file_hash(source), first, source.num_documents, batches.sequence_length]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def first_batches(
    corpus: Corpus,
    preferences: Preferences | None,
    executor: SingleStage | Pipeline,
    start: int,
    say: Callable[[str], None],
) -> BatchSource:
    """What a run trains on from step `start`: the corpus's batches, with their reference where there is one.

    Collective: a run that begins computes it here, one that goes on has it from its checkpoint.
    """
    if preferences is None:
        return corpus.train
    if not start:
        preferences.references.compute(executor, say)
    assert isinstance(corpus.train, PreferenceBatches)
    return preferences.references.around(corpus.train)
