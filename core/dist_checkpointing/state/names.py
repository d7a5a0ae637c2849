"""What is read for each key of a state: what has that key, or what the `mapping` of a load says."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from core.dist_checkpointing.format.keys import key_of
from core.dist_checkpointing.state.other_names import OtherNames


@dataclass(frozen=True)
class Source:
    """What a key is read from; `Source(key)[:64]` is a part of it, with integers and slices as of tensors.

    key: in the checkpoint. cast: whether other floating dtypes are converted. shape: what it is reshaped to, before
    a part is taken; dims are split and merged, as `torch.reshape` does.
    """

    key: str
    cast: bool = False
    shape: tuple[int, ...] | None = None
    index: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        if self.shape is not None and not isinstance(self.shape, (tuple, list)):
            raise ValueError(
                f"Source of {self.key!r} with shape={self.shape!r}: give a tuple of its dims, as shape=(3, -1)"
            )

    def __getitem__(self, index: Any) -> "Source":
        if self.index:
            raise ValueError(f"{self} is a part already; give one index, [a, b]")
        return replace(self, index=index if isinstance(index, tuple) else (index,))


@dataclass(frozen=True)
class Concat:
    """What a key is read from: several sources, one behind the other along `dim`, as `torch.cat` does."""

    sources: Sequence["str | Source | Concat"]
    dim: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.sources, (list, tuple)):
            sources = self.sources
        else:
            sources = ()
        if not sources or not all(isinstance(source, (str, Source, Concat)) for source in sources):
            raise ValueError(
                f"Concat of {self.sources!r}: give a list of keys of the checkpoint, or of Sources"
            )
        if type(self.dim) is not int:
            raise ValueError(f"Concat along dim {self.dim!r}: give an integer")


TensorSource = Source | Concat
Renames = Mapping[str, str | TensorSource] | Callable[[str], str | TensorSource]


class KeyMapping:
    """From keys of a state to what is read from the checkpoint; `cast`: of all that have no `Source` of their own."""

    def __init__(self, mapping: Renames | None = None, *, cast: bool = False) -> None:
        self._mapping = mapping
        self._cast = cast
        self._other_names = OtherNames()
        # what a user's function gave, which is called once per key
        self._sources: dict[str, TensorSource] = {}

    def look_among(self, keys: Iterable[str]) -> None:
        """keys: all of the checkpoint, under which is looked for what is saved under another name."""
        self._other_names = OtherNames(keys)
        self._sources.clear()

    @property
    def same(self) -> bool:
        """Whether no mapping was given."""
        return self._mapping is None

    def source(self, key: str) -> TensorSource:
        """What `key` is read from. Raises ValueError: a mapping that gives something else than a key."""
        if key not in self._sources:
            # a user's mapping: a function of all keys, or a dict of those that differ
            if callable(self._mapping):
                mapped = self._mapping(key)
            else:
                mapped = (self._mapping or {}).get(key, key)
            if not isinstance(mapped, (str, Source, Concat)):
                raise ValueError(
                    f"the mapping gives {mapped!r} for {key}; give a key of the checkpoint, a Source, or a Concat"
                )
            self._sources[key] = self._with_sources(mapped)
        return self._sources[key]

    def _with_sources(self, mapped: str | TensorSource) -> TensorSource:
        """The same with every plain key as a `Source`."""
        if isinstance(mapped, Concat):
            return replace(
                mapped, sources=[self._with_sources(source) for source in mapped.sources]
            )
        if isinstance(mapped, str):
            mapped = Source(mapped, self._cast)
        return replace(mapped, key=self._other_names.find(mapped.key))

    def source_of_array(self, path: str) -> TensorSource:
        """As `source`, by the path of an array of the state."""
        return self.source(key_of(path))

    def value_key(self, key: str) -> str:
        """The key of a value in the checkpoint. Raises ValueError: it is mapped as a tensor would be."""
        source = self.source(key)
        if isinstance(source, Concat) or source.index or source.shape is not None:
            raise ValueError(
                f"the mapping gives {source} for {key}, which is a value here: it has no parts "
                "and no shape; give its key alone"
            )
        return source.key

    def check(self, keys: Sequence[str]) -> None:
        """Raises ValueError: a mapping that names keys which are not among `keys`, those of all ranks."""
        if isinstance(self._mapping, Mapping) and (
            unknown := sorted(self._mapping.keys() - set(keys))
        ):
            raise ValueError(
                f"the mapping names {', '.join(unknown[:5])}, which no state has; it is of keys here to keys of "
                f"the checkpoint, and here are {', '.join(sorted(keys)[:5])}, …"
            )
