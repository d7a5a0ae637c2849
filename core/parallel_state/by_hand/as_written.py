"""Compiled parts of a model run as they were written, for a forward in which it is seen what they do."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

# FlexAttention makes all scores of a head where it is not compiled
_FEW_ROWS = 1024
# so many forwards run as they were written
_FIRST = 2


def is_compiled(module: nn.Module) -> bool:
    """Whether a part of it is compiled: its guards are on hooks and on classes of tensors."""
    return any(
        getattr(part, "_compiled_call_impl", None) or hasattr(part, "_orig_mod")
        for part in module.modules()
    )


def run_as_written(module: nn.Module, inputs: Sequence[Tensor], until: ExitStack) -> bool:
    """Whether all of it does, until `until` is closed: not if memory, or a long context, forbids it."""
    if "torch._dynamo" not in sys.modules:
        return True
    flex = "torch.nn.attention.flex_attention" in sys.modules
    is_long = flex and any(n > _FEW_ROWS for x in inputs for n in x.shape)
    as_written = AsWritten()
    if not is_long and _is_half_free(next(module.parameters()).device):
        # without asking torch, which forgets what was compiled by `torch._dynamo.reset()`
        as_written.hold()
        until.callback(as_written.end)
    return as_written.is_eager or not is_compiled(module)


class AsWritten:
    """Compiled functions run as they were written while a program holds tensors that are followed.

    Compiled code calls no function that could be heard, and some backends refuse the class of what is followed.
    """

    def __init__(self) -> None:
        self._stance: Any = None
        self._takes_any_class = False

    @property
    def is_eager(self) -> bool:
        """Whether nothing is compiled now."""
        return self._stance is not None

    def begin(self, count: int, device: torch.device) -> None:
        """Until `end`, in the first two calls, if `device` has the memory. count: of calls, from 1."""
        if not self._takes_any_class:
            self._takes_any_class = True
            _take_any_class()
        if count <= _FIRST and compiles() and _is_half_free(device):
            self.hold()

    def hold(self) -> None:
        """Until `end`, whatever memory there is. Several may hold at once, and end in any order.

        torch's stances must end in the order of a stack: what ends first would leave all code as it was written.
        """
        if self._stance is not None or (now := _change("force_eager")) is None:
            return
        before = now.prev
        if before.stance == "default":
            self._stance = now.stance
            self._stance.holders = 1
            return
        now.__exit__(None, None, None)
        # another's of this kind, or the program's own
        if hasattr(before, "holders"):
            self._stance = before
            before.holders += 1

    def end(self) -> None:
        """They are compiled again, unless the program has said otherwise meanwhile."""
        stance, self._stance = self._stance, None
        if stance is None:
            return
        stance.holders -= 1
        if stance.holders:
            return
        now = _change("default")
        if now is None:
            # called by compiled code: at the next call
            self._stance, stance.holders = stance, 1
        elif now.prev is not stance:
            now.__exit__(None, None, None)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.end()


def _take_any_class() -> None:
    """torch's check of custom operators, in a first call of compiled code, refuses tensors of classes of ours."""
    from torch._functorch import config

    if getattr(config, "check_custom_op_aliasing", False):
        config.check_custom_op_aliasing = False


def _change(stance: str) -> Any:
    """What has changed it, which can change it back; None inside of compiled code, where torch refuses."""
    try:
        return torch.compiler.set_stance(stance)
    except RuntimeError:
        return None


def compiles() -> bool:
    """Whether the program has given anything to torch.compile; where torch does not say so, it may have."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None or not hasattr(dynamo, "cached_backends"):
        return dynamo is not None
    # None is what `torch.compiler.disable` leaves there
    return any(backend is not None for backend in dynamo.cached_backends.values())


def _is_half_free(device: torch.device) -> bool:
    """Whether the device's memory is: code that is not compiled keeps more activations."""
    if device.type == "cpu":
        return True
    memory = getattr(getattr(torch, device.type, None), "mem_get_info", None)
    if memory is None:
        return False
    free, total = memory(device)
    return bool(free > total / 2)
