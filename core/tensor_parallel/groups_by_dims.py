"""Tells of an optimizer's groups that a program made by numbers of dims, where ours are more than a linear's.

The weight of a linear that stands for several has a dim for these, [3, h, h] or [groups, heads, d, h], and its bias
has all but the last. `p.ndim == 2` leaves such weights out, `p.ndim >= 2` decays such biases.
"""

import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from core.parallel_state.by_hand.functions import program_level
from core.parallel_state.optimizer_steps import StepListener, before_optimizer_steps

_BIAS_REMEDY = (
    "chosen by `p.ndim >= 2`? The bias of a linear that stands for several has a dim for these. Choose by name "
    "(`name.endswith('bias')`)"
)


class DimsWatch:
    """Of one model, until an optimizer's second step: by then all of them have stepped. Warns once."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        # id of a parameter -> weight_decay of its group
        self._decay_of: dict[int, float] = {}
        self._listener: StepListener | None = before_optimizer_steps(self._before_step)

    def end(self) -> None:
        """Nobody looks any more."""
        if self._listener is not None:
            self._listener.remove()
        self._listener = None

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        model = self._model()
        if model is None:
            return
        own = {id(p) for p in model.parameters()}
        found = {
            id(p): float(group.get("weight_decay") or 0.0)
            for group in optimizer.param_groups
            for p in group["params"]
            if id(p) in own
        }
        if found and optimizer in self._optimizers:
            self.end()
            self._tell_of_left_out(model)
        elif found:
            self._optimizers.add(optimizer)
            self._decay_of |= found
            self._tell_of_decay(model)

    def _tell_of_left_out(self, model: nn.Module) -> None:
        stacked = {name: p for name, p in _of_core(model, "weight") if p.dim() > 2}
        others = [p for p in model.parameters() if p.requires_grad and p.dim() <= 2]
        if not stacked or not all(id(p) in self._decay_of for p in others):
            return
        if not any(id(p) in self._decay_of for p in stacked.values()):
            name, weight = next(iter(stacked.items()))
            warnings.warn(
                f"no optimizer holds {len(stacked)} trainable weights, as {name} of {weight.dim()} dims "
                f"{list(weight.shape)}, and some hold all {len(others)} parameters of 1 or 2 dims: chosen by "
                "`p.ndim == 2`, which they are in other libraries? They never learn. Choose by `p.ndim >= 2`, or by "
                "name; core.optimizer.ShardedMuon knows which matrices such a weight has",
                stacklevel=program_level(),
            )

    def _tell_of_decay(self, model: nn.Module) -> None:
        stacked = {name: p for name, p in _of_core(model, "bias") if p.dim() > 1}
        vectors = [p for p in model.parameters() if p.requires_grad and p.dim() == 1]
        decayed = [name for name, p in stacked.items() if self._decay_of.get(id(p))]
        spares_vectors = vectors and not any(self._decay_of.get(id(p)) for p in vectors)
        if decayed and spares_vectors:
            bias = stacked[decayed[0]]
            warnings.warn(
                f"weight_decay={self._decay_of[id(bias)]:g} is of {len(decayed)} biases, as {decayed[0]} of "
                f"{bias.dim()} dims {list(bias.shape)}, and of none of {len(vectors)} parameters of 1 dim: "
                f"{_BIAS_REMEDY}",
                stacklevel=program_level(),
            )


class BiasWatch(DimsWatch):
    """Of one linear that stands for several, whose model is a program's own, until an optimizer holds its bias."""

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        bias = getattr(self._model(), "bias", None)
        groups = [
            ({id(p): p for p in group["params"]}, float(group.get("weight_decay") or 0.0))
            for group in optimizer.param_groups
        ]
        decay = next((decay for params, decay in groups if id(bias) in params), None)
        if bias is None or decay is None:
            return
        self.end()
        vectors = [decay for params, decay in groups for p in params.values() if p.dim() == 1]
        spares_some = any(decay == 0 for _, decay in groups) and not any(vectors)
        # of all that it holds the first one tells
        if decay and spares_some and not hasattr(optimizer, "told_of_biases"):
            optimizer.told_of_biases = True  # type: ignore[attr-defined]
            warnings.warn(
                f"weight_decay={decay:g} is of the bias {list(bias.shape)} of a ColumnParallelLinear, and of none of "
                f"{len(vectors)} parameters of 1 dim: {_BIAS_REMEDY}",
                stacklevel=program_level(),
            )


def watch_bias(linear: nn.Module) -> None:
    """Warn, once, of weight decay that finds the bias of `linear` by its dims."""
    # who listens is held weakly: this holds it as long as the linear is there
    weakref.finalize(linear, BiasWatch(linear).end)


def _of_core(model: nn.Module, kind: str) -> Iterator[tuple[str, nn.Parameter]]:
    """Trainable parameters of our own layers, by the end of their names."""
    for prefix, module in model.named_modules():
        if type(module).__module__.startswith("core."):
            for name, p in module.named_parameters(prefix, recurse=False):
                if p.requires_grad and name.endswith(kind):
                    yield name, p
