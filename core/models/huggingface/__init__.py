"""Hugging Face's configurations and weights: from_huggingface(config), load_huggingface(model, weights), and back:
save_huggingface(model, folder)."""

from core.models.huggingface.exporting import save_huggingface
from core.models.huggingface.families import FAMILIES, HuggingFaceModel, from_huggingface
from core.models.huggingface.reading import canonical, load_huggingface

__all__ = [
    "FAMILIES",
    "HuggingFaceModel",
    "canonical",
    "from_huggingface",
    "load_huggingface",
    "save_huggingface",
]
