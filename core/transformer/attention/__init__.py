"""Self attention: the fused projection, the kernel, and the cache of keys and values for generation.

Names are loaded at first use: a configuration is read without the code that trains.
"""

from typing import TYPE_CHECKING

from core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from core.transformer.attention.self_attention import CoreAttention as CoreAttention
    from core.transformer.attention.self_attention import SelfAttention as SelfAttention
else:
    __getattr__, __dir__ = lazy_exports(__name__)
