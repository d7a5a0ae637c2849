"""Which files of a Megatron checkpoint of a file per rank there are, and what each says."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from core.dist_checkpointing.storage.fs import open_regular
from core.dist_checkpointing.tools.foreign.inert import Record
from core.dist_checkpointing.tools.foreign.torch_archive import read_archive

LATEST = "latest_checkpointed_iteration.txt"
FILE = "model_optim_rng.pt"
_OLD_FILE = "model_rng.pt"
_RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?")


@dataclass(frozen=True)
class MegatronRank:
    """One rank's file. chunks: the state dicts of its stages, several where they are interleaved.

    values: what is a number, a text or a flag among the arguments and beside them.
    """

    tp: int
    pp: int
    ep: int
    chunks: tuple[Mapping[str, Any], ...]
    arguments: Mapping[str, Any]
    version: Any
    values: Mapping[str, Any]


def is_megatron(folder: str) -> bool:
    """Whether Megatron's `save_checkpoint` with a file per rank made this directory, or one step of it."""
    try:
        return bool(_rank_folders(_step_folder(folder)))
    except ValueError:
        return True


def read_ranks(folder: str) -> tuple[str, list[MegatronRank]]:
    """The step's directory, and all ranks, tensor ranks first. Raises ValueError: one is missing, damage."""
    step = _step_folder(folder)
    folders = _rank_folders(step)
    raw = {numbers: _read(os.path.join(step, name)) for numbers, name in folders.items()}
    arguments = _arguments(step, next(iter(raw.values())))
    has_pipeline = int(arguments.get("pipeline_model_parallel_size") or 1) > 1
    ranks = []
    for numbers, content in raw.items():
        tp, *rest = numbers
        # without a pipeline the second number is the expert rank's
        pp = rest.pop(0) if has_pipeline and rest else 0
        ranks.append(_rank(step, tp, pp, rest[0] if rest else 0, content))
    ranks.sort(key=lambda rank: (rank.ep, rank.pp, rank.tp))
    _refuse_missing(step, arguments, {(rank.tp, rank.pp, rank.ep) for rank in ranks})
    return step, ranks


def _step_folder(folder: str) -> str:
    path = os.path.join(folder, LATEST)
    if not os.path.exists(path):
        return folder
    with open(open_regular(path), "rb") as file:
        tag = file.read(64).decode("utf-8", "replace").strip()
    name = tag if tag == "release" else f"iter_{int(tag):07d}" if tag.isdecimal() else ""
    if not name or not os.path.isdir(os.path.join(folder, name)):
        raise ValueError(f"{path} names {tag!r}, which is not there; give the step's own directory")
    return os.path.join(folder, name)


def _rank_folders(step: str) -> dict[tuple[int, ...], str]:
    """The numbers in a directory's name -> its name."""
    names = sorted(os.listdir(step)) if os.path.isdir(step) else []
    folders = {}
    for name in names:
        match = _RANK.fullmatch(name)
        files = (os.path.join(step, name, file) for file in (FILE, _OLD_FILE))
        if match is not None and any(map(os.path.exists, files)):
            folders[tuple(int(number) for number in match.groups() if number is not None)] = name
    return folders


def _read(folder: str) -> Mapping[str, Any]:
    path = os.path.join(folder, FILE)
    if not os.path.exists(path):
        path = os.path.join(folder, _OLD_FILE)
    content = read_archive(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not Megatron's dict")
    return content


def _arguments(step: str, content: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = content.get("args")
    state = arguments.state if isinstance(arguments, Record) else None
    if not isinstance(state, dict) or "tensor_model_parallel_size" not in state:
        raise ValueError(
            f"{step} does not hold Megatron's arguments (args), without which heads and ranks are not known; load "
            "and save it with Megatron"
        )
    return state


def _rank(step: str, tp: int, pp: int, ep: int, content: Mapping[str, Any]) -> MegatronRank:
    names = ["model"] if "model" in content else []
    names = names or [f"model{n}" for n in range(len(content)) if f"model{n}" in content]
    if not names:
        raise ValueError(f"{step}: the file of tensor rank {tp}, stage {pp} holds no model")
    arguments = _arguments(step, content)
    values = {f"args/{name}": value for name, value in arguments.items()}
    values |= {
        name: content[name] for name in ("iteration", "checkpoint_version") if name in content
    }
    plain = (bool, int, float, str)
    return MegatronRank(
        tp, pp, ep,
        tuple(content[name] for name in names),
        arguments,
        content.get("checkpoint_version"),
        {name: value for name, value in values.items() if isinstance(value, plain)},
    )  # fmt: skip


def _refuse_missing(step: str, arguments: Mapping[str, Any], found: set[tuple[int, ...]]) -> None:
    sizes = [
        int(arguments.get(name) or 1)
        for name in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "expert_model_parallel_size",
        )
    ]
    has_experts = bool(arguments.get("num_experts"))
    sizes[2] = sizes[2] if has_experts else 1
    expected = {
        (tp, pp, ep) for tp in range(sizes[0]) for pp in range(sizes[1]) for ep in range(sizes[2])
    }
    if found != expected:
        missing = sorted(expected - found)
        raise ValueError(
            f"{step} has the files of {len(found)} ranks, of {sizes[0]} tensor x {sizes[1]} pipeline x {sizes[2]} "
            f"expert ranks: {missing[:4] or sorted(found - expected)[:4]} (tensor, pipeline, expert); copy them all"
        )
