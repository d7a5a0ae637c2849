"""Megatron's GPT."""

from core.interop.megatron.models.gpt.gpt_model import GPTModel as GPTModel
