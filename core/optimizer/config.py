"""What the optimizer is told, under Megatron's names."""

from collections.abc import Iterator
from dataclasses import dataclass

from core.optimizer.schedule import LearningRate
from core.parallel_state.config import raise_all


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW, its learning rate and its clipping.

    lr_schedule: "constant", "linear", "cosine" or "wsd"; all but the first need `lr_decay_steps`, the step at
        which `min_lr` is reached, and "wsd" also `lr_wsd_decay_steps`, how many steps before it the way down
        begins.
    weight_decay: of parameters with at least two dims that are not biases.
    clip_grad: largest global gradient norm; 0 does not clip.

    Raises ValueError: every value out of its range, all at once.
    """

    lr: float = 1e-3
    min_lr: float = 0.0
    lr_schedule: str = "constant"
    lr_warmup_steps: int = 0
    lr_decay_steps: int | None = None
    lr_wsd_decay_steps: int | None = None
    weight_decay: float = 0.01
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    clip_grad: float = 1.0

    def __post_init__(self) -> None:
        raise_all("OptimizerConfig", self._rules())

    def _rules(self) -> Iterator[tuple[bool, str]]:
        try:
            _ = self.learning_rate
        except ValueError as error:
            yield False, str(error)
        yield self.weight_decay >= 0, f"weight_decay={self.weight_decay} must be at least 0"
        for name in ("adam_beta1", "adam_beta2"):
            yield 0 <= getattr(self, name) < 1, f"{name}={getattr(self, name)} must be at least 0 and below 1"
        yield self.adam_eps >= 0, f"adam_eps={self.adam_eps} must be at least 0"
        yield self.clip_grad >= 0, f"clip_grad={self.clip_grad} must be at least 0 (0 does not clip)"

    @property
    def learning_rate(self) -> LearningRate:
        """The schedule that these fields describe."""
        return LearningRate(
            peak=self.lr,
            minimum=self.min_lr,
            warmup_steps=self.lr_warmup_steps,
            total_steps=self.lr_decay_steps,
            kind=self.lr_schedule,
            decay_steps=self.lr_wsd_decay_steps,
        )
