"""GPT: the model, its named layer specifications, its pipeline stages.

Names are loaded at first use: a configuration is read without the code that trains.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec as get_gpt_layer_local_spec
    from core.models.gpt.gpt_layer_specs import gpt2_spec as gpt2_spec
    from core.models.gpt.gpt_layer_specs import llama_spec as llama_spec
    from core.models.gpt.gpt_model import GPTModel as GPTModel
    from core.models.gpt.stages import gpt_stages as gpt_stages
    from core.models.gpt.stages import split_layers as split_layers

_HOME = {
    "get_gpt_layer_local_spec": "gpt_layer_specs",
    "gpt2_spec": "gpt_layer_specs",
    "llama_spec": "gpt_layer_specs",
    "GPTModel": "gpt_model",
    "gpt_stages": "stages",
    "split_layers": "stages",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
