"""Who follows one model's outputs, as what follows one of them knows it."""

from typing import Protocol

import torch
from torch import Tensor

from core.context_parallel.rows.batches import BatchRows
from core.context_parallel.rows.gradients import GradientRows
from core.context_parallel.rows.synced import SyncedWeight
from core.context_parallel.rows.wholes import Wholes
from core.parallel_state.collectives import Group


class Owner(Protocol):
    """Who tells, once, of all outputs of a model."""

    group: Group | None
    # context ranks, those over which gradients are averaged, all ranks: by which a program may multiply
    rank_counts: tuple[int, ...]
    told: bool
    ended: bool
    is_averaged: bool
    batch: BatchRows
    gradients: GradientRows
    wholes: Wholes
    synced: SyncedWeight

    def tell(self, what: str, remedy: str = ...) -> None: ...

    def tell_of_log(self, name: str, remedy: str = ..., does: str = ...) -> None: ...

    def tell_of_others(self, told: Tensor) -> None: ...

    def backward_ended(self) -> None: ...

    def compared(self, device: torch.device) -> tuple[Tensor, Tensor]: ...
