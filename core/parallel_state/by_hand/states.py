"""The states that an optimizer of torch's keeps of parameters, which lie as these do."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import Parameter

from core.parallel_state.by_hand.heard import Heard


def states_of(
    optimizer: torch.optim.Optimizer, parameters: Iterable[Parameter]
) -> Iterator[tuple[Tensor, Heard]]:
    """Those of a parameter's shape, moments say, and whose they are."""
    for parameter in parameters:
        for name, value in optimizer.state.get(parameter, {}).items():
            if type(value) is Tensor and value.shape == parameter.shape:
                yield value, Heard(parameter, False, of_state=str(name))
