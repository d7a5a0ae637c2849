"""Which token files a run reads, and in rows of which length."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from core.datasets.shards.manifest import SUFFIX
from core.field_names import tells_names
from core.parallel_state.config import raise_all
from core.training.config.messages.huggingface import HUGGINGFACE

# behind the name of a validation text: of the averaged weights
OF_AVERAGE = ".ema"


@tells_names("data", HUGGINGFACE)
@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which token files. Without `train` the default corpus, the standard library's sources, is prepared.

    A text or path given for `train` or `valid` is one prefix; lists become tuples of texts.
    Raises ValueError with every rule that is broken.
    """

    directory: str = "runs/corpus"
    """Where the default corpus is written, and texts that are named directly are prepared."""

    train: tuple[str, ...] = ()
    """Prefix of the .bin and .idx to train on, a file or folder of text (prepared once), a list of shards
    (*.shards.json), or a blend: weight prefix weight prefix ...; empty: default corpus. Several without weights are
    drawn in proportion to their tokens."""

    valid: tuple[str, ...] = ()
    """Prefix, or a blend, of validation files; empty: the second part of `train`, as `split` says."""

    valid_sets: dict[str, str] = field(default_factory=dict)
    """More texts to validate on, each by a name of yours: {books = "data/books", code = "data/code"}; all of it."""

    split: str = "969,30,1"
    """Shares of `train` to train on, to validate, to test, cut between documents; unused where `valid` is given."""

    tokenizer: str | None = None
    """A tokenizer.json; default: the one stored beside the first file of `train`, else bytes; of text that is named
    directly one of `vocab_size` tokens is learned."""

    vocab_size: int = 4096
    """Entries of the tokenizer that is trained for the default corpus, or for text; 257 or more."""

    fetch: str = ""
    """Where `train` is a list of shards: the command that brings one, by its {name}, into {directory}."""

    shard_directory: str | None = None
    """Where shards lie, and are fetched to; default: the folder of their list."""

    sequence_length: int = 128
    """Tokens of one row of a batch."""

    reset_position_ids: bool = False
    """Positions start again at 0 after each document of a row."""

    reset_attention_mask: bool = False
    """Attention does not cross from one document of a row into another."""

    eod_mask_loss: bool = False
    """No loss where the input is the token that ends a document: what follows cannot be known."""

    seed: int = 1234
    """Seed of the order in which rows are read; it does not depend on the layout of ranks."""

    def __post_init__(self) -> None:
        for name in ("train", "valid"):
            value = getattr(self, name)
            if isinstance(value, str | os.PathLike):
                prefixes = (value,)
            else:
                prefixes = value
            # the dataclass is frozen
            object.__setattr__(self, name, tuple(map(str, prefixes)))
        raise_all("DataConfig", self._rules())

    def _rules(self) -> Iterator[tuple[bool, str]]:
        for name in ("train", "valid"):
            yield (
                "" not in getattr(self, name),
                f"{name} has an empty prefix; give that of a .bin and .idx, or leave {name} out",
            )
        for name in ("valid", "tokenizer"):
            yield (
                bool(self.train) or not getattr(self, name),
                f"{name} is given and train has 0 prefixes: the default corpus has its own {name}; give train, or "
                f"leave {name} out",
            )
        for name, prefix in self.valid_sets.items():
            yield (
                re.fullmatch(r"[\w.-]+", name) is not None
                and name != "validation"
                and isinstance(prefix, str),
                f"valid_sets: {name!r} = {prefix!r} must be a name of letters, digits and ._- other than validation, "
                "and the prefix of a .bin and .idx",
            )
            yield (
                not name.endswith(OF_AVERAGE),
                f"valid_sets: {name!r} ends with {OF_AVERAGE}, as losses of averaged weights do; give another name",
            )
        yield from self._shard_rules()
        yield from _split_rules(self.split)
        yield (
            self.sequence_length >= 1,
            f"sequence_length={self.sequence_length} must be at least 1",
        )
        yield (
            self.vocab_size >= 257,
            f"vocab_size={self.vocab_size} cannot hold every byte; use 257 or more",
        )

    def _shard_rules(self) -> Iterator[tuple[bool, str]]:
        lists = [name for name in self.train if name.endswith(SUFFIX)]
        yield (
            not lists or len(self.train) == 1,
            f"train has {len(self.train)} names, and {', '.join(lists)}, a list of shards, is no part of a blend; "
            "give it alone",
        )
        yield (
            bool(lists) or not (self.fetch or self.shard_directory),
            f"fetch or shard_directory is given and train names 0 lists of shards (*{SUFFIX}); leave them out",
        )
        missing = [word for word in ("{name}", "{directory}") if word not in self.fetch]
        yield (
            not (self.fetch and missing),
            f"fetch={self.fetch!r} lacks {' and '.join(missing)}, the shard and where it goes; write them in",
        )


def _split_rules(split: str) -> Iterator[tuple[bool, str]]:
    try:
        shares = [float(share) for share in split.split(",")]
    except ValueError:
        shares = []
    if len(shares) != 3:
        yield False, f"split={split!r} must be 3 numbers, of train, valid and test, as '969,30,1'"
        return
    yield (
        all(0 <= share < float("inf") for share in shares) and shares[0] > 0,
        f"split={split!r} must have shares of at least 0, the first one above 0, as '969,30,1'",
    )
