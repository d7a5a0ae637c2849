"""Objects that compiled graphs reach by number: the one table, which refers weakly, so that everything is freed."""

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

_table: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = count(1)
NO_DEFERRAL = torch.tensor(0)  # the ticket of no bag


class Ticket:
    """What a compiled graph takes instead of an object: a number, in a tensor, so that it is an input of the graph.

    A copy of the object, or a pickle, has none.
    """

    def __init__(self, of: Any) -> None:
        number = next(_numbers)
        _table[number] = of
        self.number = torch.from_numpy(np.asarray(number))  # no operation that a dispatch mode would see

    def __reduce__(self) -> Any:
        return none, ()


def none() -> None:
    """What a copy is of something that belongs to one process and one step."""


def found(number: Tensor) -> Any:
    """The object of a ticket; None once it is gone."""
    return _table.get(int(number))
