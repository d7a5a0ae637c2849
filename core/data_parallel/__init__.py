"""One gradient over many replicas: `main_grad` buffers, and who sums them when."""

from core.data_parallel.grad_sync import PerParameterGradSync
from core.data_parallel.replicas import check_replicas

__all__ = ["PerParameterGradSync", "check_replicas"]
