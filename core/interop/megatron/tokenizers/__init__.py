"""Megatron's door to tokenizers, over ours."""

from core.interop.megatron.tokenizers.megatron_tokenizer import (
    MegatronTokenizer as MegatronTokenizer,
)
