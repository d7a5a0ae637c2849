"""Parallel layers with Megatron's arguments, which return (output, bias)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from core import tensor_parallel as ours
from core.interop.megatron.tensor_parallel.mappings import tensor_group
from core.parallel_state import Init, current_state, layout_of
from core.parallel_state.layout import true_part
from core.tensor_parallel import Placement

InitMethod = Callable[[Tensor], Any]
STRIDE = ("stride", 1)  # one block of rows per rank, as ours are cut


def _place(config: Any, tp_group: Any) -> Placement:
    return Placement(
        group=tensor_group(tp_group),
        sequence_parallel=current_state().config.sequence_parallel,
        dtype=getattr(config, "params_dtype", torch.float32),
        device=current_state().device,
    )


@torch.no_grad()
def _draw(layer: Any, init_method: InitMethod | None) -> None:
    """This rank's part of the whole weight as `init_method` draws it on the CPU (seed all ranks alike); bias 0."""
    if init_method is None:
        raise ValueError("a layer of its own needs init_method, such as torch.nn.init.xavier_normal_")
    ps, weight = current_state(), layer.weight
    layout = layout_of(weight)
    whole = torch.empty(layout.shape, dtype=weight.dtype)
    init_method(whole)
    weight.zero_()
    true_part(weight, layout, ps.coordinate, ps.sizes).copy_(whole[layout.box(ps.coordinate, ps.sizes)])
    if getattr(layer, "bias", None) is not None:
        layer.bias.zero_()


def _refuse(more: dict[str, Any]) -> None:
    """Of the arguments that are not here, the values that ask for nothing pass: None, False and a stride of 1."""
    asked = [name for name, value in more.items() if not (value is None or value is False or (name, value) == STRIDE)]
    if asked:
        raise ValueError(f"{len(asked)} arguments are not here: {', '.join(asked)}; leave them out")


def _output_and_bias(layer: Any, run: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor | None]:
    """(y, None), or with `skip_bias_add` (y without bias, bias)."""
    bias = layer.bias
    if not layer.skip_bias_add or bias is None:
        return run(x), None
    layer._parameters["bias"] = None
    try:
        return run(x), bias
    finally:
        layer._parameters["bias"] = bias


class ColumnParallelLinear(ours.ColumnParallelLinear):
    """Ours; `forward` returns (y, bias or None). With `skip_bias_add` the bias is returned and not added."""

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
        tp_group: Any = None,
        **more: Any,
    ) -> None:
        _refuse(more)
        place = _place(config, tp_group)
        super().__init__(
            input_size, output_size, place=place, bias=bias, init=Init(std=0.02), gather_output=gather_output
        )
        _draw(self, init_method)
        self.skip_bias_add = skip_bias_add

    def forward(self, x: Tensor, *unused: Any) -> Any:
        return _output_and_bias(self, super().forward, x)


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
        place = _place(config, tp_group)
        super().__init__(input_size, output_size, place=place, bias=bias, init=Init(std=0.02))
        _draw(self, init_method)
        self.skip_bias_add, self.input_is_parallel, self.group = skip_bias_add, input_is_parallel, place.group

    def forward(self, x: Tensor) -> Any:
        if not self.input_is_parallel:
            x = ours.scatter_to_tensor_region(x, self.group)
        return _output_and_bias(self, super().forward, x)


class VocabParallelEmbedding(ours.VocabParallelEmbedding):
    """Ours, drawn by `init_method`: ids [...] -> [..., h]."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: InitMethod,
        config: Any,
        tp_group: Any = None,
        **more: Any,
    ) -> None:
        _refuse(more)
        super().__init__(num_embeddings, embedding_dim, place=_place(config, tp_group), init=Init(std=0.02))
        _draw(self, init_method)
