"""JSON that is written in one way only, so that it has a checksum, and read with suspicion."""

import json
import math
import zlib
from typing import Any

from core.dist_checkpointing.storage.fs import MAX_JSON_BYTES


def canonical_json(value: Any) -> bytes:
    """The one text of a JSON value: sorted keys, no spaces. ValueError: NaN is no JSON; more than a reader takes."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    if len(text) > MAX_JSON_BYTES:
        raise ValueError(
            f"{len(text)} bytes of JSON, readers take {MAX_JSON_BYTES}: save fewer arrays or objects at a time"
        )
    return text


def parse_json(data: bytes, file: str) -> Any:
    """The value of a JSON file. ValueError naming `file`: it is damaged, or too large (parsed it is larger still)."""
    if len(data) > MAX_JSON_BYTES:
        raise ValueError(
            f"{file} has {len(data)} bytes, of JSON at most {MAX_JSON_BYTES} are read; use another step"
        )
    try:
        return json.loads(data, parse_float=_finite_float, parse_constant=_finite_float)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{file}: no JSON ({error}); restore the file from a copy, or use another step"
        ) from None


def _finite_float(text: str) -> float:
    """The float of a number's text. ValueError: NaN or infinite, which could not be written again."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:40]} is not finite")
    return number


def seal(value: dict[str, Any]) -> bytes:
    """The text of a JSON object with `crc`, the CRC-32 of its canonical text without it."""
    return canonical_json(value | {"crc": zlib.crc32(canonical_json(value))})


def unseal(data: bytes, file: str) -> dict[str, Any]:
    """The inverse of `seal`, `crc` left out. ValueError naming `file`: damaged, be it by one space."""
    value = parse_json(data, file)
    if not isinstance(value, dict):
        raise ValueError(f"{file}: a JSON {type(value).__name__}, not an object; use another step")
    stated_crc = value.pop("crc", None)
    # the whole text is compared, not the number alone: a byte that JSON does not mind would else pass unnoticed
    if data != seal(value):
        actual_crc = zlib.crc32(canonical_json(value))
        raise ValueError(
            f"{file}: its crc is {stated_crc}, its content has {actual_crc}: damaged; use another step"
        )
    return value
