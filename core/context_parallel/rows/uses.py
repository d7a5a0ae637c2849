"""What a program does with a number that it has just read, as its code says: `if loss.item() > limit:`.

A number that told of itself would be no float to those who write files.
"""

import dis
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import CodeType, FrameType

from core.parallel_state.by_hand.functions import frame_of_program

_Line = list[dis.Instruction]
# functions that return what they read, at most
_DEPTH = 4


def is_compared() -> bool:
    """Whether what the call under way in the program gives is ordered in its line, or by the name that it gets."""
    return _is_used(_orders)


def is_rate() -> bool:
    """Whether a quotient, a power or a root is made of it."""
    return _is_used(_divides)


def is_logarithm() -> bool:
    """Whether a logarithm is taken, which asks an int for no float."""
    return _is_used(_takes_logarithm)


def computes(frame: FrameType) -> bool:
    """Whether the code in `frame` does so itself, not a function that it calls (`np.arange(n)`, `sum(counts)`)."""
    return _operation_at(frame.f_code, frame.f_lasti) == "BINARY_OP"


def rounds(frame: FrameType) -> bool:
    """Whether its line makes whole numbers."""
    line, _ = _line_of_call(frame.f_code, frame.f_lasti)
    return _calls(line, "ceil", "floor", "int", "round")


def takes_root(frame: FrameType) -> bool:
    """Whether its line asks a function for one, or the like, and puts nothing into a tensor."""
    line, _ = _line_of_call(frame.f_code, frame.f_lasti)
    is_put = _calls(line, "tensor", "as_tensor", "Tensor", "full", "array", "asarray")
    return not is_put and _calls(line, "sqrt", "exp", "pow", "float", "cos", "sin", "tanh")


def _is_used(how: Callable[[_Line], bool]) -> bool:
    frame = frame_of_program(sys._getframe(1))
    for _ in range(_DEPTH):
        if frame is None:
            return False
        line, name = _line_of_call(frame.f_code, frame.f_lasti)
        if how(line):
            return True
        if name is not None:
            return bool(name) and _is_name_used(frame.f_code, name, how)
        frame = frame.f_back
    return False


@lru_cache(256)
def _operation_at(code: CodeType, place: int) -> str:
    # `place` may be that of a cache behind it
    before = [i.opname for i in dis.get_instructions(code) if i.offset <= place]
    return before[-1] if before else ""


@lru_cache(256)
def _line_of_call(code: CodeType, place: int) -> tuple[_Line, str | None]:
    """And the name that the line gives to something after it, "" where to none; None: it is returned."""
    # `place` may be that of a cache behind the call
    before = [i.offset for i in dis.get_instructions(code) if i.offset <= place]
    line = next((one for one in _lines(code) if any(i.offset in before[-1:] for i in one)), [])
    for instruction in (i for i in line if i.offset > place):
        if instruction.opname.startswith("RETURN"):
            return line, None
        if instruction.opname.startswith("STORE_"):
            return line, next(iter(_names(instruction)), "")
    return line, ""


@lru_cache(256)
def _is_name_used(code: CodeType, name: str, how: Callable[[_Line], bool]) -> bool:
    return any(
        how(line) and any(i.opname.startswith("LOAD_") and name in _names(i) for i in line)
        for line in _lines(code)
    )


def _orders(line: _Line) -> bool:
    return any(i.opname == "COMPARE_OP" and {"<", ">"} & {*i.argrepr} for i in line) or _calls(
        line, "min", "max", "sorted"
    )


def _divides(line: _Line) -> bool:
    quotients = ("/", "/=", "**", "**=")
    return any(i.opname == "BINARY_OP" and i.argrepr in quotients for i in line) or _calls(
        line, "sqrt", "rsqrt"
    )


def _takes_logarithm(line: _Line) -> bool:
    return _calls(line, "log", "log2", "log10")


def _calls(line: _Line, *names: str) -> bool:
    return any(i.opname.startswith("LOAD_") and {*names} & {*_names(i)} for i in line)


def _names(instruction: dis.Instruction) -> tuple[str, ...]:
    """One, or of two that Python loads at once."""
    value = instruction.argval
    return tuple(x for x in (value if isinstance(value, tuple) else (value,)) if isinstance(x, str))


def _lines(code: CodeType) -> Iterator[_Line]:
    """Instructions by their line in the source; a loop's may be apart."""
    of_line: dict[int | None, _Line] = {}
    for instruction in dis.get_instructions(code):
        position = instruction.positions
        of_line.setdefault(position.lineno if position else None, []).append(instruction)
    yield from of_line.values()
