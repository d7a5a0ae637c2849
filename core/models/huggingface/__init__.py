"""Hugging Face's configurations and weights: from_huggingface(config) and load_huggingface(model, weights)."""

from core.models.huggingface.families import FAMILIES, HuggingFaceModel, from_huggingface
from core.models.huggingface.reading import canonical, load_huggingface

__all__ = ["FAMILIES", "HuggingFaceModel", "canonical", "from_huggingface", "load_huggingface"]
