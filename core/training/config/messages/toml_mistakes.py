"""What is wrong with a file that is no TOML: the field, the line as it stands, and how it is written."""

import json
import re
from collections.abc import Sequence

from core.training.config.messages.deepspeed import AS_COMMAND, is_deepspeeds

_PLACE = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")
_SETTING = re.compile(r"^\s*([\w.\"'-]+)\s*=\s*(.*?)\s*(?:#.*)?$")
_HEADER = re.compile(r"^\s*\[\[?\s*([\w.-]+)")
_AS_TOML = "a run is described in TOML: [optimizer], and below it lr = 3e-4"
_SMALL = {"True": "true", "False": "false"}
_NOTHING = ("None", "null", "none", "nil", "~", "")


def explained(text: str, error: ValueError) -> str:
    """`error` of tomllib in the words of the file: what is written where, and what to write instead."""
    place = _PLACE.search(str(error))
    lines = text.split("\n")
    number = int(place[1]) if place and place[1] else len(lines)
    words = _PLACE.sub("", str(error))
    if text.lstrip().startswith("{"):
        try:
            deepspeeds = is_deepspeeds(json.loads(text))
        except ValueError:
            deepspeeds = False
        return f"it is DeepSpeed's; {AS_COMMAND}" if deepspeeds else f"it is JSON; {_AS_TOML}"
    line = lines[number - 1] if number <= len(lines) else ""
    remedy = _of_line(line, words, lines[: number - 1])
    if remedy:
        return f"line {number}: {remedy}"
    return str(error)


def _of_line(line: str, words: str, above: Sequence[str]) -> str:
    """The remedy for one line; empty: none is known."""
    header = _HEADER.match(line)
    setting = _SETTING.match(line)
    if header:
        if words.startswith("Cannot declare"):
            headers = [earlier[1] if (earlier := _HEADER.match(text)) else "" for text in above]
            first = headers.index(header[1]) + 1
            return f"[{header[1]}] is there twice, first in line {first}; put its fields together"
        return f"{line.strip()} is no header of a part; write [{header[1]}], and its fields in the lines below"
    if setting:
        return _of_setting(setting[1], setting[2], words, above)
    if re.match(r"^\s*[\w.-]+\s*:", line):
        return f"{line.strip()!r} looks like YAML; {_AS_TOML}"
    if line.strip():
        return f"{line.strip()!r} is no setting (name = value) and no header ([part])"
    return ""


def _of_setting(key: str, value: str, words: str, above: Sequence[str]) -> str:
    section = ""
    lines: list[int] = []
    for number, other in enumerate(above, 1):
        if header := _HEADER.match(other):
            section = header[1]
            lines = []
        elif (earlier := _SETTING.match(other)) and earlier[1] == key:
            lines.append(number)
    name = f"{section}.{key}" if section else key
    if words.startswith("Cannot overwrite") and lines:
        return f"{name} is there twice, first in line {lines[0]}; leave one out"
    if value in _SMALL:
        return f"{name} = {value}: write {_SMALL[value]}, in small letters"
    if value in _NOTHING:
        return f'{name} = {value}: write "None" in quotes, or leave the line out'
    if re.fullmatch(r"[A-Za-z_/.~][\w./~:-]*", value):
        return f'{name} = {value}: a text stands in quotes; write "{value}"'
    return f"{name} = {value}: {words[:1].lower()}{words[1:]}"
