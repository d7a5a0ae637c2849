"""Values beside the arrays as JSON, and back. What JSON has no word for is `{"$type": name, "value": …}`: data that
one small function reads, never code."""

import base64
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

TYPE = "$type"
# types that JSON has as they are: a list of these, which may be long, is checked by one set of types
SAME = {int, str, bool, type(None)}


@dataclass(frozen=True)
class _Handler:
    name: str
    to_json: Callable[[Any], Any]
    from_json: Callable[[Any], Any]


_BY_TYPE: dict[type, _Handler] = {}
_BY_NAME: dict[str, _Handler] = {}


def register(
    kind: type,
    to_json: Callable[[Any], Any],
    from_json: Callable[[Any], Any],
    *,
    name: str | None = None,
) -> None:
    """Let values of exactly this type be saved and loaded; in every process that does either.

    to_json: its content, of types that can be saved. from_json: the inverse. name: what the file calls the type (by
    default its qualified name without the module's, which may move). Registering again replaces the functions.
    Raises ValueError: a name that another type has.
    """
    if name is None:
        name = kind.__qualname__
    owner = kind
    for registered_type, handler in _BY_TYPE.items():
        if handler.name == name:
            owner = registered_type
    same_type = (owner.__module__, owner.__qualname__) == (kind.__module__, kind.__qualname__)
    if not same_type or name in _RESERVED:
        raise ValueError(
            f"register({kind!r}): {owner!r} is called {name!r} in checkpoints; give name=..."
        )
    # a module that was loaded again has a new type of the same name
    _BY_TYPE.pop(owner, None)
    _BY_TYPE[kind] = _BY_NAME[name] = _Handler(name, to_json, from_json)


def encode(value: Any) -> Any:
    """A JSON value. Subclasses of str, int, float, list and dict become those; all else reads back in its type.

    Raises TypeError: a type that nobody registered. ValueError: what its function says.
    """
    if (handler := _BY_TYPE.get(type(value))) is not None:
        return {TYPE: handler.name, "value": encode(handler.to_json(value))}
    if isinstance(value, np.generic) and not isinstance(value, (str, bytes)):
        return {TYPE: "numpy", "value": [value.dtype.name, encode(_number(value))]}
    if isinstance(value, float) and not math.isfinite(value):
        return {TYPE: "float", "value": repr(float(value))}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        if set(map(type, value)) <= SAME:
            return list(value)
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and TYPE not in value:
            return {key: encode(item) for key, item in value.items()}
        # other keys, or a key that looks like a tag: a list of pairs, sorted so that all ranks write the same
        pairs = [[encode(key), encode(item)] for key, item in value.items()]
        return {TYPE: "dict", "value": sorted(pairs, key=repr)}
    raise TypeError(f"{type(value).__name__} cannot be saved")


def decode(value: Any) -> Any:
    """The inverse of `encode`. Raises ValueError: a type that is not registered here, a value that is none of it."""
    if isinstance(value, list):
        if set(map(type, value)) <= SAME:
            return value
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if TYPE not in value:
        return {key: decode(item) for key, item in value.items()}
    name = value[TYPE]
    content = decode(value.get("value"))
    if not isinstance(name, str) or (name not in _BY_NAME and name not in _RESERVED):
        raise ValueError(
            f"it is of type {name!r}, which is unknown here: call dist_checkpointing.register(type, to_json, "
            "from_json) before, as the program that saved it did"
        )
    try:
        if name in _RESERVED:
            return _RESERVED[name](content)
        return _BY_NAME[name].from_json(content)
    except Exception as error:
        raise ValueError(f"{content!r} is no {name} ({type(error).__name__}: {error})") from error


def tagged(value: Any) -> bool:
    """Whether `encode` had to name a type: a reader of format 1 would take the tag for the value."""
    if isinstance(value, list):
        return not set(map(type, value)) <= SAME and any(map(tagged, value))
    return isinstance(value, dict) and (TYPE in value or any(map(tagged, value.values())))


def _number(scalar: np.generic) -> Any:
    """A Python number of the same value. Raises TypeError: Python has none, as of a longdouble."""
    number = scalar.item()
    # numpy gives a longdouble back as itself
    is_own_item = isinstance(number, np.generic)
    if scalar.dtype.kind not in "biufc" or is_own_item:
        raise TypeError(f"numpy.{scalar.dtype.name} cannot be saved")
    return number


def _numpy_scalar(content: Any) -> np.generic:
    name, number = content
    dtype = np.dtype(name)
    if dtype.kind not in "biufc":
        raise ValueError(f"{name} is no number")
    return dtype.type(number)


def _special_float(text: str) -> float:
    if text not in ("inf", "-inf", "nan"):
        raise ValueError("inf, -inf or nan expected")
    return float(text)


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch {torch.__version__} has no such dtype")
    return dtype


def _bytes_to_text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


def _text_to_bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


# tags of `encode` itself, which no registered type may take
_RESERVED: dict[str, Callable[[Any], Any]] = {
    "numpy": _numpy_scalar,
    "float": _special_float,
    "dict": dict,
}

register(tuple, list, tuple)
register(complex, lambda number: [number.real, number.imag], lambda content: complex(*content))
register(bytes, _bytes_to_text, _text_to_bytes)
register(bytearray, _bytes_to_text, lambda text: bytearray(_text_to_bytes(text)))
register(torch.Size, list, torch.Size, name="torch.Size")
register(
    torch.dtype, lambda dtype: str(dtype).removeprefix("torch."), _torch_dtype, name="torch.dtype"
)
