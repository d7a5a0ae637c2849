"""`get_forward_backward_func` with all of Megatron's keywords."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from core.interop.megatron.utils import unwrap_model
from core.pipeline.run.megatron import forward_backward as run

# messages carry their shapes, and the current state has the groups
_NOT_NEEDED = ("decoder_seq_length", "p2p_communicator", "pg_collection", "first_val_step")


def forward_backward(*, model: nn.Module | Sequence[nn.Module], **keywords: Any) -> list[Any]:
    """See `core.pipeline.run.megatron.forward_backward`; then calls the configuration's `finalize_model_grads_func`.

    Raises ValueError: a keyword that asks for something that is not here.
    """
    for name in _NOT_NEEDED:
        keywords.pop(name, None)
    for name in ("collect_non_loss_data", "adjust_tensor_shapes_fn", "force_all_reduce"):
        if keywords.pop(name, None):
            raise ValueError(
                f"{name} is not here: leave it out (1 of {len(keywords) + 1} keywords)"
            )
    reports = run(model=model, **keywords)
    models = [model] if isinstance(model, nn.Module) else list(model)
    # Megatron sums gradients over the replicas in this hook, after the last microbatch
    finalize = getattr(
        getattr(unwrap_model(models[0]), "config", None), "finalize_model_grads_func", None
    )
    if finalize is not None and not keywords.get("forward_only", False):
        finalize(models)
    return reports


def get_forward_backward_func(*sizes: Any, **more: Any) -> Callable[..., list[Any]]:
    """Megatron's entry point; one function serves every layout."""
    return forward_backward
