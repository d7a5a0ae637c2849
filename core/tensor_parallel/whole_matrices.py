"""Tells of optimizers that look at a matrix as a whole, where ranks hold parts of it or it has more than two dims."""

import warnings
import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from core.parallel_state.by_hand import ByHand, Heard, is_foreign, make_plain
from core.parallel_state.by_hand.as_written import AsWritten
from core.parallel_state.by_hand.functions import function_name, program_level
from core.parallel_state.by_hand.part_sizes import told_size, with_sizes
from core.parallel_state.by_hand.whole_dims import axes_of_parameter
from core.parallel_state.layout import layout_of
from core.parallel_state.optimizer_steps import after_optimizer_steps, before_optimizer_steps
from core.tensor_parallel.groups_by_dims import DimsWatch

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
_SIZES = ("shape", "size", "numel", "nelement")
# in the names of classes: what they call may be kernels, which nobody hears
_OF_MATRICES = ("adafactor", "muon", "lamb", "lars", "shampoo", "soap", "kfac", "galore", "came")


class _OptimizerWatch:
    """Warns, once, of an optimizer that uses full matrices of a model, which are split or fused here.

    One of torch's own, or with a name that says so, by its class; the program's own by what it does in steps 1, 2,
    4 ...: norms, products, draws and rows by number of a split weight; products, and norms of some dims, of a fused
    one.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._warned = False
        self._steps = 0
        self._by_hand = ByHand(self._hear, gradients=True, buffers=False)
        self._by_hand.follow_sizes(self._follow_sizes)
        self._optimizer: torch.optim.Optimizer | None = None  # the one that is listened to
        # what it has compiled would not trace tensors of other classes
        self._eager = AsWritten()

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Tell of its class, or begin to listen. A closure would run forwards: then nobody listens.

        Raises ValueError: it cannot be right.
        """
        name = type(optimizer).__name__
        model = self._model()
        is_ours = type(optimizer).__module__.startswith("core.")
        is_right = name in _ELEMENTWISE or is_ours or _is_around_another(optimizer)
        if model is None or self._warned or is_right or self._optimizer is not None:
            return
        optimized_ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        parameters = [p for p in model.parameters() if id(p) in optimized_ids]
        affected = [p for p in parameters if _is_split(p)] or [p for p in parameters if p.dim() > 2]
        if not affected:
            return
        if isinstance(optimizer, torch.optim.LBFGS):
            if not _is_split(affected[0]):
                # of all parameters it makes one vector, whatever their dims
                return
            raise ValueError(
                "LBFGS takes products over all parameters, of which tensor ranks hold parts: use one tensor rank, or "
                "an optimizer that updates each element by its own gradient and states (AdamW, SGD)"
            )
        is_known = any(word in name.lower() for word in _OF_MATRICES)
        if is_known or not is_foreign(type(optimizer)):
            self._warn(name, affected[0])
            return
        self._steps += 1
        has_closure = len(args) > 1 or kwargs.get("closure") is not None
        if not self._steps & (self._steps - 1) and not has_closure:
            self._optimizer = optimizer
            self._eager.hold()
            # whoever listens between forwards gets them back after the step
            make_plain(affected)
            self._by_hand.open(affected)

    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Its step has ended: nobody listens any more."""
        if optimizer is self._optimizer:
            self._optimizer = None
            self._by_hand.close()
            self._eager.end()

    def end(self) -> None:
        """The model is gone."""
        self._by_hand.end()

    def _hear(self, heard: Heard) -> None:
        if self._optimizer is None or heard.kind == "shape":
            return
        is_of_dims = heard.kind == "product" or (heard.kind == "reduction" and not heard.is_number)
        if heard.sees_only_shard or (heard.parameter.dim() > 2 and is_of_dims):
            self._warn(type(self._optimizer).__name__, heard.parameter, by=heard.name)

    def _follow_sizes(self, func: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> Any:
        """Sizes of a part tell where the optimizer makes a rate of them (Muon's factor, a fan-in)."""
        x = args[0] if args else None
        if self._optimizer is None or function_name(func) not in _SIZES:
            return result
        heard = getattr(x, "heard", None)
        parameter = heard.parameter if heard is not None else x
        if not isinstance(parameter, nn.Parameter) or not _is_split(parameter):
            return result
        if not isinstance(x, Tensor) or x.shape != parameter.shape:
            return result
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        name = type(self._optimizer).__name__
        tell = partial(self._warn, name, parameter, by="a rate by the shape")
        return with_sizes(
            result, axes_of_parameter(parameter), dim, lambda size: told_size(size, tell)
        )

    def _warn(self, optimizer: str, parameter: nn.Parameter, by: str = "") -> None:
        model = self._model()
        if self._warned or model is None:
            return
        self._warned = True
        name = next(name for name, p in model.named_parameters() if p is parameter)
        looks = f"takes {by} of" if by else "may look at"
        warnings.warn(
            f"{optimizer} {looks} a matrix as a whole (as Adafactor, Muon, LAMB do): of {name} it sees this rank's "
            "part, or [groups, heads, d, h] for [out, in], and does something else. Elementwise optimizers (AdamW, "
            "SGD, Lion) are right; core.optimizer.ShardedMuon, ShardedLamb, ShardedAdafactor know the matrices",
            stacklevel=program_level(),
        )


def _is_around_another(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is torch's (ZeroRedundancyOptimizer), and steps another one, which is judged in its own step."""
    inner = getattr(optimizer, "optim", None)
    return not is_foreign(type(optimizer)) and isinstance(inner, torch.optim.Optimizer)


def _is_split(parameter: nn.Parameter) -> bool:
    layout = layout_of(parameter)
    return "tp" in layout.split and layout.padded_shape() != parameter.shape


def watch_optimizers(model: nn.Module) -> None:
    """Warn, once, of an optimizer that uses full matrices of `model`, which are split or fused here.

    Through torch's hooks on every optimizer's step, as long as the model is there.
    """
    watch = _OptimizerWatch(model)
    before_optimizer_steps(watch.before_step)
    after_optimizer_steps(watch.after_step)
    # who listens is held weakly: this holds it as long as the model is there
    weakref.finalize(model, watch.end)
    weakref.finalize(model, DimsWatch(model).end)
