"""The list of a corpus's shards in the order in which they are read: names, tokens, hashes. A small JSON file."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from core.datasets.card import sampled_hash
from core.datasets.token_file import TokenFile, file_paths

FORMAT = "paracore shards 1"
SUFFIX = ".shards.json"


@dataclass(frozen=True)
class CorpusShard:
    """One token file: its name without a folder, its tokens, and `sampled_hash` of its `.bin`."""

    name: str
    tokens: int
    hash: str


@dataclass(frozen=True)
class ShardManifest:
    """The shards of a corpus, in order. Raises ValueError: none, a name twice or with a folder, one token."""

    shards: tuple[CorpusShard, ...]

    def __post_init__(self) -> None:
        names = [shard.name for shard in self.shards]
        problems = [
            f"{name!r} is no file name" for name in names if not re.fullmatch(r"[\w-][\w.-]*", name)
        ]
        twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
        problems += [f"{name} is there {names.count(name)} times" for name in twice]
        problems += [
            f"{shard.name} has {shard.tokens} tokens, 2 or more"
            for shard in self.shards
            if shard.tokens < 2
        ]
        if problems or not names:
            raise ValueError(
                f"shards: {'; '.join(problems) or '0 are listed, at least 1'}; write the list anew"
            )

    @property
    def num_tokens(self) -> int:
        """Tokens of all shards together."""
        return sum(shard.tokens for shard in self.shards)

    @classmethod
    def of(cls, prefixes: Sequence[str | Path]) -> "ShardManifest":
        """Of token files that are all here, in this order. Raises ValueError, FileNotFoundError: a damaged one."""
        shards = []
        for prefix in prefixes:
            file = TokenFile(prefix)
            if file.card is not None:
                hash_of_tokens = file.card.bin_hash
            else:
                hash_of_tokens = sampled_hash(file_paths(prefix)[0])
            shards.append(CorpusShard(Path(prefix).name, file.num_tokens, hash_of_tokens))
        return cls(tuple(shards))

    @classmethod
    def read(cls, path: str | Path) -> "ShardManifest":
        """Raises ValueError: no list of shards; FileNotFoundError."""
        try:
            content = json.loads(Path(path).read_text())
            if content["format"] != FORMAT:
                raise ValueError(f"format {content['format']!r}, this reads {FORMAT!r}")
            return cls(
                tuple(
                    CorpusShard(str(s["name"]), int(s["tokens"]), str(s["hash"]))
                    for s in content["shards"]
                )
            )
        except (ValueError, KeyError, TypeError) as error:
            remedy = "write it with python -m core.datasets.shards"
            raise ValueError(f"{path} is no list of shards ({error}); {remedy}") from None

    def write(self, path: str | Path) -> None:
        """As JSON; the same shards give the same bytes."""
        content = {"format": FORMAT, "shards": [asdict(shard) for shard in self.shards]}
        Path(path).write_text(json.dumps(content, indent=1) + "\n")


def is_list(name: str) -> bool:
    """Whether a text's name is that of a list of shards."""
    return name.endswith(SUFFIX)
