"""What an optimizer that averages its weights offers: lending the average to the model, and when that is refused."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import Tensor

from core.data_parallel import DataParallel
from core.optimizer.config import OptimizerConfig
from core.optimizer.state.average import EMA, WeightAverage
from core.optimizer.state.state_buffers import StateBuffer


class Averages:
    """An exponential moving average of the weights where `OptimizerConfig.ema_decay` is above 0."""

    shard: DataParallel
    step_count: int
    _average: WeightAverage | None

    @staticmethod
    def average_kinds(config: OptimizerConfig) -> tuple[str, ...]:
        """The kinds of state that the average adds to each parameter."""
        if config.ema_decay:
            return (EMA,)
        return ()

    def _begin_average(self, state_buffers: Sequence[StateBuffer], decay: float) -> None:
        if decay:
            self._average = WeightAverage(state_buffers, decay)
        else:
            self._average = None

    def _update_average(self, found_inf: Tensor) -> None:
        if self._average is not None:
            self._average.update(found_inf)

    @property
    def averages(self) -> bool:
        """Whether weights are averaged."""
        return self._average is not None

    def averaged(self) -> AbstractContextManager[None]:
        """`with optimizer.averaged(): ...`: the model's weights are their average. Collective, all-gather per bucket
        at both ends; before it `CheckpointManager.before_update`, if a save may be under way.

        Raises ValueError: `ema_decay` is 0.
        """
        if self._average is None:
            raise ValueError(
                "ema_decay=0 keeps no average of the weights; give OptimizerConfig(ema_decay=0.999), say"
            )
        self._refuse_lent("it cannot be lent twice")
        return self._average.as_weights(self.shard)

    def begin_average(self) -> None:
        """The average is the weights of now, as before the first step; nothing where none is kept."""
        if self._average is not None:
            self._average.begin()

    def _refuse_lent(self, what: str) -> None:
        if self._average is not None and self._average.lent:
            raise ValueError(
                f"step {self.step_count}: the model's weights are their average inside `with optimizer.averaged()`: "
                f"{what}; leave the block first, and after an error in it go on from a checkpoint"
            )
