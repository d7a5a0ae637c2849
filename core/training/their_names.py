"""Names of transformers' and TRL's that people import from a package of training: what there is instead."""

from collections.abc import Callable
from typing import Any

_RUN = (
    "initialize(config=...) of core.training gives model, optimizer, scheduler and loader; python -m core.pretrain "
    "is the whole run"
)
_FIELDS = "RunConfig.from_dict({'optimizer.lr': ...}) of core.training, or flags of core.pretrain"
# name -> what follows "use"
_INSTEAD = {
    **dict.fromkeys(("Trainer", "SFTTrainer", "Accelerator"), _RUN),
    **dict.fromkeys(("TrainingArguments", "SFTConfig"), _FIELDS),
    "DPOTrainer": f"training.objective=dpo: {_RUN}",
    "DPOConfig": f"training.objective=dpo and dpo.beta: {_FIELDS}",
}


def answers_their_names(load: Callable[[str], Any]) -> Callable[[str], Any]:
    """`__getattr__` of core.training: `load`, and ImportError for these names.

    Of an AttributeError `from core.training import Trainer` would show nothing.
    """

    def told(name: str) -> Any:
        if name in _INSTEAD:
            raise ImportError(
                f"core.training has no {name}; use {_INSTEAD[name]}: docs/coming_from.md has a table of names"
            )
        return load(name)

    return told
