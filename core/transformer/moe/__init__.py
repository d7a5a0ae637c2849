"""Mixture of experts: a feed-forward part of which each token uses a few experts (arXiv 2101.03961, 2006.16668)."""

from typing import TYPE_CHECKING

from core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from core.transformer.moe.layer import MoELayer as MoELayer
else:
    __getattr__, __dir__ = lazy_exports(__name__)
