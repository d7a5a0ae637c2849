"""How a run learns from preferences."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from core.field_names import tells_names
from core.parallel_state.config import raise_all


@tells_names("dpo")
@dataclass(frozen=True, kw_only=True)
class DPOConfig:
    """Direct preference optimization, with `training.objective=dpo`; names are TRL's.

    Raises ValueError with every rule that is broken.
    """

    beta: float = 0.1
    """How closely the model stays to its reference, the weights that the run begins with; larger is closer."""

    label_smoothing: float = 0.0
    """Share of pairs whose preference is taken to be the wrong way round, 0 to below 0.5; of the sigmoid loss."""

    loss_type: Literal["sigmoid", "ipo"] = "sigmoid"
    """sigmoid: DPO's own loss; ipo: the squared distance of the margin, per token, from 1 / (2 beta)."""

    def __post_init__(self) -> None:
        raise_all("DPOConfig", self._rules())

    def _rules(self) -> Iterator[tuple[bool, str]]:
        beta, smoothing, kind = self.beta, self.label_smoothing, self.loss_type
        yield 0 < beta < float("inf"), f"beta={beta} must be above 0 and finite, as 0.1"
        yield (
            0 <= smoothing < 0.5,
            f"label_smoothing={smoothing} must be at least 0 and below 0.5",
        )
        yield (
            kind in ("sigmoid", "ipo"),
            f"unknown loss_type {kind!r}; known: sigmoid, ipo",
        )
        yield (
            kind != "ipo" or not smoothing,
            f"label_smoothing={smoothing} is of the sigmoid loss, loss_type=ipo has none; use one of the two",
        )
