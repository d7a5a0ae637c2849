"""Walks over autograd's graph."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any


def nodes_behind(starts: Iterable[Any], ends: Callable[[Any], bool] | None = None) -> Iterator[Any]:
    """Every node from which the nodes `starts` (`grad_fn`s; None of a leaf) get their inputs, these first, each once.

    ends: of a node, whether nothing behind it is wanted; it is not given either.
    """
    waiting = list(starts)
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if ends is not None and ends(node):
            continue
        yield node
        waiting += [before for before, _ in node.next_functions]
