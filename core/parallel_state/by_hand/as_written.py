"""Compiled parts of a model run as they were written, for a forward in which it is seen what they do."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

# FlexAttention makes all scores of a head where it is not compiled
_FEW_ROWS = 1024


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
    if is_long or not _is_half_free(next(module.parameters()).device):
        return not is_compiled(module)
    until.enter_context(torch.compiler.set_stance("force_eager"))
    return True


def _is_half_free(device: torch.device) -> bool:
    """Whether the device's memory is: code that is not compiled keeps more activations."""
    if device.type == "cpu":
        return True
    memory = getattr(getattr(torch, device.type, None), "mem_get_info", None)
    if memory is None:
        return False
    free, total = memory(device)
    return bool(free > total / 2)
