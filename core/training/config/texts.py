"""Texts that a run names directly, as token files."""

import os
import sys
from dataclasses import replace
from typing import Any

from core.datasets import open_blend
from core.datasets.corpus.cached import is_text, prepared_text, tokenizer_beside
from core.datasets.shards.manifest import is_list
from core.datasets.token_file import TokenFile
from core.training.config.data import DataConfig
from core.training.config.run import RunConfig


def with_token_files(run: RunConfig) -> RunConfig:
    """The run with a prefix in the place of each text of `data`; the first process of a machine writes, others wait.

    All texts get the tokenizer of the first training text. No process group is needed, since it may take hours.
    Raises ValueError, OSError, ImportError: a text that cannot be prepared.
    """
    data = run.data
    if not data.train or not any(
        map(is_text, [*data.train, *data.valid, *data.valid_sets.values()])
    ):
        return run
    texts = _Texts(data, preferences=run.training.objective == "dpo")
    train = texts.blend(data.train)
    valid = texts.blend(data.valid)
    sets = {name: texts.prefix(text) for name, text in data.valid_sets.items()}
    return replace(run, data=replace(data, train=train, valid=valid, valid_sets=sets))


class _Texts:
    def __init__(self, data: DataConfig, *, preferences: bool) -> None:
        self._data = data
        self._preferences = preferences
        self._tokenizer = data.tokenizer
        self._first = True
        # one process per machine: disks may be local
        self._writes = os.environ.get("LOCAL_RANK", "0") == "0"

    def blend(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """As it was given, weights included."""
        texts = [name for _, name in open_blend(names)] if names else []
        return tuple(self.prefix(name) if name in texts else name for name in names)

    def prefix(self, name: str) -> str:
        """Where the prepared form of one text lies; a prefix stays as it is."""
        if is_text(name):
            path = prepared_text(
                name,
                self._data.directory,
                tokenizer=self._tokenizer,
                vocab_size=self._data.vocab_size,
                writes=self._writes,
                say=self._say,
                preferences=self._preferences,
            )
            name = str(path)
        # without one named, the first text's tokenizer reads the others as well
        if self._first and self._tokenizer is None and not is_list(name):
            beside = tokenizer_beside(TokenFile(name).prefix)
            self._tokenizer = str(beside) if beside is not None else None
        self._first = False
        return name

    def _say(self, line: Any) -> None:
        print(line, file=sys.stderr, flush=True)
