"""Small helpers that Megatron's scripts import."""

import logging
from typing import Any

from torch import Tensor, nn

from core.parallel_state.collectives.groups import world


def divide(numerator: int, denominator: int) -> int:
    """The quotient. Raises ValueError: the numbers do not divide."""
    if numerator % denominator:
        raise ValueError(f"{numerator} does not divide by {denominator}")
    return numerator // denominator


def unwrap_model(model: Any, module_instances: tuple | None = None) -> Any:
    """The module inside wrappers, of one or of a list of chunks."""
    if isinstance(model, (list, tuple)):
        return [unwrap_model(chunk) for chunk in model]
    while isinstance(getattr(model, "module", None), nn.Module):
        model = model.module
    return model


def get_model_config(model: Any) -> Any:
    """The configuration of the module inside wrappers."""
    return unwrap_model(model).config


def get_pg_size(group: Any = None) -> int:
    """Ranks of a group; 1 of None."""
    return 1 if group is None else group.size()


def get_pg_rank(group: Any = None) -> int:
    """This process's index in a group; 0 of None."""
    return 0 if group is None else group.rank()


def log_single_rank(logger: logging.Logger, *args: Any, rank: int = 0, **kwargs: Any) -> None:
    """Log on one rank only."""
    if world()[0] == rank:
        logger.log(*args, **kwargs)


def get_batch_on_this_cp_rank(batch: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """The batch itself. Raises ValueError: several context ranks, whose layout the model cuts."""
    from core.parallel_state import current_state

    if current_state().size("cp") > 1:
        raise ValueError(
            f"context_parallel_size={current_state().size('cp')}: batches are "
            "not cut by this; use core.parallel_state.context_batch"
        )
    return batch
