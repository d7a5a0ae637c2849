"""Other names of what a checkpoint holds: of modules that were wrapped when it was saved, and DCP's of Adam's states.

A load that asks for a key which is not there takes what has it as its other name.
"""

import re
from collections.abc import Iterable, Iterator

from core.dist_checkpointing.state.derive import MAIN, MODEL
from core.parallel_state.modules import without_wrappers

# of torch's get_state_dict, nested (state/NAME/exp_avg) or flat (state.NAME.exp_avg), as an import keeps them
_DCP = re.compile(r"(.*/|)state[/.](.+)[/.](exp_avg|exp_avg_sq|step)")


def as_saved_here(key: str) -> str:
    """`optimizer/state/NAME/exp_avg`, of DCP, as a save of torch's AdamW here has it: `optimizer/exp_avg/NAME`."""
    match = _DCP.fullmatch(key)
    return f"{match[1]}{match[3]}/{match[2]}" if match else key


class OtherNames:
    """From keys that a load asks for to those that the checkpoint has."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._keys = frozenset(keys)
        self._key_of: dict[str, str] = {}
        ambiguous = set()
        for key in self._keys:
            for name, meant in _names(key):
                if self._key_of.setdefault(name, meant) != meant:
                    ambiguous.add(name)
        for name in ambiguous:
            del self._key_of[name]

    def find(self, key: str) -> str:
        """The key of the checkpoint; `key` itself where it is there, or where nothing has it as its other name."""
        if key in self._keys:
            return key
        plain = without_wrappers(key)
        if plain in self._keys:
            return plain
        return self._key_of.get(plain, key)


def _names(key: str) -> Iterator[tuple[str, str]]:
    """(other name, what it means) of a key that has some."""
    plain = without_wrappers(key)
    if plain != key:
        yield plain, key
        # a main weight that is not stored is read from its weight
        if key.startswith(MODEL):
            yield MAIN + plain.removeprefix(MODEL), MAIN + key.removeprefix(MODEL)
    other = as_saved_here(plain)
    if other != plain:
        yield other, key
