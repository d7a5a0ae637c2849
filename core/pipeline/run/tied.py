"""Tied weights: a table that both ends of a model use, one parameter on one rank, else two with one gradient.

The gradient is summed here without a DataParallel; with one, its `finish` sums every group of `Layout.partial`.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from core.parallel_state.by_hand.functions import program_level
from core.parallel_state.collectives import all_gather_objects, all_reduce
from core.parallel_state.collectives.checks import checksum
from core.parallel_state.layout import layout_of
from core.parallel_state.state import ParallelState

# leading elements
_COMPARED = 8


class _Matrix(NamedTuple):
    """A trained matrix of one pipeline rank, as other ranks hear of it."""

    checksum: int
    stage: int
    name: str
    shape: tuple[int, ...]
    is_embedding: bool
    # its first values over the first of all, empty where one is 0: of another shape, or deviation, they are the same
    begin: tuple[float, ...]


def _is_marked(parameter: nn.Parameter) -> bool:
    return "embedding" in layout_of(parameter).partial


def _may_be_tied(parameter: Any) -> bool:
    """A trained matrix that nobody marked."""
    if type(parameter) is not nn.Parameter or parameter.dim() < 2:  # a convolution's has 3 or more
        return False
    return parameter.requires_grad and not parameter.is_meta and not _is_marked(parameter)


def _unmarked_matrices(modules: Mapping[int, nn.Module]) -> list[_Matrix]:
    """All trained matrices of this rank that nobody marked as tied, but for constant ones."""
    parameters: dict[tuple[int, str], tuple[nn.Parameter, bool]] = {}
    for stage, module in modules.items():
        for prefix, submodule in module.named_modules():
            for name, parameter in submodule._parameters.items():
                if _may_be_tied(parameter):
                    full_name = f"{prefix}.{name}".lstrip(".")
                    assert parameter is not None
                    parameters[stage, full_name] = parameter, isinstance(submodule, nn.Embedding)
    return [
        _Matrix(
            int(checksum(parameter)),
            stage,
            name,
            tuple(parameter.shape),
            is_embedding,
            _begin_of(parameter),
        )
        for (stage, name), (parameter, is_embedding) in parameters.items()
        if not _is_constant(parameter)
    ]


def _refuse_different_ends(modules: Mapping[int, nn.Module], ps: ParallelState) -> None:
    """Raise ValueError, on every rank: a marked table whose two ends hold different values. All-gather over pp."""
    parameters = [parameter for module in modules.values() for parameter in module.parameters()]
    tables = [
        parameter for parameter in parameters if _is_marked(parameter) and not parameter.is_meta
    ]
    # a sum of absolute values is enough to tell two initialisations apart, and is cheap to compare
    local_sums = [float(table.detach().abs().sum(dtype=torch.float64)) for table in tables]
    totals = []  # (rank, sum of absolute values)
    for rank, rank_sums in enumerate(all_gather_objects(local_sums, ps.group("pp"))):
        totals += [(rank, total) for total in rank_sums]
    if totals and any(total != totals[0][1] for _, total in totals):
        raise ValueError(
            f"the tied table differs between pipeline ranks {totals[0][0]} and {totals[-1][0]}: the sums of its "
            f"values are {totals[0][1]:.6g} and {totals[-1][1]:.6g}; call torch.manual_seed with one seed on all "
            "ranks before the model is made, or load one checkpoint"
        )


def _refuse_tables_elsewhere(
    modules: Mapping[int, nn.Module], ps: ParallelState, placement: Sequence[int]
) -> None:
    """Raise ValueError, on every rank: a table that is marked as tied where neither end is. All-gather over pp."""
    marked = [
        name
        for module in modules.values()
        for name, parameter in module.named_parameters()
        if _is_marked(parameter)
    ]
    ends = {placement[0], placement[-1]}
    for rank, names in enumerate(all_gather_objects(marked, ps.group("pp"))):
        if rank not in ends and names:
            raise ValueError(
                f'{names[0]} is marked by partial={{"embedding"}} on pipeline rank {rank}, and the first and last '
                f"stage are on {sorted(ends)}: nobody would sum its gradient. Keep it on one stage, and hand it on "
                "in the stages' output"
            )


def check_tables(
    modules: Mapping[int, nn.Module], ps: ParallelState, placement: Sequence[int]
) -> bool:
    """Refuse tied tables elsewhere than on both ends, and ends with different values.

    Whether it has told of twins, see `tell_of_twins`. Three all-gathers.
    """
    # weights that a checkpoint will fill are no numbers yet, and are equal once it has
    await_checkpoint = any(
        getattr(module, "awaits_checkpoint", False) for module in modules.values()
    )
    if ps.size("pp") == 1 or await_checkpoint:
        return False
    _refuse_tables_elsewhere(modules, ps, placement)
    _refuse_different_ends(modules, ps)
    return tell_of_twins(modules, ps)


def tell_of_twins(modules: Mapping[int, nn.Module], ps: ParallelState) -> bool:
    """Whether it has told of an unmarked matrix that another rank has as well. All-gather over pp.

    Two copies of a tied table, or of a block that stands in two stages, would each get a part of the gradient and
    drift apart; and one rank's file may have been loaded on all.
    """
    # (checksum, shape) -> (rank, matrix)
    first_by_content: dict[tuple, tuple[int, _Matrix]] = {}
    first_by_begin: dict[tuple, tuple[int, _Matrix]] = {}
    twins, drawn_alike = [], []
    for rank, matrices in enumerate(
        all_gather_objects(_unmarked_matrices(modules), ps.group("pp"))
    ):
        for matrix in matrices:
            first = first_by_content.setdefault((matrix.checksum, matrix.shape), (rank, matrix))
            if first[0] != rank:
                twins.append((first, (rank, matrix)))
            first = first_by_begin.setdefault(matrix.begin, (rank, matrix))
            if first[0] != rank and matrix.begin:
                drawn_alike.append((first, (rank, matrix)))
    if twins:
        # an embedding is the likelier one to be meant as tied: warn of that first
        with_embedding = [
            pair for pair in twins if pair[0][1].is_embedding or pair[1][1].is_embedding
        ]
        first, second = (with_embedding or twins)[0]
        warnings.warn(_twins_warning(first, second), stacklevel=program_level())
    elif drawn_alike:
        (first_rank, a), (second_rank, b) = drawn_alike[0]
        warnings.warn(
            f"{a.name} of stage {a.stage} and {b.name} of stage {b.stage} begin with the same draws, on pipeline "
            f"ranks {first_rank} and {second_rank}: initial values were drawn by hand from one seed on both, and the "
            "numbers of one stage stand in another's. Seed by stage; a GPTModel's own are those of one process",
            stacklevel=program_level(),
        )
    return bool(twins or drawn_alike)


def _begin_of(matrix: Tensor) -> tuple[float, ...]:
    values = matrix.detach().reshape(-1)[:_COMPARED].double().tolist()
    if len(values) < _COMPARED or 0.0 in values:
        return ()
    return tuple(float(f"{x / values[0]:.3g}") for x in values)


def _is_constant(matrix: Tensor) -> bool:
    """At most two values, as zeros, ones and identities have: every model starts with some of those. Or NaN."""
    if not matrix.numel():
        return True
    low, high = matrix.detach().aminmax()
    if low.isnan():
        return True
    return bool(((matrix == low) | (matrix == high)).all())


def _twins_warning(first: tuple[int, _Matrix], second: tuple[int, _Matrix]) -> str:
    (first_rank, a) = first
    (second_rank, b) = second
    if a.is_embedding or b.is_embedding:
        meaning = (
            "one tied table, each gets a part of its gradient; mark both by "
            'set_layout(weight, Layout(tuple(weight.shape), partial={"embedding"}))'
        )
    else:
        meaning = (
            "one matrix of a block that stands in two stages, each trains a copy by a part of its gradient: put both "
            "uses into one stage. If stages were seeded alike, seed by stage; if one rank's file was loaded on all, "
            "write one for each, or use dist_checkpointing"
        )
    return (
        f"{a.name} of stage {a.stage} and {b.name} of stage {b.stage} have the same values, on pipeline ranks "
        f"{first_rank} and {second_rank}: if they are {meaning}"
    )


def detach_tied_gradients(
    parameters: Sequence[nn.Parameter], placement: Sequence[int]
) -> dict[nn.Parameter, Tensor | None]:
    """Before a step: takes the gradients that tied parameters bring from earlier steps, and returns them.

    Only this step's gradients are summed over the two ends: the earlier ones are sums already.
    Empty where both ends of the model are on one rank and share one parameter, whose gradient is complete.
    Raises ValueError: both ends on one rank with a parameter each.
    """
    tied = list(dict.fromkeys(parameter for parameter in parameters if _is_marked(parameter)))
    if placement[0] == placement[-1]:
        if len(tied) > 1:
            raise ValueError(
                f"both ends of the model are on this rank with {len(tied)} parameters for their tied table; give "
                "both modules 1 parameter (head.weight = embedding.weight)"
            )
        return {}
    earlier_grads: dict[nn.Parameter, Tensor | None] = {}
    for parameter in tied:
        earlier_grads[parameter], parameter.grad = parameter.grad, None
    return earlier_grads


def sum_tied_gradients(
    earlier_grads: Mapping[nn.Parameter, Tensor | None], ps: ParallelState
) -> None:
    """After the step: sums the gradients of both ends. All-reduce over the ranks of the first and the last stage."""
    for parameter, earlier in earlier_grads.items():
        # this end got no gradient; the other one waits in the all-reduce all the same
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        # so that both ends have the sum, and make the same update
        all_reduce(parameter.grad, ps.group("embedding"))
        if earlier is not None:
            parameter.grad += earlier
