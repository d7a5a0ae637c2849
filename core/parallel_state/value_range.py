"""Integers that number classes, tokens or positions are compared with how many there are."""

import torch
from torch import Tensor

from core.parallel_state.environment import reading_waits


def check_range(name: str, values: Tensor, size: int, *, ignored: int | None = None) -> None:
    """Every value in [0, size), or equal to `ignored`: tables and losses would take some others silently.

    On the CPU values are compared; on an accelerator it is asserted without waiting. Raises ValueError: one is not.
    """
    if values.numel() == 0 or values.is_meta or torch.compiler.is_exporting():
        return
    if reading_waits(values.device):
        is_valid = (values >= 0) & (values < size)
        if ignored is not None:
            is_valid |= values == ignored
        torch._assert_async(is_valid.all(), f"{name} out of range")
        return
    lowest, highest = torch.aminmax(values)
    if lowest >= 0 and highest < size:
        return
    # ignored labels (-100) are below 0: only now, on the way to an error, are they told apart
    invalid = values[(values < 0) | (values >= size)]
    if ignored is not None:
        invalid = invalid[invalid != ignored]
    if invalid.numel():
        if ignored is None:
            second_value = ""
        else:
            second_value = f", or {ignored} to leave a token out"
        raise ValueError(f"{name} holds {int(invalid[0])}, valid are 0 to {size - 1}{second_value}")
