"""What a model is called with: shapes and dtypes only, because looking at values would wait for the device."""

import torch
from torch import Tensor


def check_tokens(tokens: Tensor) -> None:
    """Raise ValueError unless `tokens` are integers [b, s]."""
    if tokens.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"tokens must be int64 or int32, got {tokens.dtype} {tuple(tokens.shape)}")
    if tokens.dim() != 2:
        raise ValueError(f"tokens must be [b, s], got {tuple(tokens.shape)}; one sequence is tokens[None]")


def check_optional(
    b: int, s: int, position_ids: Tensor | None, attention_mask: Tensor | None, labels: Tensor | None
) -> None:
    """Raise ValueError for what does not fit tokens [b, s]; positions and mask may be the same for all rows."""
    if position_ids is not None:
        shape = tuple(position_ids.shape)
        if position_ids.dtype != torch.int64 or shape not in ((b, s), (1, s)):
            raise ValueError(f"position_ids must be int64 [b, s] = {(b, s)}, got {position_ids.dtype} {shape}")
    if attention_mask is not None:
        shape = tuple(attention_mask.shape)
        if attention_mask.dtype != torch.bool or shape not in ((b, 1, s, s), (1, 1, s, s)):
            raise ValueError(
                f"attention_mask must be bool [{b}, 1, {s}, {s}] with True = masked out, got {attention_mask.dtype} "
                f"{shape}; None is causal"
            )
    if labels is not None and (labels.dtype != torch.int64 or tuple(labels.shape) != (b, s)):
        raise ValueError(f"labels must be int64 [b, s] = {(b, s)}, got {labels.dtype} {tuple(labels.shape)}")
