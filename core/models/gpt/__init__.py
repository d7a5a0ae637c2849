"""GPT: the model, its named layer specifications, its pipeline stages.

Names are loaded at first use: a configuration is read without the code that trains.
"""

from typing import TYPE_CHECKING

from core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from core.models.gpt.gpt_layer_specs import gemma3_spec as gemma3_spec
    from core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec as get_gpt_layer_local_spec
    from core.models.gpt.gpt_layer_specs import gpt2_spec as gpt2_spec
    from core.models.gpt.gpt_layer_specs import llama_spec as llama_spec
    from core.models.gpt.gpt_layer_specs import moe_spec as moe_spec
    from core.models.gpt.gpt_layer_specs import olmo2_spec as olmo2_spec
    from core.models.gpt.gpt_model import GPTModel as GPTModel
    from core.models.gpt.presets import PRESETS as PRESETS
    from core.models.gpt.stages import gpt_stages as gpt_stages
    from core.models.gpt.stages import split_layers as split_layers
    from core.models.gpt.styles import STYLES as STYLES
    from core.models.gpt.styles import gpt2_config as gpt2_config
    from core.models.gpt.styles import llama_config as llama_config
else:
    __getattr__, __dir__ = lazy_exports(__name__)
