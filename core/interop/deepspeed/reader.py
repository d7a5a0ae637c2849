"""Reads a ds_config.json key by key, and remembers what became of each: no key is silently dropped."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from core.interop.deepspeed.keys import (
    IGNORED,
    IGNORED_SECTIONS,
    MAPPED,
    UNSUPPORTED,
    UNSUPPORTED_SECTIONS,
)

# the value of a key that the file does not have
NOT_GIVEN = "not given"
COMMENT = re.compile(r"_|//|#|comments?$")


@dataclass(frozen=True)
class Told:
    """The verdict on one key: "mapped", "ignored" or "unsupported"; words: to which field, or why."""

    key: str
    value: Any
    verdict: str
    words: str


class ConfigReader:
    """The keys of a file, those that no section has read yet, and the verdicts so far.

    auto: what keys stand for that the file leaves to Hugging Face's Trainer as "auto". fields: section of a run ->
    field
    -> value. verdicts: by key.
    """

    def __init__(
        self, config: Mapping[str, Any], auto: Mapping[str, Any], data_ranks: int | None
    ) -> None:
        self.unread = dict(leaves(config))
        self.order = list(self.unread)
        self.auto = auto
        self.data_ranks = data_ranks
        self.verdicts: dict[str, Told] = {}
        self.fields: dict[str, dict[str, Any]] = {}
        unknown = [key for key in auto if self.unread.get(key) != "auto"]
        if unknown:
            raise ValueError(
                f'auto={{{unknown[0]!r}: ...}}: the file does not say "auto" there; leave it out'
            )

    def value(self, key: str, kind: type | None = None) -> Any:
        """The value in the file, or what "auto" stands for; None if unknown. Raises ValueError: another kind."""
        value = self.unread.get(key)
        if value == "auto":
            value = self.auto.get(key)
        if value is None or kind is None:
            return value
        if kind is bool and not isinstance(value, bool):
            raise ValueError(f"{key}={value!r} is neither true nor false; give one of them")
        # JSON has one kind of number, and bool is an int in Python
        if kind in (int, float):
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or (kind is int and not float(value).is_integer()):
                noun = "an integer" if kind is int else "a number"
                raise ValueError(f"{key}={value!r} is not {noun}; give one")
        return kind(value)

    def report(self, key: str, verdict: str, words: str, *, value: Any = NOT_GIVEN) -> None:
        """Give the verdict on a key. value: of a key that had a verdict before."""
        # a key has one verdict; the last one counts (Muon takes the ZeRO stage back)
        value = self.unread.pop(key, value)
        if value == "auto" and key in self.auto:
            words = f"{words} (auto)"
        self.verdicts[key] = Told(key, value, verdict, words)

    def report_support(self, key: str, is_supported: bool, reason: str) -> None:
        """A key without a field here: "mapped" if its value is what is always done here, else "unsupported"."""
        self.report(key, "mapped" if is_supported else "unsupported", reason)

    def map_to(self, key: str, section: str, *, note: str = "", **fields: Any) -> None:
        """A key that sets these fields of a section of the run."""
        self.fields.setdefault(section, {}).update(fields)
        settings = [f"{section}.{name}={value}" for name, value in fields.items()]
        self.report(key, "mapped", ", ".join(settings) + note)

    def is_unresolved_auto(self, key: str) -> bool:
        """Whether the file leaves `key` to Hugging Face's Trainer, and `auto` does not say what it stands for."""
        return self.unread.get(key) == "auto" and key not in self.auto

    def map_field(self, key: str, section: str, field: str, kind: type) -> None:
        """A key that is one of our fields under another name."""
        value = self.value(key, kind)
        if value is not None:
            self.map_to(key, section, **{field: value})

    def report_unread(self) -> None:
        """Give a verdict on every key that no section has read."""
        # in the order of certainty: comments, empty values, "auto", known keys without effect, known ones with
        # another effect, and at last mistakes of spelling
        for key in list(self.unread):
            value = self.unread[key]
            if any(COMMENT.match(name) for name in key.split(".")):
                self.report(key, "ignored", "a comment")
            elif value is None or (value == {} and key in _known_keys()):
                self.report(key, "ignored", "empty: as if it were not there")
            elif value == "auto":
                self.report(
                    key, "ignored", "left to Hugging Face's Trainer: our default or your flag holds"
                )
            elif key in IGNORED or _section_reason(key, IGNORED_SECTIONS) is not None:
                self.report(
                    key, "ignored", IGNORED.get(key) or _section_reason(key, IGNORED_SECTIONS) or ""
                )
            elif key in UNSUPPORTED or _section_reason(key, UNSUPPORTED_SECTIONS) is not None:
                self._report_unsupported(key, value)
            else:
                nearest = _nearest_key(key)
                hint = f"; did you mean {nearest}?" if nearest else ""
                self.report(key, "unsupported", f"unknown key{hint}")

    def _report_unsupported(self, key: str, value: Any) -> None:
        """A key that would change what is computed; without an effect if it, or a section around it, is off."""
        reason = UNSUPPORTED.get(key) or _section_reason(key, UNSUPPORTED_SECTIONS) or ""
        names = key.split(".")
        sections = [".".join(names[:depth]) for depth in range(1, len(names))]
        switches = [f"{section}.{name}" for section in sections for name in ("enabled", "device")]
        all_values = {
            verdict.key: verdict.value for verdict in self.verdicts.values()
        } | self.unread
        section_is_off = any(
            all_values.get(switch, True) in (False, "none", None) for switch in switches
        )
        is_off = value in (False, None, 0, "none", "None") or (
            key.endswith("hpz_partition_size") and value == 1
        )
        if is_off or section_is_off:
            self.report(key, "ignored", "it is off")
        else:
            self.report(key, "unsupported", reason)


def leaves(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Every value with its path; an empty section is one."""
    pairs: list[tuple[str, Any]] = []
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            pairs += leaves(value, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", value))
    return pairs


def _section_reason(key: str, sections: Mapping[str, str]) -> str | None:
    for section, reason in sections.items():
        if key == section or key.startswith(f"{section}."):
            return reason
    return None


def _nearest_key(key: str) -> str | None:
    """The same key in another section, or one that is written alike."""
    known = _known_keys()
    section = key.partition(".")[0]
    last_name = key.rpartition(".")[2]
    nested_too_deep = [other for other in known if key.endswith(f".{other}")]
    same_name = [other for other in known if other.rpartition(".")[2] == last_name]
    same_section = [other for other in same_name if other.partition(".")[0] == section]
    similar = get_close_matches(key, known, n=1, cutoff=0.75)
    return next(iter([*nested_too_deep, *same_section, *similar, *same_name]), None)


def _known_keys() -> list[str]:
    tables = (IGNORED, IGNORED_SECTIONS, UNSUPPORTED, UNSUPPORTED_SECTIONS)
    keys = list(MAPPED)
    for table in tables:
        keys += table
    sections = [key.rpartition(".")[0] for key in keys if "." in key]
    return list(dict.fromkeys([*keys, *sections]))
