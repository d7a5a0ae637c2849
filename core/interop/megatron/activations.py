"""Activations that Megatron names."""

import torch
import torch.nn.functional as F
from torch import Tensor

from core.transformer.activations import squared_relu as squared_relu


def quick_gelu(x: Tensor) -> Tensor:
    """x sigmoid(1.702 x), elementwise: the approximation of GPT-2 and CLIP."""
    return x * torch.sigmoid(1.702 * x)


def fast_gelu(x: Tensor) -> Tensor:
    """GELU by its tanh approximation, elementwise (arXiv 1606.08415, section 2)."""
    return F.gelu(x, approximate="tanh")
