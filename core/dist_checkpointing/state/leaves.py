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
SAME = {int, str, bool, type(None)}  # types that JSON has: a list of them, which may be long, is looked at once


@dataclass(frozen=True)
class _Handler:
    name: str
    to_json: Callable[[Any], Any]
    from_json: Callable[[Any], Any]


_BY_TYPE: dict[type, _Handler] = {}
_BY_NAME: dict[str, _Handler] = {}


def register(
    kind: type, to_json: Callable[[Any], Any], from_json: Callable[[Any], Any], *, name: str | None = None
) -> None:
    """Let values of exactly this type be saved and loaded; in every process that does either.

    to_json: its content, of types that can be saved. from_json: the inverse. name: what the file calls the type (by
    default its qualified name without the module's, which may move). Registering again replaces the functions.
    Raises ValueError: a name that another type has.
    """
    name = kind.__qualname__ if name is None else name
    owner = next((other for other, handler in _BY_TYPE.items() if handler.name == name), kind)
    if (owner.__module__, owner.__qualname__) != (kind.__module__, kind.__qualname__) or name in _RESERVED:
        raise ValueError(f"register({kind!r}): {owner!r} is called {name!r} in checkpoints; give name=...")
    _BY_TYPE.pop(owner, None)  # a module that was loaded again has a new type of the same name
    _BY_TYPE[kind] = _BY_NAME[name] = _Handler(name, to_json, from_json)


def encode(value: Any) -> Any:
    """A JSON value. Subclasses of str, int, float, list and dict become those; all else is as it was, or refused.

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
        return list(value) if set(map(type, value)) <= SAME else [encode(item) for item in value]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and TYPE not in value:
            return {key: encode(item) for key, item in value.items()}
        return {TYPE: "dict", "value": sorted(([encode(k), encode(v)] for k, v in value.items()), key=repr)}
    raise TypeError(f"{type(value).__name__} cannot be saved")


def decode(value: Any) -> Any:
    """The inverse of `encode`. Raises ValueError: a type that is not registered here, a value that is none of it."""
    if isinstance(value, list):
        return value if set(map(type, value)) <= SAME else [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if TYPE not in value:
        return {key: decode(item) for key, item in value.items()}
    name, content = value[TYPE], decode(value.get("value"))
    if not isinstance(name, str) or (name not in _BY_NAME and name not in _RESERVED):
        raise ValueError(
            f"it is of type {name!r}, which is unknown here: call dist_checkpointing.register(type, to_json, "
            "from_json) before, as the program that saved it did"
        )
    try:
        return _RESERVED[name](content) if name in _RESERVED else _BY_NAME[name].from_json(content)
    except Exception as error:
        raise ValueError(f"{content!r} is no {name} ({type(error).__name__}: {error})") from error


def tagged(value: Any) -> bool:
    """Whether `encode` had to name a type: a reader of format 1 would take the tag for the value."""
    if isinstance(value, list):
        return not set(map(type, value)) <= SAME and any(map(tagged, value))
    return isinstance(value, dict) and (TYPE in value or any(map(tagged, value.values())))


def _number(scalar: np.generic) -> Any:
    """A Python number of the same value. Raises TypeError: there is none."""
    number = scalar.item()
    if scalar.dtype.kind not in "biufc" or isinstance(number, np.generic):  # a longdouble is its own item
        raise TypeError(f"numpy.{scalar.dtype.name} cannot be saved")
    return number


def _scalar(content: Any) -> np.generic:
    name, number = content
    dtype = np.dtype(name)
    if dtype.kind not in "biufc":
        raise ValueError(f"{name} is no number")
    return dtype.type(number)


def _finite_or_not(text: str) -> float:
    if text not in ("inf", "-inf", "nan"):
        raise ValueError("inf, -inf or nan expected")
    return float(text)


def _dtype(name: str) -> torch.dtype:
    if not isinstance(found := getattr(torch, name, None), torch.dtype):
        raise ValueError(f"torch {torch.__version__} has no such dtype")
    return found


def _text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


def _data(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


_RESERVED: dict[str, Callable[[Any], Any]] = {"numpy": _scalar, "float": _finite_or_not, "dict": dict}

register(tuple, list, tuple)
register(complex, lambda z: [z.real, z.imag], lambda parts: complex(*parts))
register(bytes, _text, _data)
register(bytearray, _text, lambda text: bytearray(_data(text)))
register(torch.Size, list, torch.Size, name="torch.Size")
register(torch.dtype, lambda dtype: str(dtype).removeprefix("torch."), _dtype, name="torch.dtype")
