"""The habits of training loops, from the files beside this one."""

from tests.zoo import (
    habits_again,
    habits_buffers,
    habits_by_hand,
    habits_gradients,
    habits_loops,
    habits_models,
    habits_optimizers,
    habits_replicas,
    habits_weights,
)
from tests.zoo.case import Family

_PARTS = (
    habits_loops,
    habits_gradients,
    habits_weights,
    habits_optimizers,
    habits_replicas,
    habits_models,
    habits_buffers,
    habits_by_hand,
    habits_again,
)
FAMILY = Family(
    "Habits of training loops",
    "At ZeRO stages 0 to 3 over two ranks (the numbers after a semicolon are stages), with `DataParallel` and "
    "`ShardedAdamW` or `ShardedSGD`; compared with torch.optim in one process on all rows.",
    [case for part in _PARTS for case in part.HABITS],
    variations=(0, 1, 2, 3),
)
