"""Tells of optimizers that look at a matrix as a whole, where ranks hold parts of it."""

import warnings
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from core.parallel_state.layout import layout_of

# each element is updated by its own gradient and states: right on every layout
_ELEMENTWISE = (
    "AdamW",
    "Adam",
    "SGD",
    "Adagrad",
    "Adadelta",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "Lion",
)


def watch_optimizers(model: nn.Module) -> None:
    """Warn, once, of an optimizer that uses full matrices of `model`, which are split or fused here.

    Through torch's hook on every optimizer's step; it goes with the model.
    """
    model_reference = weakref.ref(model)
    warned = False

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal warned
        optimizer_class = type(optimizer)
        model_alive = model_reference()
        is_elementwise = (
            optimizer_class.__name__ in _ELEMENTWISE
            or optimizer_class.__module__.startswith("core.")
        )
        if is_elementwise or model_alive is None or warned:
            return
        optimized_ids = set()
        for group in optimizer.param_groups:
            for p in group["params"]:
                optimized_ids.add(id(p))
        split_names = []
        fused_names = []
        for name, parameter in model_alive.named_parameters():
            if id(parameter) not in optimized_ids:
                continue
            layout = layout_of(parameter)
            if "tp" in layout.split and layout.padded_shape() != parameter.shape:
                split_names.append(name)
            elif parameter.dim() > 2:
                fused_names.append(name)
        if affected := split_names or fused_names:
            # the hook stays: torch walks through them now
            warned = True
            warnings.warn(
                f"{optimizer_class.__name__} may look at a matrix as a whole (as Adafactor, Muon, LAMB do): of "
                f"{affected[0]} it sees this rank's part, or [groups, heads, d, h] for [out, in], and does something "
                "else. Elementwise optimizers (AdamW, SGD, Lion) are right; core.optimizer.ShardedMuon and "
                "ShardedLamb know the matrices",
                stacklevel=2,
            )

    handle = register_optimizer_step_pre_hook(before_step)
    weakref.finalize(model, handle.remove)
