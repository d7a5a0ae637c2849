"""What a forward that a program put in the place of a part's own makes of that one's result, [s/cp, b, h].

Nobody can follow a tensor through a forward of ours that the program calls itself, so autograd's nodes are read.
"""

from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from core.parallel_state.by_hand import replaced_forward

# beginnings of names of nodes that take several rows together, or rows by number, where their dims are not others
_OF_ROWS = (
    *(
        "Mean",
        "Sum",
        "Prod",
        "Std",
        "Var",
        "Norm",
        "LinalgVectorNorm",
        "Max",
        "Min",
        "Amax",
        "Amin",
        "Aminmax",
    ),
    *(
        "Median",
        "Kthvalue",
        "Mode",
        "Sort",
        "Topk",
        "Logsumexp",
        "Softmax",
        "LogSoftmax",
        "Cumsum",
        "Cumprod",
    ),
    *(
        "Logcumsumexp",
        "Cummax",
        "Cummin",
        "Roll",
        "Flip",
        "Slice",
        "Select",
        "Index",
        "Gather",
        "Cat",
        "Split",
    ),
    *("Narrow", "Unbind", "Take", "Fft", "Convolution"),
)
_DIMS = ("_saved_dim", "_saved_dims")
_MOST = 1000


def takes_inside(part: nn.Module) -> list[nn.Module]:
    """The modules whose ends show where a part's own forward is about to end; [] where a program replaced none."""
    return list(part.children()) if replaced_forward(part) else []


def mixed_since(output: Tensor, number: int) -> str | None:
    """The name of a node over rows between `output` and what was made before autograd's node `number`."""
    level: list[Node | None] = [output.grad_fn]
    seen: set[Node] = set()
    while level and len(seen) < _MOST:
        nodes = [n for n in level if n is not None and n not in seen and n._sequence_nr() >= number]
        for node in nodes:
            name = node.name().removesuffix("0").removesuffix("1").removesuffix("Backward")
            if name.startswith(_OF_ROWS) and _has_rows(node, output.dim()):
                return name.lower()
        seen.update(nodes)
        level = [following for node in nodes for following, _ in node.next_functions]
    return None


def _has_rows(node: Node, count: int) -> bool:
    """Whether its dims have the first of `count`, or it says none."""
    found: Any = next((getattr(node, name) for name in _DIMS if hasattr(node, name)), ())
    dims = [found] if isinstance(found, int) else list(found or ())
    # autograd gives -1 as 2^64 - 1
    return not dims or any(dim % 2**64 in (0, 2**64 - count) for dim in dims)
