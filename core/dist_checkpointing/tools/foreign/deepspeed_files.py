"""Which files of a DeepSpeed checkpoint there are, and what in them is not read."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from core.dist_checkpointing.storage.fs import open_regular
from core.dist_checkpointing.tools.foreign.deepspeed_universal import ZERO
from core.dist_checkpointing.tools.foreign.torch_archive import read_archive

LATEST = ("latest", "latest_universal")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_OTHERS = {  # files that are not read: what they belong to
    r"layer_\d+-model_.*model_states\.pt": "a PipelineModule, a file per layer",
    r"layer_.*expert_.*model_states\.pt": "experts, a file each",
    r"expp_rank_.*optim_states\.pt": "experts",
}
_REMEDY = "convert it by DeepSpeed's ds_to_universal.py, and import the directory that this makes"


@dataclass(frozen=True)
class DeepSpeedFiles:
    """What the files say, by data rank. optimizer: empty where ZeRO is off, and of a universal checkpoint."""

    folder: str
    models: tuple[Mapping[str, Any], ...]
    optimizers: tuple[Mapping[str, Any], ...] = ()
    universal: bool = False


def is_deepspeed(folder: str) -> bool:
    """Whether `deepspeed`'s `save_checkpoint` made this directory, or one step of it."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return any(name in LATEST or re.search(r"_(model|optim)_states\.pt$", name) for name in names)


def read_files(folder: str) -> DeepSpeedFiles:
    """Raises ValueError: a layout that is not read (by name), files that are missing, damage."""
    step = _step_folder(folder)
    names = sorted(os.listdir(step))
    if os.path.isdir(os.path.join(step, ZERO)):
        first = (
            "mp_rank_00_model_states.pt"  # of whose module only what the other files lack is taken
        )
        return DeepSpeedFiles(
            step, (_read(step, first) if first in names else {"module": {}},), universal=True
        )
    for pattern, what in _OTHERS.items():
        if found := [name for name in names if re.fullmatch(pattern, name)]:
            raise ValueError(f"{step} holds {what} ({found[0]}), which is not read: {_REMEDY}")
    models = _by_rank(step, names, _MODEL)
    optimizers = _by_rank(step, names, _OPTIMIZER)
    if not models:
        raise ValueError(f"{step} has 0 files of model states, as mp_rank_00_model_states.pt")
    read_models = tuple(_read(step, name) for name in models)
    read_optimizers = tuple(_optimizer_of(step, name) for name in optimizers)
    if read_optimizers:
        said = read_optimizers[0].get("partition_count")
        count = max(said) if isinstance(said, list) else said
        if count != len(read_optimizers):
            raise ValueError(
                f"{step} has {len(read_optimizers)} files of optimizer states, of {count} data ranks; copy them all"
            )
        if len(models) not in (1, count):
            raise ValueError(
                f"{step} has {len(models)} files of model states, of {count} data ranks; copy all of them"
            )
    return DeepSpeedFiles(step, read_models, read_optimizers)


def _step_folder(folder: str) -> str:
    paths = [os.path.join(folder, name) for name in LATEST]
    path = next(filter(os.path.exists, paths), None)
    if path is None:
        return folder
    with open(open_regular(path), "rb") as file:
        tag = file.read(256).decode("utf-8", "replace").strip()
    # a name of the file is not believed: it could name any directory of this machine
    if not tag or os.path.basename(tag) != tag or tag in (os.curdir, os.pardir):
        raise ValueError(f"{path} names {tag!r}, which is no step")
    step = os.path.join(folder, tag)
    if not os.path.isdir(step):
        raise ValueError(f"{path} names {tag}, which is not there; give the step's own directory")
    return step


def _by_rank(step: str, names: list[str], pattern: re.Pattern[str]) -> list[str]:
    """The files of all data ranks in their order."""
    file_of_rank: dict[int, str] = {}
    for name in names:
        match = pattern.fullmatch(name)
        if match is None:
            continue
        if int(match[2]):
            raise ValueError(
                f"{step} holds tensor-parallel rank {int(match[2])} ({name}): how Megatron cut its tensors is not in "
                f"the files; {_REMEDY}"
            )
        rank = int(match[1] or 0)
        if rank in file_of_rank:
            raise ValueError(f"{step} has {file_of_rank[rank]} and {name} of rank {rank}; keep one")
        file_of_rank[rank] = name
    if sorted(file_of_rank) != list(range(len(file_of_rank))):
        raise ValueError(
            f"{step} has the files of ranks {sorted(file_of_rank)[:5]}, {len(file_of_rank)} in all; copy all of them"
        )
    return [file_of_rank[rank] for rank in sorted(file_of_rank)]


def _read(step: str, name: str) -> Mapping[str, Any]:
    value = read_archive(os.path.join(step, name))
    if not isinstance(value, dict):
        raise ValueError(f"{step}: {name} holds a {type(value).__name__}, not DeepSpeed's states")
    return value


def _optimizer_of(step: str, name: str) -> Mapping[str, Any]:
    state = _read(step, name).get("optimizer_state_dict")
    if not isinstance(state, dict):
        raise ValueError(f"{step}: {name} holds no optimizer_state_dict of ZeRO")
    return state
