"""One sequence over many ranks: the attention of a rank's rows, whose keys may be elsewhere. Knows no model."""

from core.context_parallel.attention import Exchange, context_attention
from core.context_parallel.documents import (
    Documents,
    begin_of_rows,
    document_rows,
    visible_mask,
    within_window,
)
from core.context_parallel.kernels import has_kernel
from core.context_parallel.whole import gather_from_context_region

__all__ = [
    "Documents",
    "Exchange",
    "begin_of_rows",
    "context_attention",
    "document_rows",
    "gather_from_context_region",
    "has_kernel",
    "visible_mask",
    "within_window",
]
