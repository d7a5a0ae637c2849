"""JSON that is written in one way only and read with suspicion."""

import json
import zlib
from typing import Any


def canonical_json(value: Any) -> bytes:
    """The one text of a JSON value: sorted keys, no spaces. NaN is no JSON: ValueError."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def parse_json(data: bytes, file: str) -> Any:
    """The value of a JSON file. ValueError naming `file`: it is damaged."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: no JSON ({error}); restore the file from a copy, or use another step") from None


def seal(value: dict[str, Any]) -> bytes:
    """The text of a JSON object with `crc`, the CRC-32 of its canonical text without it."""
    return canonical_json(value | {"crc": zlib.crc32(canonical_json(value))})


def unseal(data: bytes, file: str) -> dict[str, Any]:
    """The inverse of `seal`, `crc` left out. ValueError naming `file`: damaged, be it by one space."""
    value = parse_json(data, file)
    if not isinstance(value, dict):
        raise ValueError(f"{file}: a JSON {type(value).__name__}, not an object; use another step")
    said = value.pop("crc", None)
    if data != seal(value):
        found = zlib.crc32(canonical_json(value))
        raise ValueError(f"{file}: its crc is {said}, its content has {found}: damaged; use another step")
    return value
