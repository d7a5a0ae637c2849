"""Python numbers of one parameter that notice when they are put together with another's.

`sum(p.numel() for p in ...)` and `max(p.norm().item() for p in ...)` are of the parameters that this rank holds.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Parameter

_SUMS = ("__add__", "__radd__")
_COMPARISONS = ("__lt__", "__gt__", "__le__", "__ge__")
_SCALINGS = ("__mul__", "__rmul__", "__truediv__", "__pow__", "__abs__")


class OfParameter:
    """Beside int or float: whose number it is, and whom to tell."""

    parameter: Parameter
    report: Callable[[], None]


def _following(base: type, name: str, *, combines: bool) -> Callable[..., Any]:
    plain = getattr(base, name)

    def method(self: Any, *others: Any) -> Any:
        result = plain(self, *others)
        if combines and any(
            isinstance(x, OfParameter) and x.parameter is not self.parameter for x in others
        ):
            self.report()
        if type(result) in (int, float):
            return of_parameter(result, self.parameter, self.report)
        return result

    return method


def plain_copy(self: Any, *protocol: Any) -> Any:
    """A file has a plain number."""
    base = type(self).__mro__[1]
    return base, (base(self),)


# as `torch.load` reads them, by default, where a program has saved some of these
torch.serialization.add_safe_globals([int, float])


def _class(base: type, combining: tuple[str, ...]) -> type:
    methods: dict[str, Any] = {name: _following(base, name, combines=True) for name in combining}
    methods |= {name: _following(base, name, combines=False) for name in _SCALINGS}
    return type(
        base.__name__,
        (base, OfParameter),
        methods | {"__reduce_ex__": plain_copy, "__module__": "builtins"},
    )


# widths are compared for other reasons than their largest: of counts only sums are noticed
_CLASS_OF = {int: _class(int, _SUMS), float: _class(float, (*_SUMS, *_COMPARISONS))}


def of_parameter(number: Any, parameter: Parameter, report: Callable[[], None]) -> Any:
    """`number`, an int or a float, as one that calls `report()` where it meets another parameter's."""
    result = _CLASS_OF[type(number)](number)
    result.parameter = parameter
    result.report = report
    return result
