"""Hugging Face's configurations and weights: from_huggingface(config) and load_huggingface(model, state_dict)."""

from core.models.huggingface.families import HuggingFaceModel, canonical, from_huggingface, load_huggingface

__all__ = ["HuggingFaceModel", "canonical", "from_huggingface", "load_huggingface"]
