"""torch's own tools, and the loops written with them, on a model that tensor ranks share."""

from tests.zoo import (
    tools_any_step,
    tools_autograd,
    tools_by_hand,
    tools_by_rows,
    tools_in_backward,
    tools_optimizers,
    tools_weights,
    tools_wrappers,
)
from tests.zoo.case import Family
from tests.zoo.split_model import LAYOUTS

CASES = [
    *tools_optimizers.CASES,
    *tools_autograd.CASES,
    *tools_weights.CASES,
    *tools_wrappers.CASES,
    *tools_by_hand.CASES,
    *tools_by_rows.CASES,
    *tools_in_backward.CASES,
    *tools_any_step.CASES,
]
FAMILY = Family(
    "torch's tools on a GPTModel that ranks share",
    "On one rank, two tensor ranks, two with sequence parallelism; compared with the same program in one process.",
    CASES,
    tuple(LAYOUTS),
)
