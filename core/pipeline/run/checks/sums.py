"""Notices an optimizer that takes an executor's gradients, sums over tokens, for means.

`loss_fn` returns sums and a count, and nothing divides in a step. Under Adam a gradient N times too large hardly
shows; under SGD, and where gradients are clipped, it is another training.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from core.autograd import GradSync, has_main_grad
from core.parallel_state.by_hand import WHOLE_NORM, ByHand, Heard
from core.parallel_state.by_hand.functions import program_level
from core.parallel_state.by_hand.hooked import has_hooks
from core.parallel_state.optimizer_steps import before_optimizer_steps
from core.parallel_state.state import ParallelState
from core.pipeline.run.checks.own_gradients import OwnGradients
from core.pipeline.run.checks.plain_loop import (
    UNIFORM,
    SampledElements,
    is_watched_step,
    parameters_of,
)
from core.pipeline.run.step import StepResult

# a gradient that was divided by its tokens is not above 1 / tokens by more
ROUNDING = 1.01
# a largest element is looked at for other reasons, too
NORMS = {"norm", "vector_norm", "matrix_norm", "foreach_norm", "sum"}


_LIMITS = ("clamped", "added", "compared")


class SumsWatch:
    """Warns once, at an optimizer's first step after an executor's, if nobody has divided by the tokens.

    Divided: `step(num_tokens=...)` was given a number, or the program has changed gradients since. One factor for all
    that is above 1 / tokens (gradient clipping) divides no more than it; where `grad_sync` or replicas change
    gradients as well, every change counts. A count of at most 1 says that the losses are what is meant.
    Norms, limits and additions by hand before the division are told where they are made.

    Looks after steps 1, 2, 4, 8 ...; only what is to be told waits for the device.
    """

    def __init__(
        self, modules: Sequence[nn.Module], ps: ParallelState, grad_sync: GradSync | None
    ) -> None:
        # over a pipeline another listens (`StageArithmetic`), and tells of norms in words of its own
        self._hears_norms = ps.size("pp") == 1
        self._by_hand = ByHand(self.hear, gradients=True)
        self._is_divided = False
        # where replicas are, gradients may be summed between the step and the optimizer
        self._is_alone = grad_sync is None and ps.size("dp-cp") == 1
        # without grad_sync a gradient is of this replica's tokens, `num_tokens` of all replicas'
        if grad_sync is None:
            self._replicas = ps.size("dp-cp")
        else:
            self._replicas = 1
        self._modules = modules
        self._steps = 0
        self._is_over = False  # told, or nothing to tell
        self._result: StepResult | None = None
        self._divisor: Tensor | float = 1.0  # loss scale
        # id of a parameter -> of its gradient, as the step left it
        self._states: dict[int, tuple[int, ...]] = {}
        self._samples: list[SampledElements] = []
        # id of a parameter -> what its gradient was scaled by, by hand
        self._factors: dict[int, float] = {}
        # what hooks on gradients did in this step
        self._hears_hooks = False
        self._in_hooks = ""
        before_optimizer_steps(self._look)
        self._own_gradients = OwnGradients(modules, ps)

    def close(self) -> None:
        """Of an executor whose losses are means already: there is nothing to tell."""
        self._is_over = True
        self._forget()
        self._own_gradients.close()

    def before_step(self) -> None:
        """Hear what hooks on gradients do in the step; without hooks it costs nothing."""
        self._in_hooks = ""
        if not self._is_over and is_watched_step(self._steps + 1):
            self._forget()
            hooked = [p for p in dict.fromkeys(parameters_of(self._modules)) if has_hooks(p)]
            self._hears_hooks = bool(hooked) and self._by_hand.open_for_hooks(hooked)

    def _tell_of_hooks(self, num_tokens: float) -> None:
        self.close()
        warnings.warn(
            f"{self._in_hooks} in a hook on a parameter's gradient takes sums of losses over the tokens of a "
            f"microbatch, {num_tokens:g} in the step, as the executor makes them: a norm is as much larger, a limit "
            "as much smaller than meant. Change p.grad after the step, divided by result.num_tokens, and call "
            "step(num_tokens=1) of an optimizer of ours; if loss_fn returns what you mean to minimise, return "
            "1 / num_microbatches as its count",
            stacklevel=program_level(),
        )

    @torch.no_grad()
    def after_step(self, result: StepResult, loss_scale: float | Tensor) -> StepResult:
        """Remember what the executor's step left; returns `result`."""
        self._forget()
        self._hears_hooks = False
        self._own_gradients.after_step(result.num_tokens)
        if self._is_over:
            return result
        self._steps += 1
        if self._in_hooks and float(result.num_tokens) * float(loss_scale) > ROUNDING:
            self._tell_of_hooks(float(result.num_tokens))
            return result
        if is_watched_step(self._steps):
            self._result = result
            self._divisor = loss_scale
            parameters = dict.fromkeys(parameters_of(self._modules))
            self._states = {id(parameter): _state_of(parameter) for parameter in parameters}
            if self._is_alone and not any(map(has_main_grad, parameters)):
                self._samples = SampledElements.of_smallest(parameters)
            if self._hears_norms:
                self._by_hand.open_for_gradients(parameters)
        return result

    def hear(self, heard: Heard) -> None:
        """What a program did with a gradient by hand, before an update. Warns, once, where it is still a sum."""
        if self._hears_hooks and (heard.kind in _LIMITS or heard.name in NORMS):
            self._in_hooks = heard.name
        if self._result is None or not heard.of_gradient:
            return
        if heard.kind in ("scaled", "applied") and not self._is_still_sum(heard):
            self._is_divided = True
            self._by_hand.close()
        is_norm = self._hears_norms and (heard.kind == WHOLE_NORM or heard.name in NORMS)
        is_told = is_norm or heard.kind in _LIMITS or heard.kind == "applied"
        if self._is_divided or not (is_told and self._is_sum(1.0)):
            return
        num_tokens = float(self._result.num_tokens)
        self.close()
        warnings.warn(
            f"{heard.name} by hand takes gradients that are sums of losses over {num_tokens:g} tokens, as the "
            f"executor's step left them, {num_tokens:g} times the mean's: a norm or an update is as much larger, a "
            "limit or a decay as much smaller than what is meant. Divide p.grad by result.num_tokens first, and call "
            "step(num_tokens=1) of an optimizer of ours (its clip_grad and weight_decay are of the mean); if loss_fn "
            "returns what you mean to minimise, return 1 / num_microbatches as its count",
            stacklevel=program_level(),
        )

    def _is_still_sum(self, heard: Heard) -> bool:
        """Whether a gradient was scaled by no less than the tokens, in all: a learning rate, say."""
        if heard.factor is None:
            return False
        key = id(heard.parameter)
        self._factors[key] = factor = self._factors.get(key, 1.0) * abs(heard.factor)
        return self._is_sum(factor)

    def _is_sum(self, factor: float) -> bool:
        """Whether gradients of the last step, times `factor`, are above the mean's. Waits for a device."""
        assert self._result is not None
        num_tokens = float(self._result.num_tokens) / self._replicas
        return num_tokens * float(self._divisor) * factor > ROUNDING

    def _forget(self) -> None:
        self._result = None
        self._states = {}
        self._factors = {}
        self._samples = []
        self._is_divided = False
        if self._by_hand.is_open:
            self._by_hand.close()

    @torch.no_grad()
    def _look(
        self, optimizer: torch.optim.Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        result = self._result
        states = self._states
        if result is None:
            return
        takes_tokens = hasattr(optimizer, "shard")
        # args[0] is the optimizer
        given = kwargs.get("num_tokens", args[1] if len(args) > 1 else None)
        if takes_tokens and given is not None and not callable(given):
            return
        parameters = []
        for group in optimizer.param_groups:
            parameters += [p for p in group["params"] if id(p) in states]
        with_gradient = [p for p in parameters if states[id(p)]]
        if not with_gradient:
            return
        is_changed = any(_state_of(p) != states[id(p)] for p in with_gradient)
        if is_changed and not self._only_clipped(result, {id(p) for p in parameters}):
            return
        num_tokens = float(result.num_tokens)
        # a loss_scale of 1 / tokens has made it a mean
        if not self._is_sum(1.0):
            return
        self.close()
        remedy = "divide p.grad by result.num_tokens before its step"
        silence = "return 1 / num_microbatches as its count"
        if takes_tokens:
            remedy = "call optimizer.step(result.num_tokens)"
            silence = "call step(num_tokens=1)"
        warnings.warn(
            f"{type(optimizer).__name__}.step() updates by a sum of losses over {num_tokens:g} tokens, as the "
            f"executor's step left it: {num_tokens:g} times the gradient of the mean over 1. {remedy[0].upper()}"
            f"{remedy[1:]}; if loss_fn returns what you mean to minimise, {silence}",
            stacklevel=program_level(),
        )

    def _only_clipped(self, result: StepResult, optimized: set[int]) -> bool:
        """Whether all gradients were multiplied by one factor, and less was divided than the tokens."""
        factors = [
            sample.factors() for sample in self._samples if id(sample.parameter) in optimized
        ]
        if not factors:
            return False
        finite = torch.cat(factors).double()
        # a zero element has no factor
        finite = finite[finite.isfinite()]
        if finite.numel() < 2 or (finite - finite[0]).abs().max() > UNIFORM * finite[0].abs():
            return False
        return bool(finite[0] * result.num_tokens * self._divisor > ROUNDING)


def _state_of(parameter: nn.Parameter) -> tuple[int, ...]:
    """What is another after a program has put a gradient in, or has written into it; () without one."""
    # values of a DataParallel's are not asked for
    with torch._C.DisableTorchFunctionSubclass():
        gradient = parameter.grad
        if gradient is None:
            return ()
        own = gradient._version if not gradient.is_inference() else 0
        main = getattr(parameter, "main_grad", None)
        return id(gradient), own, main._version if isinstance(main, Tensor) else 0
