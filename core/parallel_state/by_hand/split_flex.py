"""FlexAttention on some heads: its functions of (batch, head, query, key) are given numbers of a rank's heads."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from core.parallel_state.collectives import Group, all_gather
from core.parallel_state.collectives.checks import checksum

_MODULE = "torch.nn.attention.flex_attention"
# (query, key): before, at and after one another
_PLACES = ((0, 0), (3, 1), (1, 3), (9, 0))


def score_functions(frame: Any, x: Tensor) -> dict[str, Callable[..., Any]] | None:
    """name -> function, where `frame` is that of `flex_attention` with `x` as its query; else None."""
    if frame.f_code.co_name != "flex_attention" or frame.f_globals.get("__name__") != _MODULE:
        return None
    given = frame.f_locals
    if given.get("query") is not x:
        return None
    found = {
        "score_mod": given.get("score_mod"),
        "mask_mod": getattr(given.get("block_mask"), "mask_mod", None),
    }
    return {name: function for name, function in found.items() if function is not None}


@torch.no_grad()
def depends_on_head(name: str, function: Callable[..., Any], query: Tensor, ranks: int) -> bool:
    """Whether a head of some rank gets another score by its number among this rank's heads than by its own.

    query: [b, heads of a rank, s, d]. A function that has no numbers for other ranks' heads is given its rank's own.
    """
    heads = query.shape[1]
    try:
        first = _scores(name, function, query, range(heads))
        return any(
            not torch.equal(first, _scores(name, function, query, range(start, start + heads)))
            for start in range(heads, ranks * heads, heads)
        )
    except Exception:
        return False


@torch.no_grad()
def counts_from_zero(name: str, function: Callable[..., Any], query: Tensor, group: Group) -> bool:
    """Whether a score depends on a head's number, and all ranks' heads have the first's. One small all-gather.

    One that adds the number of the heads before gives other scores on each rank.
    """
    numbers = torch.zeros(2, dtype=torch.float64)
    numbers[0] = depends_on_head(name, function, query, group.size)
    with suppress(Exception):
        numbers[1] = checksum(_scores(name, function, query, range(query.shape[1]))).double()
    of_ranks = all_gather(numbers[None].to(query.device), group).cpu()
    return bool(of_ranks[:, 0].any()) and bool((of_ranks[:, 1] == of_ranks[0, 1]).all())


def _scores(name: str, function: Callable[..., Any], query: Tensor, heads: range) -> Tensor:
    # On the host, where a number outside of a table is an exception; on a device it would end the process.
    score = (torch.ones((), dtype=query.dtype),) if name == "score_mod" else ()
    scores = [
        torch.as_tensor(function(*score, *map(torch.tensor, (0, head, q, k)))).cpu()
        for head in heads
        for q, k in _PLACES
    ]
    return torch.stack(scores)
