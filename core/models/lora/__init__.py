"""LoRA: a low-rank product beside each frozen matrix is all that is trained (arXiv 2106.09685).

Names are loaded at first use: a configuration is read without the code that trains.
"""

from typing import TYPE_CHECKING

from core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from core.models.lora.apply import apply_lora as apply_lora
    from core.models.lora.apply import lora_state_dict as lora_state_dict
    from core.models.lora.apply import merge_lora as merge_lora
    from core.models.lora.config import LoraConfig as LoraConfig
else:
    __getattr__, __dir__ = lazy_exports(__name__)
