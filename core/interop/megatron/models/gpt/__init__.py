"""`megatron.core.models.gpt` under Megatron's names."""

from core.interop.megatron.models.gpt.gpt_model import GPTModel as GPTModel
