"""GPT: the model, its named specs, Hugging Face's names."""

from core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, gpt2_spec, llama_spec
from core.models.gpt.gpt_model import GPTModel
from core.models.gpt.huggingface import from_huggingface, load_huggingface
from core.models.gpt.stages import gpt_stages, split_layers

__all__ = [
    "GPTModel",
    "from_huggingface",
    "get_gpt_layer_local_spec",
    "gpt2_spec",
    "gpt_stages",
    "llama_spec",
    "load_huggingface",
    "split_layers",
]
