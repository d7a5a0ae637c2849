"""Whole models: GPT, and Hugging Face's configurations and weights for it."""
