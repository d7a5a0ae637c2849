"""FlexAttention on some heads: its functions of (batch, head, query, key) are given numbers of a rank's heads."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

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
    # On the host, where a number outside of a table is an exception; on a device it would end the process.
    score = (torch.ones((), dtype=query.dtype),) if name == "score_mod" else ()

    def scores(head: int) -> Iterator[Tensor]:
        for q, k in _PLACES:
            yield torch.as_tensor(function(*score, *map(torch.tensor, (0, head, q, k)))).cpu()

    try:
        return any(
            not torch.equal(own, other)
            for head in range(heads)
            for rank in range(1, ranks)
            for own, other in zip(scores(head), scores(rank * heads + head), strict=True)
        )
    except Exception:
        return False
