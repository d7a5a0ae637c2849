"""The loss scale of float16 (mixed precision, arXiv 1710.03740): as large as gradients allow, found by trying.

Small gradients vanish in float16, so the loss is multiplied by a large number before backward, and gradients are
divided by it before the update. All of it stays on the device.
"""

import warnings
from typing import Any

import torch
from torch import Tensor

from core.parallel_state.by_hand.functions import program_level

SMALLEST = 1.0


# with one of these a loss is scaled, or the gradient that its backward begins with is made
_SCALING_FUNCTIONS = {
    *("mul", "__mul__", "__rmul__", "mul_", "multiply", "div", "__truediv__"),
    *("expand", "expand_as", "broadcast_to", "full_like", "fill_", "copy_"),
}


class _WatchedScale(Tensor):
    """The scale as a program gets it: it notices whether a loss is multiplied by it.

    What is computed from it alone, as `scale.to(loss.dtype)`, notices it too.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        watched = next(
            value for value in (*args, *kwargs.values()) if isinstance(value, _WatchedScale)
        )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if isinstance(result, Tensor):
                # the loss requires grad: its product with the scale does, too
                if result.requires_grad or getattr(func, "__name__", "") in _SCALING_FUNCTIONS:
                    watched.scale.multiplied = True  # type: ignore[attr-defined]
                # as `scale.to(dtype)`: still only the scale
                elif type(result) is Tensor:
                    result.__class__ = _WatchedScale
                    result.scale = watched.scale  # type: ignore[attr-defined]
        return result

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return Tensor.__reduce_ex__(self.as_subclass(Tensor), protocol)


class LossScale:
    """Doubles after `window` good steps in a row, halves at one that overflowed, never below 1.

    value: float64, shape []; never changed in place, so that a step may keep the one it began with. Nothing here
    waits for an accelerator. multiplied: a tensor that `read` gave has scaled something.
    """

    def __init__(self, initial: float, window: int, device: torch.device) -> None:
        self._window = window
        self.value = torch.full((), initial, dtype=torch.float64, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.multiplied = self._was_read = self._warned = False

    def read(self) -> Tensor:
        """The value, for whoever multiplies a loss by it; from now on `divisor` is not None."""
        self._was_read = True
        watched = self.value.detach().as_subclass(_WatchedScale)
        watched.scale = self  # type: ignore[attr-defined]
        return watched

    def divisor(self) -> Tensor | None:
        """What gradients are to be divided by. Warns, once, if that is a guess: read, but multiplied with no loss."""
        if not self._was_read:
            return None
        if not (self.multiplied or self._warned):
            self._warned = True
            warnings.warn(
                "optimizer.loss_scale was read, and no loss multiplied by that tensor; gradients are divided by it "
                "all the same. If it was read for a log only, call step(loss_scale=1.0); if float(loss_scale) scaled "
                "the loss, step(loss_scale=that number)",
                stacklevel=program_level(),
            )
        return self.value

    @torch.no_grad()
    def update(self, found_inf: Tensor) -> None:
        """After a step; `found_inf`: bool, shape []. Branches are `torch.where`, so that no host waits."""
        good_steps = torch.where(found_inf, 0, self._good_steps + 1)
        grows = good_steps >= self._window
        halved = (self.value / 2).clamp(min=SMALLEST)
        self.value = torch.where(found_inf, halved, torch.where(grows, self.value * 2, self.value))
        self._good_steps = torch.where(grows, 0, good_steps)

    def state(self) -> dict[str, float]:
        """For a checkpoint (waits for the device)."""
        return {"value": float(self.value.item()), "good_steps": int(self._good_steps.item())}

    def load(self, state: dict[str, float]) -> None:
        """Continue with a scale and its count of good steps, as `state` gave them."""
        self.value = torch.full_like(self.value, state["value"])
        self._good_steps = torch.full_like(self._good_steps, int(state["good_steps"]))
