"""Whether the adapters of a checkpoint are those of this run, and which of its weights it holds."""

from collections.abc import Mapping
from typing import Any

from core.data_parallel import DataParallel
from core.models.lora import LoraConfig, lora_state_dict
from core.models.lora.base import adapters_of, refuse_other_base
from core.optimizer import sharded_state_dict


def begun_with(url: str) -> str:
    """What a run from step 0 with the weights of this checkpoint is given, for messages."""
    if adapters_of(url) is None:
        return f"checkpoint.weights={url}"
    # which takes whole models only
    return f"model.huggingface=FOLDER, once they are folded in: python -m core.models.huggingface export {url} FOLDER"


def refuse_other_adapters(url: str, here: Mapping[str, Any] | None) -> None:
    """Raise ValueError: adapters of another rank, scale or place, or beside other weights; on one side only.

    here: the run's, as its checkpoints will say; without "base" the weights are not compared. None: it has none.
    """
    stored = adapters_of(url)
    if stored is None and here is None:
        return
    if stored is None or here is None:
        rank, other = (stored or {}).get("rank"), (here or {}).get("rank")
        raise ValueError(
            f"{url} has lora.rank={rank} (here {other}): use the same; a run from step 0 with these weights is "
            f"{begun_with(url)}"
        )
    different = LoraConfig.of_facts(dict(here)).differences(stored)
    if different:
        raise ValueError(
            f"{url} has {', '.join(different)}: its adapters compute something else; use the same; a run from step "
            f"0 with these weights is {begun_with(url)}"
        )
    if (found := here.get("base")) is not None:
        refuse_other_base(str(found), stored, url, "this run")


def model_state(shard: DataParallel, lora: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a checkpoint of the run holds of its model: all, or what is not frozen beside adapters."""
    state = sharded_state_dict(shard)
    if lora is None or lora["save_base"]:
        return state
    return lora_state_dict(state, shard.module)
