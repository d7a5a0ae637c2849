"""The blocks of a transformer, assembled from a spec of typed callables."""

from core.transformer.spec import Build, TransformerLayerSpec
from core.transformer.transformer_config import TransformerConfig

__all__ = ["Build", "TransformerConfig", "TransformerLayerSpec"]
