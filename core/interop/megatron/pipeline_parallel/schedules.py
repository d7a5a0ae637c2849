"""`get_forward_backward_func` with all of Megatron's keywords."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from core.interop.megatron.absent import absent_names
from core.interop.megatron.distributed import DistributedDataParallel
from core.interop.megatron.utils import unwrap_model
from core.parallel_state import current_state
from core.pipeline.run.megatron import ForwardStep
from core.pipeline.run.megatron import forward_backward as run

# messages carry their shapes, and the current state has the groups
_NOT_NEEDED = ("decoder_seq_length", "p2p_communicator", "pg_collection", "first_val_step")


def forward_backward(*, model: nn.Module | Sequence[nn.Module], **keywords: Any) -> list[Any]:
    """See `core.pipeline.run.megatron.forward_backward`; then calls the configuration's `finalize_model_grads_func`.
    Its `grad_scale_func` multiplies losses before backward, and those of experts; reports stay as they are.

    Raises ValueError: a keyword that asks for something that is not here.
    """
    if "calculate_per_token_loss" in keywords:
        raise ValueError(
            f"calculate_per_token_loss={keywords['calculate_per_token_loss']} is a field: "
            "TransformerConfig(calculate_per_token_loss=...); leave it out"
        )
    for name in _NOT_NEEDED:
        keywords.pop(name, None)
    for name in ("collect_non_loss_data", "adjust_tensor_shapes_fn", "force_all_reduce"):
        if keywords.pop(name, None):
            raise ValueError(
                f"{name} is not here: leave it out (1 of {len(keywords) + 1} keywords)"
            )
    models = [model] if isinstance(model, nn.Module) else list(model)
    config = getattr(unwrap_model(models[0]), "config", None)
    per_token = bool(getattr(config, "calculate_per_token_loss", False))
    counts: list[Tensor] = []
    if per_token:
        keywords["forward_step_func"] = _counting(keywords["forward_step_func"], counts)
    keywords["loss_scale"] = _loss_scale(config, current_state().device)
    # after get_megatron_optimizer a DataParallel has the gradients of all chunks
    if isinstance(models[0], DistributedDataParallel) and not keywords.get("forward_only", False):
        keywords.setdefault("grad_sync", models[0].shard)
    reports = run(model=model, calculate_per_token_loss=per_token, **keywords)
    # Megatron sums gradients over the replicas in this hook, after the last microbatch
    finalize = getattr(config, "finalize_model_grads_func", None)
    if finalize is not None and not keywords.get("forward_only", False):
        if per_token:
            finalize(models, sum(counts, start=torch.zeros((), dtype=torch.int)))
        else:
            finalize(models)
    return reports


def _loss_scale(config: Any, device: torch.device) -> float | Tensor:
    """What the configuration's `grad_scale_func` multiplies 1 by, as Megatron asks it for auxiliary losses."""
    grad_scale_func = getattr(config, "grad_scale_func", None)
    if grad_scale_func is None:
        return 1.0
    scaled: Tensor = grad_scale_func(torch.ones(1, dtype=torch.float64, device=device))
    return scaled.detach().reshape(())


def _counting(forward_step: ForwardStep, counts: list[Tensor]) -> ForwardStep:
    """The same forward step, which adds each microbatch's num_tokens to `counts` on the last stage."""

    def counted_step(data_iterator: Any, model: Any) -> Any:
        output, loss_func = forward_step(data_iterator, model)

        def counted_loss(tensor: Tensor) -> Any:
            outputs = loss_func(tensor)
            if isinstance(outputs, (tuple, list)) and len(outputs) == 3:
                counts.append(torch.as_tensor(outputs[1]).detach())
            return outputs

        return output, counted_loss

    return counted_step


def get_forward_backward_func(*sizes: Any, **more: Any) -> Callable[..., list[Any]]:
    """Megatron's entry point; one function serves every layout."""
    return forward_backward


__getattr__ = absent_names(__name__)
