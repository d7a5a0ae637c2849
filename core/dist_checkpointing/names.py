"""What is read for each key of a state: what has that key, or what the `mapping` of a load says."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from core.dist_checkpointing.keys import key_of, path_of


@dataclass(frozen=True)
class Source:
    """What a key is read from. key: in the checkpoint. cast: whether other floating dtypes are converted."""

    key: str
    cast: bool = False


Renames = Mapping[str, str | Source] | Callable[[str], str | Source]


class Names:
    """Keys of a state to keys of the checkpoint; `cast`: of all that have no `Source` of their own."""

    def __init__(self, mapping: Renames | None = None, *, cast: bool = False) -> None:
        self._mapping, self._cast = mapping, cast
        self._found: dict[str, Source] = {}

    @property
    def same(self) -> bool:
        """Whether all keys are those of the checkpoint."""
        return self._mapping is None

    def source(self, key: str) -> Source:
        """Raises ValueError: a mapping that gives something else than a key."""
        if key not in self._found:
            found = self._mapping(key) if callable(self._mapping) else (self._mapping or {}).get(key, key)
            if not isinstance(found, (str, Source)):
                raise ValueError(f"the mapping gives {found!r} for {key}; give a key of the checkpoint, or a Source")
            self._found[key] = found if isinstance(found, Source) else Source(found, self._cast)
        return self._found[key]

    def key(self, key: str) -> str:
        """Of a value in the checkpoint."""
        return self.source(key).key

    def path(self, path: str) -> str:
        """Of an array in the checkpoint, by its path here."""
        return path_of(self.key(key_of(path)))

    def cast(self, path: str) -> bool:
        """Of an array, by its path here."""
        return self.source(key_of(path)).cast

    def check(self, keys: Sequence[str]) -> None:
        """Raises ValueError: names that nobody has among `keys`, those of all ranks."""
        if isinstance(self._mapping, Mapping) and (unknown := sorted(self._mapping.keys() - set(keys))):
            raise ValueError(
                f"the mapping names {', '.join(unknown[:5])}, which no state has; it is of keys here to keys of "
                f"the checkpoint, and here are {', '.join(sorted(keys)[:5])}, …"
            )
