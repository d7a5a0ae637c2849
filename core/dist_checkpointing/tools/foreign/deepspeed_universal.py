"""Universal checkpoints of DeepSpeed (`ds_to_universal.py`): a directory per parameter, a whole tensor per file."""

import os
from collections.abc import Mapping
from typing import Any

from core.dist_checkpointing.tools.foreign.deepspeed_pieces import (
    MAIN,
    STEP,
    FlatPiece,
    Shape,
    States,
    whole_piece,
)
from core.dist_checkpointing.tools.foreign.torch_archive import ArchivedTensor, read_archive

ZERO = "zero"
_WEIGHT = "fp32"


def read_universal(
    step: str, module: dict[str, ArchivedTensor], tied: Mapping[str, str]
) -> tuple[States, dict[str, Shape]]:
    """(states, shapes) of what is trained; all other tensors go into `module`, where that has none of their shape.

    tied: names of a parameter that another name has, too. Raises ValueError: a file that is not as
    ds_to_universal.py writes it.
    """
    states, shapes = States(), dict[str, Shape]()
    folder = os.path.join(step, ZERO)
    names = sorted(name for name in os.listdir(folder) if os.path.isdir(os.path.join(folder, name)))
    if not names:
        raise ValueError(f"{folder} holds the directories of 0 parameters")
    for name in names:
        if name in tied:
            continue
        tensors = _states_of(os.path.join(folder, name))
        weight = tensors.pop(_WEIGHT, None)
        if not isinstance(weight, ArchivedTensor):
            raise ValueError(f"{folder}: {name} has no {_WEIGHT}.pt with its weight")
        if not tensors:  # frozen, or a buffer
            if name not in module or module[name].shape != weight.shape:
                module[name] = weight
            continue
        shapes[name] = weight.shape
        states.kinds.setdefault(MAIN, {})[name] = whole_piece(weight)
        for kind, value in tensors.items():
            if kind == STEP:
                states.steps[name] = value
            elif isinstance(value, ArchivedTensor) and value.shape == weight.shape:
                states.add(kind, name, FlatPiece(0, value.numel, value, 0))
            else:
                raise ValueError(f"{folder}: {kind} of {name} is not of its weight's shape")
    return states, shapes


def _states_of(folder: str) -> dict[str, Any]:
    """kind -> the tensor of its file, or the number."""
    states = {}
    for file in sorted(os.listdir(folder)):
        kind, extension = os.path.splitext(file)
        if extension == ".pt":
            value = read_archive(os.path.join(folder, file))
            states[kind] = value.get("param") if isinstance(value, dict) else value
    return states
