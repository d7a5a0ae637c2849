"""What losses are multiplied by: 1, a constant, or of fp16 a number that is halved when gradients overflow."""

from typing import Any

import torch
from torch import Tensor

from core.interop.megatron.optimizer.optimizer_config import OptimizerConfig


class GradScaler:
    """Doubles after `window` good steps, halves from the `hysteresis`-th overflow on, until it has doubled again.

    Only with fp16 or bf16 a constant scale counts, as in Megatron; is_dynamic: fp16 without one.
    """

    def __init__(self, config: OptimizerConfig, device: torch.device) -> None:
        halves = config.fp16 or config.bf16 or config.use_distributed_optimizer
        self.is_dynamic = config.fp16 and not config.loss_scale
        scale = 1.0
        if halves and config.loss_scale:
            scale = float(config.loss_scale)
        elif self.is_dynamic:
            scale = float(config.initial_loss_scale)
        self.scale = scale
        self._device = device
        self._least = config.min_loss_scale
        self._window = config.loss_scale_window
        self._hysteresis = self._overflows_left = config.hysteresis
        self._good_steps = 0

    def tensor(self) -> Tensor:
        """float32 [1], on the device."""
        return torch.tensor([self.scale], dtype=torch.float32, device=self._device)

    def update(self, found_inf: bool) -> None:
        """After a step."""
        if not self.is_dynamic:
            return
        if found_inf:
            self._good_steps = 0
            self._overflows_left -= 1
            if self._overflows_left <= 0:
                self.scale = max(self.scale / 2, self._least)
            return
        self._good_steps += 1
        if self._good_steps == self._window:
            self._good_steps = 0
            self._overflows_left = self._hysteresis
            self.scale *= 2

    def state_dict(self) -> dict[str, Any]:
        """Numbers."""
        return {
            "scale": self.scale,
            "growth_tracker": self._good_steps,
            "hysteresis_tracker": self._overflows_left,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What `state_dict` gave."""
        self.scale = float(state["scale"])
        self._good_steps = int(state["growth_tracker"])
        self._overflows_left = int(state["hysteresis_tracker"])
