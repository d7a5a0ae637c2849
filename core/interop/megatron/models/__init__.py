"""Megatron's models: GPT."""
