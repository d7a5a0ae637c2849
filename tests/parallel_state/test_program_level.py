"""Which line a warning is of."""

import sys
import warnings

from core.parallel_state.by_hand.functions import frame_of_program, program_level


def told_from_inside():
    """By code of ours, which torch's has called, which a program has called."""
    ours = {"__name__": "core.some.room", "warnings": warnings, "program_level": program_level}
    exec("def tell():\n    warnings.warn('a word', stacklevel=program_level())", ours)
    torchs = {"__name__": "torch.nn.modules.module", "tell": ours["tell"]}
    exec("def call():\n    tell()", torchs)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torchs["call"]()
    return found[0]


def test_a_warning_is_of_the_line_of_the_program():
    warning = told_from_inside()
    assert warning.filename == __file__
    assert warning.lineno == told_from_inside.__code__.co_firstlineno + 8


def test_code_out_of_a_text_may_have_no_name():
    space = {"__name__": None, "sys": sys, "frame_of_program": frame_of_program}
    exec("found = frame_of_program(sys._getframe())", space)
    assert space["found"].f_globals is space
