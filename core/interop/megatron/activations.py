"""Activations that Megatron names."""

import torch
import torch.nn.functional as F
from torch import Tensor


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2 (arXiv 2109.08668)."""
    return F.relu(x).square()


def quick_gelu(x: Tensor) -> Tensor:
    """x sigmoid(1.702 x)."""
    return x * torch.sigmoid(1.702 * x)


def fast_gelu(x: Tensor) -> Tensor:
    """GELU by tanh."""
    return F.gelu(x, approximate="tanh")
