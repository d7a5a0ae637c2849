"""Parallel layers with Megatron's arguments, which return (output, bias)."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from core import tensor_parallel as ours
from core.interop.megatron.tensor_parallel.mappings import tensor_group
from core.parallel_state import Init, ParallelState, current_state, layout_of
from core.tensor_parallel import Placement
from core.tensor_parallel.own_modules import OwnModules

InitMethod = Callable[[Tensor], Any]
# one block of rows per rank, as our layouts have it
DEFAULT_STRIDE = ("stride", 1)


# who watches a program's own modules of these layers, on the tensor ranks of a state
_OWN_MODULES: weakref.WeakKeyDictionary[ParallelState, OwnModules] = weakref.WeakKeyDictionary()


def _own_modules() -> OwnModules | None:
    ps = current_state()
    group = ps.group("tp")
    if group is not None and ps not in _OWN_MODULES:
        _OWN_MODULES[ps] = OwnModules(group, splits_sequence=ps.config.sequence_parallel)
    return _OWN_MODULES.get(ps)


def _placement(config: Any, tp_group: Any) -> Placement:
    return Placement(
        group=tensor_group(tp_group),
        sequence_parallel=current_state().config.sequence_parallel,
        own_modules=_own_modules(),
        dtype=getattr(config, "params_dtype", torch.float32),
        device=current_state().device,
        filled_by_model=True,  # by `_draw`, with Megatron's init_method
    )


@torch.no_grad()
def _draw(layer: Any, init_method: InitMethod | None) -> None:
    """Initialise a layer: this rank's shard of the full weight, which `init_method` draws on the CPU; bias 0.

    All ranks must have one seed. Raises ValueError: no init_method.
    """
    if init_method is None:
        raise ValueError(
            "a layer of its own needs init_method, such as torch.nn.init.xavier_normal_"
        )
    weight = layer.weight
    full_weight = torch.empty(layout_of(weight).shape, dtype=weight.dtype)
    # every rank draws the same full weight, and keeps its rows or columns: equal for every number of tensor ranks
    init_method(full_weight)
    ours.fill_from_full(weight, full_weight)
    if getattr(layer, "bias", None) is not None:
        layer.bias.zero_()


def _refuse(more: dict[str, Any]) -> None:
    """Raise ValueError for Megatron's arguments that are not here, unless their value has no effect."""
    unsupported = []
    for name, value in more.items():
        without_effect = value is None or value is False or (name, value) == DEFAULT_STRIDE
        if not without_effect:
            unsupported.append(name)
    if unsupported:
        raise ValueError(
            f"{len(unsupported)} arguments are not here: {', '.join(unsupported)}; leave them out"
        )


def _output_and_bias(
    layer: Any, run: Callable[[Tensor], Tensor], x: Tensor
) -> tuple[Tensor, Tensor | None]:
    """(y, None), or with `skip_bias_add` (y without bias, bias)."""
    bias = layer.bias
    if not layer.skip_bias_add or bias is None:
        return run(x), None
    # so that the layer does not add it
    layer._parameters["bias"] = None
    try:
        return run(x), bias
    finally:
        layer._parameters["bias"] = bias


class ColumnParallelLinear(ours.ColumnParallelLinear):
    """Ours; `forward` returns (y, bias or None). With `skip_bias_add` the bias is returned and not added.

    skip_weight_param_allocation: no weight of its own; `forward(x, weight)` has that of a tied table, [o/tp, i].
    Its forward raises ValueError: no weight then.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: InitMethod | None = None,
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        skip_weight_param_allocation: bool = False,
        tp_group: Any = None,
        **more: Any,
    ) -> None:
        _refuse(more)
        placement = _placement(config, tp_group)
        super().__init__(
            input_size,
            output_size,
            place=placement,
            bias=bias,
            init=Init(std=0.02),
            gather_output=gather_output,
        )
        _draw(self, init_method if not skip_weight_param_allocation else torch.nn.init.zeros_)
        if skip_weight_param_allocation:
            self._parameters["weight"] = None
        self.skip_bias_add = skip_bias_add

    def extra_repr(self) -> str:
        return super().extra_repr() if self.weight is not None else "weight of another"

    def forward(self, x: Tensor, weight: Tensor | None = None, *unused: Any) -> Any:
        own_weight = self._parameters["weight"]
        if weight is None and own_weight is None:
            raise ValueError(
                "ColumnParallelLinear has no weight of its own (skip_weight_param_allocation=True), and forward was "
                "given none: forward(x, weight=embedding.weight)"
            )
        if weight is None:
            return _output_and_bias(self, super().forward, x)
        self._parameters["weight"] = cast(Parameter, weight)
        try:
            return _output_and_bias(self, super().forward, x)
        finally:
            self._parameters["weight"] = own_weight


class RowParallelLinear(ours.RowParallelLinear):
    """Ours; `forward` returns (y, bias or None). The input is this rank's columns."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: InitMethod | None = None,
        bias: bool = True,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        tp_group: Any = None,
        **more: Any,
    ) -> None:
        _refuse(more)
        placement = _placement(config, tp_group)
        super().__init__(input_size, output_size, place=placement, bias=bias, init=Init(std=0.02))
        _draw(self, init_method)
        self.skip_bias_add = skip_bias_add
        self.input_is_parallel = input_is_parallel
        self.group = placement.group

    def forward(self, x: Tensor) -> Any:
        if not self.input_is_parallel:
            x = ours.scatter_to_tensor_region(x, self.group)
        y, bias = _output_and_bias(self, super().forward, x)
        if bias is not None and self.splits_sequence:
            # added to this rank's rows alone: the ranks' gradients are parts of a sum
            bias = ours.copy_to_tensor_region(bias, self.group)
        return y, bias


class VocabParallelEmbedding(ours.VocabParallelEmbedding):
    """Ours, drawn by `init_method`: ids [...] -> [..., h], whole on every rank whatever the configuration says.

    reduce_scatter_embeddings: ids [b, s] -> [s/tp, b, h], this rank's rows of the sequence; backward gathers.
    Its forward raises ValueError then: ids that are not [b, s].
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: InitMethod,
        config: Any,
        reduce_scatter_embeddings: bool = False,
        tp_group: Any = None,
        **more: Any,
    ) -> None:
        _refuse(more)
        # In Megatron the argument alone says whether the sequence is split, not the configuration: scripts that
        # leave it out split the output themselves.
        placement = replace(
            _placement(config, tp_group), sequence_parallel=reduce_scatter_embeddings
        )
        super().__init__(num_embeddings, embedding_dim, place=placement, init=Init(std=0.02))
        _draw(self, init_method)
        self.reduce_scatter_embeddings = reduce_scatter_embeddings

    def forward(self, ids: Tensor) -> Tensor:
        if not self.reduce_scatter_embeddings:
            return super().forward(ids)
        if ids.dim() != 2:
            raise ValueError(
                f"VocabParallelEmbedding(reduce_scatter_embeddings=True) takes ids [b, s], 2 dims; these have "
                f"{ids.dim()}: {list(ids.shape)}; give [b, s], or leave reduce_scatter_embeddings out"
            )
        # rows of a sequence first: the sum over ranks is split along dim 0
        return super().forward(ids.transpose(0, 1).contiguous())
