"""Megatron's `transformer`: configuration, specs and the base class of modules."""

from core.interop.megatron.transformer.module import MegatronModule as MegatronModule
from core.interop.megatron.transformer.transformer_config import (
    MLATransformerConfig as MLATransformerConfig,
)
from core.interop.megatron.transformer.transformer_config import (
    TransformerConfig as TransformerConfig,
)
