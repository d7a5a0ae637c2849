"""Rules of the adapters of a run: they fit its model, which is built without memory for that."""

from collections.abc import Iterator

import torch

from core.models.lora.config import LoraConfig
from core.training.config.data import DataConfig
from core.training.model.config import ModelConfig


def lora_rules(
    model: ModelConfig, lora: LoraConfig, data: DataConfig
) -> Iterator[tuple[bool, str]]:
    """Every name is of a linear, every rank below its sizes."""
    if lora.rank is None:
        return
    if model.build is not None:
        yield (
            False,
            f"lora.rank={lora.rank} adapts a GPTModel, model.build={model.build} makes another one; put adapters in "
            "there, or leave it out",
        )
        return
    # here, so that a configuration without adapters is read without the code that trains
    from core.models.gpt import GPTModel
    from core.models.lora import apply_lora
    from core.parallel_state import ParallelState

    try:
        arguments = model.arguments(1, data.sequence_length)
        with torch.device("meta"):  # names and shapes
            whole = GPTModel(**arguments, parallel=ParallelState.single("cpu"), seed=0)
    except (ValueError, OSError):  # told by the rules of the model
        return
    try:
        apply_lora(whole, lora, say=lambda line: None)
    except ValueError as error:
        yield False, f"lora: {str(error).removeprefix('apply_lora: ')}"
