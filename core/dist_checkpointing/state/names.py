"""What is read for each key of a state: what has that key, or what the `mapping` of a load says."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from core.dist_checkpointing.format.keys import key_of


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
        parts = self.sources if isinstance(self.sources, (list, tuple)) else ()
        if not parts or not all(isinstance(part, (str, Source, Concat)) for part in parts):
            raise ValueError(f"Concat of {self.sources!r}: give a list of keys of the checkpoint, or of Sources")
        if type(self.dim) is not int:
            raise ValueError(f"Concat along dim {self.dim!r}: give an integer")


Form = Source | Concat
Renames = Mapping[str, str | Form] | Callable[[str], str | Form]


class Names:
    """Keys of a state to what is read from the checkpoint; `cast`: of all that have no `Source` of their own."""

    def __init__(self, mapping: Renames | None = None, *, cast: bool = False) -> None:
        self._mapping, self._cast = mapping, cast
        self._found: dict[str, Form] = {}

    @property
    def same(self) -> bool:
        """Whether all keys are those of the checkpoint."""
        return self._mapping is None

    def form(self, key: str) -> Form:
        """Raises ValueError: a mapping that gives something else than a key."""
        if key not in self._found:
            found = self._mapping(key) if callable(self._mapping) else (self._mapping or {}).get(key, key)
            if not isinstance(found, (str, Source, Concat)):
                raise ValueError(
                    f"the mapping gives {found!r} for {key}; give a key of the checkpoint, a Source, or a Concat"
                )
            self._found[key] = self._named(found)
        return self._found[key]

    def _named(self, found: str | Form) -> Form:
        if isinstance(found, Concat):
            return replace(found, sources=[self._named(part) for part in found.sources])
        return found if isinstance(found, Source) else Source(found, self._cast)

    def of_array(self, path: str) -> Form:
        """By the path of an array here."""
        return self.form(key_of(path))

    def key(self, key: str) -> str:
        """Of a value in the checkpoint. Raises ValueError: it is mapped as a tensor would be."""
        form = self.form(key)
        if isinstance(form, Concat) or form.index or form.shape is not None:
            raise ValueError(f"the mapping gives {form} for {key}, which is a value here: it has no parts")
        return form.key

    def check(self, keys: Sequence[str]) -> None:
        """Raises ValueError: names that nobody has among `keys`, those of all ranks."""
        if isinstance(self._mapping, Mapping) and (unknown := sorted(self._mapping.keys() - set(keys))):
            raise ValueError(
                f"the mapping names {', '.join(unknown[:5])}, which no state has; it is of keys here to keys of "
                f"the checkpoint, and here are {', '.join(sorted(keys)[:5])}, …"
            )
