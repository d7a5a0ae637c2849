"""Small helpers that Megatron's scripts import."""

import logging
from typing import Any

import torch
from torch import Tensor, nn

from core.context_parallel import visible_mask
from core.interop.megatron.absent import absent_names
from core.parallel_state import context_batch, current_state
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
    if group is None:
        return 1
    return group.size()


def get_pg_rank(group: Any = None) -> int:
    """This process's index in a group; 0 of None."""
    if group is None:
        return 0
    return group.rank()


def log_single_rank(logger: logging.Logger, *args: Any, rank: int = 0, **kwargs: Any) -> None:
    """Log on one rank only."""
    if world()[0] == rank:
        logger.log(*args, **kwargs)


def get_batch_on_this_cp_rank(batch: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Tensors [b, s] -> this context rank's rows of them, [b, s/cp], with the same names in the same order.

    attention_mask, bool [b, 1, s, s], becomes None where it is causal, and where it keeps packed documents apart the
    row where each token's document begins, int64 [b, s/cp]: `GPTModel` here takes that in its place.
    Raises ValueError: a mask that is neither; s is no multiple of 2 cp; a tensor [b, s, ...] of an unknown name.
    """
    ps = current_state()
    if ps.size("cp") == 1:
        return batch
    entries: dict[str, Tensor] = {name: value for name, value in batch.items() if value is not None}
    mask = entries.pop("attention_mask", None)
    if mask is not None:
        begin = _document_begin(mask)
        # where every row sees the first one, attention is plainly causal, and needs no mask
        if begin.any():
            entries["document_begin"] = begin.expand(entries["tokens"].shape)
    local_entries = context_batch(entries, ps)
    begins = local_entries.pop("document_begin", None)
    return {name: begins if name == "attention_mask" else local_entries.get(name) for name in batch}


def _document_begin(mask: Tensor) -> Tensor:
    """bool [b or 1, 1, s, s], True = hidden, of documents -> int64 [b or 1, s]: the first key that each row sees."""
    # argmax gives the first of equal values: the first key that is not hidden
    begin = mask[:, 0].logical_not().to(torch.uint8).argmax(-1)
    if not torch.equal(visible_mask(begin), mask):
        raise ValueError(
            f"attention_mask {tuple(mask.shape)} is not causal within packed documents; context ranks hold parts of "
            "its rows and take no other mask: use context_parallel_size=1"
        )
    return begin


__getattr__ = absent_names(__name__)
