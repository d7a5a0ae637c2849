"""Ends a step's gradients: sums them over the data ranks, and divides them by the tokens if these are given."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from core.interop.megatron.distributed.distributed_data_parallel import DistributedDataParallel
from core.parallel_state import current_state
from core.parallel_state.collectives import Group, all_reduce, broadcast
from core.parallel_state.layout import has_layout


def finalize_model_grads(
    model: Sequence[nn.Module],
    num_tokens: Tensor | None = None,
    pg_collection: Any = None,
    force_all_reduce: bool = False,
) -> None:
    """`finish_grad_sync` of every chunk. num_tokens: of this rank's microbatches; that of the last stage counts.

    Norms under sequence parallelism and tables tied over the pipeline's ends are summed already, where they arise.
    Raises ValueError: a chunk that is not wrapped, on several data ranks.
    """
    ps = current_state()
    config = getattr(model[0], "config", None)
    if num_tokens is None and getattr(config, "calculate_per_token_loss", False):
        warnings.warn(
            "calculate_per_token_loss=True, and finalize_model_grads was given no num_tokens: gradients stay sums "
            "over the tokens of all ranks. Give it as config.finalize_model_grads_func, which is called with them, "
            "or num_tokens of this rank's microbatches",
            stacklevel=2,
        )
    for chunk in model:
        finish = getattr(chunk, "finish_grad_sync", None)
        if finish is None and ps.size("dp-cp") > 1:
            raise ValueError(
                f"{type(chunk).__name__} has no finish_grad_sync(), and {ps.size('dp-cp')} data ranks have gradients "
                "of their own; wrap it in DistributedDataParallel(config, ddp_config, module)"
            )
        if finish is not None:
            finish()
        else:
            _sum_marked(chunk, ps.group("tp"))
    tokens = None
    if num_tokens is not None:
        # only the last stage knows its tokens; then the sum over the replicas
        total = torch.as_tensor(num_tokens, device=ps.device).reshape(1).clone()
        broadcast(total, ps.group("pp"), ps.size("pp") - 1)
        all_reduce(total, ps.group("dp-cp"))
        # a batch of padding alone has 0 tokens, and gradients of 0
        tokens = total.clamp(min=1)
    elif not getattr(config, "calculate_per_token_loss", False):
        return
    for chunk in model:
        if isinstance(chunk, DistributedDataParallel) and chunk.shard is not None:
            chunk.divide_gradients(tokens)
        elif tokens is not None:
            for parameter in chunk.parameters():
                if parameter.grad is not None:
                    parameter.grad /= tokens


def _sum_marked(chunk: nn.Module, group: Group | None) -> None:
    """Of a chunk that is not wrapped: gradients of this rank's rows, which a program marks as in Megatron."""
    for parameter in chunk.parameters():
        is_marked = getattr(parameter, "sequence_parallel", False) and not has_layout(parameter)
        if is_marked and parameter.grad is not None:
            parameter.grad = all_reduce(parameter.grad.clone(), group)
