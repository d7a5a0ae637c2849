"""The blocks of a transformer, assembled from a spec of typed callables.

Names are loaded at first use: a configuration is read without the code that trains.
"""

from typing import TYPE_CHECKING

from core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from core.transformer.spec import Build as Build
    from core.transformer.spec import TransformerLayerSpec as TransformerLayerSpec
    from core.transformer.transformer_config import RotaryConfig as RotaryConfig
    from core.transformer.transformer_config import TransformerConfig as TransformerConfig
else:
    __getattr__, __dir__ = lazy_exports(__name__)
