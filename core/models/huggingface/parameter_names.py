"""What Hugging Face's names of parameters, or patterns of them, are among ours."""

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from core.models.huggingface.families import FAMILIES
from core.models.huggingface.rows import Row, rows_of

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
# as many as a model may have: names beyond those of a model are matched by no row of it
_EXPERTS = 512
_TABLE, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
_SHOWN = 4


def told_of(pattern: str, names: Iterable[str]) -> str:
    """What is said of a pattern that matches none of the model's `names`; empty: it is not Hugging Face's either."""
    known = [name for name in names if ".adapter." not in name]
    if any(fnmatchcase(name, f"{pattern}.*") for name in known):
        return f"; give '{pattern}.*'"
    theirs = _theirs(known)
    # q_proj is meant as a part of a name
    for form in (pattern, f"{pattern}.*", f"*{pattern}*"):
        found = {
            ours: [name for name in row if fnmatchcase(name, form)] for ours, row in theirs.items()
        }
        ours = [name for name, matched in found.items() if matched]
        if ours:
            shown = _patterns(ours, known)
            more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
            said = f"; these names of Hugging Face's are {', '.join(shown[:_SHOWN])}{more} here"
            return said + _held_together({name: theirs[name] for name in ours}, found)
    return ""


def _theirs(names: list[str]) -> dict[str, tuple[str, ...]]:
    """Our name -> theirs, of the first family that has all of the model's parameters; empty: none has."""
    layers = sorted({int(match[1]) for name in names if (match := _LAYER.match(name))})
    # families of one table are one
    for table in {id(family.rows): family.rows for family in FAMILIES.values()}.values():
        rows: dict[str, Row] = rows_of(table, layers, _EXPERTS)
        if rows.keys() >= set(names):
            theirs = {name: rows[name].hf_names for name in names}
            if _HEAD not in theirs and _TABLE in theirs:  # one table for both
                theirs[_TABLE] += rows[_HEAD].hf_names
            return theirs
    return {}


def _patterns(found: list[str], names: list[str]) -> list[str]:
    """`found`, whole layers and what all layers have as one pattern each."""
    of_layer: dict[str, set[str]] = {}
    with_path: dict[str, set[str]] = {}
    for name in names:
        if match := _LAYER.match(name):
            of_layer.setdefault(match[1], set()).add(name)
            with_path.setdefault(match[2], set()).add(name)
    wanted = set(found)
    if of_layer and all(layer <= wanted for layer in of_layer.values()):
        patterns = {"decoder.layers.*": set().union(*of_layer.values())}
    else:
        patterns = {f"decoder.layers.{number}.*": layer for number, layer in of_layer.items()}
        patterns |= {f"decoder.layers.*.{path}": of_path for path, of_path in with_path.items()}
    shown = []
    for pattern, members in patterns.items():
        if members <= wanted and (members & set(found)):
            shown.append(pattern)
            found = [name for name in found if name not in members]
    return found + shown


def _held_together(theirs: dict[str, tuple[str, ...]], found: dict[str, list[str]]) -> str:
    """That a parameter of ours holds more of theirs than were named."""
    for ours, row in theirs.items():
        others = [name for name in row if name not in found[ours]]
        if others:
            parts = ", ".join(dict.fromkeys(name.split(".")[-2] for name in row))
            return f" ({ours.split('.')[-2]} holds {parts} together)"
    return ""
