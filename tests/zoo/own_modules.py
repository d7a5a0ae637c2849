"""A module of one's own, of parallel layers, that tensor ranks share: what its program does."""

from tests.zoo import own_activations, own_delays, own_functions, own_loops, own_numbers, own_sizes, own_weights
from tests.zoo.case import Family
from tests.zoo.own_model import LAYOUTS

CASES = [
    *own_loops.CASES,
    *own_activations.CASES,
    *own_functions.CASES,
    *own_delays.CASES,
    *own_weights.CASES,
    *own_numbers.CASES,
    *own_sizes.CASES,
]
FAMILY = Family(
    "A module of one's own that ranks share",
    "Built of parallel linears with `Placement.of(ps)`, as [from plain PyTorch](from_pytorch.md) says; on one "
    "rank and on two tensor ranks, compared with the same program in one process.",
    CASES,
    tuple(LAYOUTS),
)
