"""What a program's code does with a number that it has just read: `float(...)` gives one that nobody can follow."""

import dis
from types import FrameType

# as a value under a name
_BY_NAME = ("MAP_ADD", "STORE_SUBSCR", "BUILD_MAP", "BUILD_CONST_KEY_MAP")
_TOGETHER = ("LIST_APPEND", "SET_ADD", "YIELD_VALUE", "RETURN_VALUE")
_FURTHEST = 25


def is_kept_by_name(frame: FrameType | None) -> bool:
    """Whether the number goes into a mapping."""
    if frame is None:
        return False
    ahead = [i for i in dis.get_instructions(frame.f_code) if i.offset > frame.f_lasti]
    for instruction in ahead[:_FURTHEST]:
        if instruction.opname in (*_BY_NAME, *_TOGETHER):
            return instruction.opname in _BY_NAME
        if instruction.opname == "BINARY_OP" and instruction.argrepr.endswith("="):
            return False
    return False
