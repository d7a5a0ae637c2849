"""A table that both ends of a model use: one parameter where they share a rank, else two with one gradient."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from core.parallel_state.collectives import all_gather_objects, all_reduce
from core.parallel_state.collectives.checks import checksum
from core.parallel_state.layout import layout_of
from core.parallel_state.state import ParallelState

Place = tuple[int, str, tuple[int, ...]]  # stage, name, shape


def _is_marked(parameter: nn.Parameter) -> bool:
    return "embedding" in layout_of(parameter).partial


def _matrices(modules: Mapping[int, nn.Module]) -> dict[Place, tuple[nn.Parameter, bool]]:
    """What may be an end: trained matrices that nobody marked, and whether each is an embedding's."""
    return {
        (stage, f"{prefix}.{name}".lstrip("."), tuple(p.shape)): (p, isinstance(part, nn.Embedding))
        for stage, module in modules.items()
        for prefix, part in module.named_modules()
        for name, p in part._parameters.items()
        if type(p) is nn.Parameter and p.dim() == 2 and p.requires_grad and not p.is_meta and not _is_marked(p)
    }


def _refuse_other_ends(modules: Mapping[int, nn.Module], ps: ParallelState) -> None:
    """Raise ValueError, on every rank: a marked table whose two ends hold other values. All-gather over pp."""
    marked = [p for module in modules.values() for p in module.parameters() if _is_marked(p) and not p.is_meta]
    sums = [float(p.detach().abs().sum(dtype=torch.float64)) for p in marked]
    found = [
        (rank, total) for rank, theirs in enumerate(all_gather_objects(sums, ps.group("pp"))) for total in theirs
    ]
    if found and any(total != found[0][1] for _, total in found):
        raise ValueError(
            f"the tied table differs between pipeline ranks {found[0][0]} and {found[-1][0]}: the sums of its values "
            f"are {found[0][1]:.6g} and {found[-1][1]:.6g}; call torch.manual_seed with one seed on all ranks before "
            "the model is made, or load one checkpoint"
        )


def check_tables(modules: Mapping[int, nn.Module], ps: ParallelState) -> None:
    """Refuse tied ends that differ; tell of a matrix whose values another rank's stage has as well: two copies of a
    tied table, or of a block that stands in two stages, would drift.

    Two all-gathers over pp.
    """
    if ps.size("pp") == 1:
        return
    _refuse_other_ends(modules, ps)
    matrices = _matrices(modules).items()
    mine = [(int(checksum(p)), place, is_table) for place, (p, is_table) in matrices if not _is_constant(p)]
    first: dict[tuple, tuple[int, Place, bool]] = {}  # by values and shape
    twins = []
    for rank, theirs in enumerate(all_gather_objects(mine, ps.group("pp"))):
        for values, place, is_table in theirs:
            other = first.setdefault((values, place[2]), (rank, place, is_table))
            if other[0] != rank:
                twins.append((other, (rank, place, is_table)))
    if twins:  # a table first: it is the one that can be tied
        one, two = next((pair for pair in twins if pair[0][2] or pair[1][2]), twins[0])
        warnings.warn(_told(one, two), stacklevel=4)


def _is_constant(matrix: Tensor) -> bool:
    """At most two values, as zeros, ones and identities have: everybody starts with those."""
    if not matrix.numel():
        return True
    low, high = matrix.detach().aminmax()
    return bool(((matrix == low) | (matrix == high)).all())


def _told(one: tuple[int, Place, bool], two: tuple[int, Place, bool]) -> str:
    (rank, here, is_table), (other, there, also) = one, two
    if is_table or also:
        meant = (
            "one tied table, each gets a part of its gradient; mark both by "
            'set_layout(weight, Layout(tuple(weight.shape), partial={"embedding"}))'
        )
    else:
        meant = (
            "one matrix of a block that stands in two stages, each trains a copy by a part of its gradient: put both "
            "uses into one stage. If stages were seeded alike, seed by stage"
        )
    return (
        f"{here[1]} of stage {here[0]} and {there[1]} of stage {there[0]} have the same values, on pipeline ranks "
        f"{rank} and {other}: if they are {meant}"
    )


def set_apart(parameters: Sequence[nn.Parameter], placement: Sequence[int]) -> dict[Any, Tensor | None]:
    """Before a step: the parameters that live on both ends, and the gradients that they bring from earlier steps.

    Raises ValueError: ends on one rank with a parameter each.
    """
    marked = list(dict.fromkeys(p for p in parameters if _is_marked(p)))
    if placement[0] == placement[-1]:  # one parameter, whose gradient is whole
        if len(marked) > 1:
            raise ValueError(
                f"both ends of the model are on this rank with {len(marked)} parameters for their tied table; give "
                "both modules 1 parameter (head.weight = embedding.weight)"
            )
        return {}
    found: dict[Any, Tensor | None] = {}
    for parameter in marked:
        found[parameter], parameter.grad = parameter.grad, None
    return found


def sum_apart(tied: Mapping[Any, Tensor | None], ps: ParallelState) -> None:
    """After it: the two halves of its gradient. All-reduce over the ends."""
    for parameter, before in tied.items():
        if parameter.grad is None:  # one end had nothing to learn; the other waits for it
            parameter.grad = torch.zeros_like(parameter)
        all_reduce(parameter.grad, ps.group("embedding"))
        if before is not None:
            parameter.grad += before
