"""`megatron.core.models` under Megatron's names: GPT only."""
