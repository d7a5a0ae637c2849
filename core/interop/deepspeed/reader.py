"""The keys of a ds_config.json, taken one by one, so that what nobody took can be told."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from core.interop.deepspeed.keys import IGNORED, IGNORED_SECTIONS, MAPPED, UNSUPPORTED, UNSUPPORTED_SECTIONS

COMMENT = re.compile(r"_|//|#|comments?$")


@dataclass(frozen=True)
class Told:
    """What became of one key. verdict: "mapped", "ignored" or "unsupported"; words: to what, or why."""

    key: str
    value: Any
    verdict: str
    words: str


class ConfigReader:
    """Takes keys one by one, so that what nobody took can be told."""

    def __init__(self, config: Mapping[str, Any], auto: Mapping[str, Any], ranks: int | None) -> None:
        self.left = dict(leaves(config))
        self.order = list(self.left)
        self.auto, self.ranks = auto, ranks
        self.told: dict[str, Told] = {}
        self.fields: dict[str, dict[str, Any]] = {}
        if unknown := [key for key in auto if self.left.get(key) != "auto"]:
            raise ValueError(f'auto={{{unknown[0]!r}: ...}}: the file does not say "auto" there; leave it out')

    def value(self, key: str, kind: type | None = None) -> Any:
        """What the file says, `auto` filled in; None: nothing, or "auto". Raises ValueError: not of this kind."""
        value = self.left.get(key)
        if value == "auto":
            value = self.auto.get(key)
        if value is None or kind is None:
            return value
        if kind is bool and not isinstance(value, bool):
            raise ValueError(f"{key}={value!r} is neither true nor false; give one of them")
        if kind in (int, float):
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or (kind is int and not float(value).is_integer()):
                raise ValueError(f"{key}={value!r} is not a{'n integer' if kind is int else ' number'}; give one")
        return kind(value)

    def tell(self, key: str, verdict: str, words: str, *, value: Any = "not given") -> None:
        """What became of `key`; value: of a key that was told of before."""
        value = self.left.pop(key, value)
        if value == "auto" and key in self.auto:
            words = f"{words} (auto)"
        self.told[key] = Told(key, value, verdict, words)

    def put(self, key: str, part: str, *, note: str = "", **fields: Any) -> None:
        """These fields come from `key`."""
        self.fields.setdefault(part, {}).update(fields)
        self.tell(key, "mapped", ", ".join(f"{part}.{name}={value}" for name, value in fields.items()) + note)

    def unfilled(self, key: str) -> bool:
        """Whether the file leaves `key` to Hugging Face's Trainer and nobody said what it is."""
        return self.left.get(key) == "auto" and key not in self.auto

    def simple(self, key: str, part: str, field: str, kind: type) -> None:
        """A key that is one of our fields."""
        value = self.value(key, kind)
        if value is not None:
            self.put(key, part, **{field: value})

    def rest(self) -> None:
        """Whatever no mapping took."""
        for key in list(self.left):
            value = self.left[key]
            if any(COMMENT.match(part) for part in key.split(".")):
                self.tell(key, "ignored", "a comment")
            elif value is None or (value == {} and key in _known()):
                self.tell(key, "ignored", "empty: as if it were not there")
            elif value == "auto":
                self.tell(key, "ignored", "left to Hugging Face's Trainer: our default or your flag holds")
            elif key in IGNORED or (why := _section(key, IGNORED_SECTIONS)) is not None:
                self.tell(key, "ignored", IGNORED.get(key) or why or "")
            elif key in UNSUPPORTED or _section(key, UNSUPPORTED_SECTIONS) is not None:
                self._unsupported(key, value)
            else:
                near = _nearest(key)
                self.tell(key, "unsupported", "unknown key" + (f"; did you mean {near}?" if near else ""))

    def _unsupported(self, key: str, value: Any) -> None:
        why = UNSUPPORTED.get(key) or _section(key, UNSUPPORTED_SECTIONS) or ""
        parts = key.split(".")
        sections = [".".join(parts[:n]) for n in range(1, len(parts))]
        switches = [f"{section}.{name}" for section in sections for name in ("enabled", "device")]
        all_values = {told.key: told.value for told in self.told.values()} | self.left
        off = value in (False, None, 0, "none", "None") or (key.endswith("hpz_partition_size") and value == 1)
        if off or any(all_values.get(switch, True) in (False, "none", None) for switch in switches):
            self.tell(key, "ignored", "it is off")
        else:
            self.tell(key, "unsupported", why)


def leaves(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Every value with its path; an empty section is one."""
    found: list[tuple[str, Any]] = []
    for key, value in config.items():
        inside = isinstance(value, Mapping) and value
        found += leaves(value, f"{prefix}{key}.") if inside else [(f"{prefix}{key}", value)]
    return found


def _section(key: str, sections: Mapping[str, str]) -> str | None:
    return next((why for name, why in sections.items() if key == name or key.startswith(f"{name}.")), None)


def _nearest(key: str) -> str | None:
    """The same key in another section, or one that is written alike."""
    known = _known()
    inside = [k for k in known if key.endswith(f".{k}")]
    alike = get_close_matches(key, known, n=1, cutoff=0.75)
    elsewhere = [k for k in known if k.rpartition(".")[2] == key.rpartition(".")[2]]
    beside = [k for k in elsewhere if k.partition(".")[0] == key.partition(".")[0]]
    return next(iter([*inside, *beside, *alike, *elsewhere]), None)


def _known() -> list[str]:
    tables = (IGNORED, IGNORED_SECTIONS, UNSUPPORTED, UNSUPPORTED_SECTIONS)
    keys = [*MAPPED, *(key for table in tables for key in table)]
    return list(dict.fromkeys([*keys, *(key.rpartition(".")[0] for key in keys if "." in key)]))
