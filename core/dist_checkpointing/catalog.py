"""What one rank brings to a checkpoint, and what all ranks bring together."""

import hashlib
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from core.dist_checkpointing.arrays import STORED, ArrayInfo, Holdings
from core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, map_leaves, refuse_freed
from core.parallel_state.flat import Box, volume

_KEY = re.compile(r"[\w.\-]+(/[\w.\-]+)*", re.ASCII)
RESERVED = ("receipts", "manifest.json", "zarr.json")


@dataclass(frozen=True)
class LocalState:
    """A state dict of this rank, flat: the parts of each array by key, and JSON values by key."""

    parts: dict[str, list[ShardedTensor]] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    plain: set[str] = field(default_factory=set)  # keys of plain tensors, which must be the same on all ranks

    def plain_digests(self) -> dict[str, int]:
        """A checksum of every plain tensor."""
        return {key: _checksum(self.parts[key][0].data) for key in sorted(self.plain & self.parts.keys())}

    def arrays(self) -> dict[str, ArrayInfo]:
        """What the arrays are that this rank holds parts of. Raises ValueError: parts that disagree."""
        found: dict[str, ArrayInfo] = {}
        for key, parts in self.parts.items():
            infos = {part.info for part in parts}
            if len(infos) > 1:
                raise ValueError(
                    f"{key}: its parts on one rank disagree: {sorted(map(str, infos))}; give them one key"
                )
            found[key] = infos.pop()
        return found

    def holdings(self) -> dict[str, tuple[Box, ...]]:
        """The boxes that this rank holds."""
        return {key: tuple(part.box for part in parts) for key, parts in self.parts.items()}


def flatten(state: Any) -> LocalState:
    """Sharded tensors and objects of a nested state dict; plain tensors count as whole, plain values as JSON objects
    under the path of their names.

    Raises ValueError: a key that cannot be a path, a dtype that cannot be stored, a value that is not JSON.
    """
    flat = LocalState()

    def add(path: tuple[str, ...], leaf: Any) -> None:
        if isinstance(leaf, Tensor):
            flat.plain.add("/".join(path))
            if leaf.dim() and leaf.is_floating_point() and not any(leaf.stride()) and bool(leaf.isnan().any()):
                refuse_freed("/".join(path), leaf)  # what `model.state_dict()` gives under ZeRO-3
            leaf = ShardedTensor("/".join(path), leaf.detach(), tuple(leaf.shape), (0,) * leaf.dim())
        if isinstance(leaf, ShardedTensor):
            check_key(leaf.key)
            kind = leaf.data.dtype if leaf.data.layout is torch.strided else leaf.data.layout
            if kind is not leaf.data.dtype or leaf.info.dtype not in STORED:
                raise ValueError(f"{leaf.key} is of {kind}, which has no stored form; known: dense, {list(STORED)}")
            parts = flat.parts.setdefault(leaf.key, [])
            if volume(leaf.box):  # a rank may hold padding only
                parts.append(leaf)
            elif not parts:
                flat.parts.pop(leaf.key)
            return
        item = leaf if isinstance(leaf, ShardedObject) else ShardedObject("/".join(path), leaf)
        check_key(item.key)
        value = _plain(item)
        if flat.objects.setdefault(item.key, value) != value:
            raise ValueError(f"{item.key} is both {flat.objects[item.key]!r} and {value!r}; give them one key each")

    if not isinstance(state, Mapping):
        raise ValueError(f"a state is a dict of tensors and values, not a {type(state).__name__}: {{'model': ...}}")
    map_leaves(state, add)
    if both := sorted(flat.parts.keys() & flat.objects.keys()):
        raise ValueError(f"{both[0]} is both a tensor and a value; give them one key each")
    return flat


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)


def check_key(key: str) -> None:
    """Raise ValueError where a key cannot be a path below a checkpoint."""
    names = key.split("/")
    if not _KEY.fullmatch(key) or any(set(n) == {"."} or len(n) > 200 or n in RESERVED for n in names):
        raise ValueError(
            f"the key {key!r} cannot be a path in a checkpoint: use letters, digits, '_', '-', '.', '/', parts of at "
            f"most 200 characters, none of {', '.join(RESERVED)}"
        )


def _plain(item: ShardedObject) -> Any:
    try:
        return json.loads(json.dumps(item.data, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{item.key}: {type(item.data).__name__} is not a JSON value ({error}); give numbers, strings, lists and "
            "dicts, or a tensor"
        ) from error


@dataclass(frozen=True)
class Catalog:
    """All ranks' arrays, and which boxes each rank holds."""

    arrays: dict[str, ArrayInfo]
    holdings: list[Holdings]

    def without(self, keys: Sequence[str] | set[str]) -> "Catalog":
        """The same without some arrays."""
        return Catalog(
            {key: info for key, info in self.arrays.items() if key not in keys},
            [{key: boxes for key, boxes in held.items() if key not in keys} for held in self.holdings],
        )


def to_json(state: LocalState) -> dict[str, Any]:
    """key -> [array, boxes] of one rank."""
    held = state.holdings()
    return {key: [info.to_json(), held[key]] for key, info in state.arrays().items()}


def digest(local: Mapping[str, Any]) -> str:
    """Changes when anything in a rank's `to_json` does."""
    return hashlib.blake2b(json.dumps(local, sort_keys=True).encode(), digest_size=16).hexdigest()


def merge(told: Sequence[Mapping[str, Any]]) -> Catalog:
    """The catalogue from every rank's `to_json`.

    Raises ValueError: ranks that disagree about an array (a model built differently, names that are not global).
    """
    arrays: dict[str, ArrayInfo] = {}
    first: dict[str, int] = {}
    holdings: list[Holdings] = []
    for rank, local in enumerate(told):
        for key, (value, _) in local.items():
            info = ArrayInfo.from_json(value)
            known = arrays.setdefault(key, info)
            first.setdefault(key, rank)
            if known != info:
                raise ValueError(
                    f"{key} is {known} on rank {first[key]} and {info} on rank {rank}; build the same model on all "
                    "ranks, and give foreign pipeline stages as {stage: module}"
                )
        holdings.append({key: tuple(tuple(map(tuple, box)) for box in boxes) for key, (_, boxes) in local.items()})
    for key in arrays:
        if inside := [k for k in ("/".join(key.split("/")[:n]) for n in range(1, key.count("/") + 1)) if k in arrays]:
            raise ValueError(f"{key} would lie inside the array {inside[0]}; rename one of them")
    return Catalog(arrays, holdings)


def merge_plain(told: Sequence[Mapping[str, int]]) -> None:
    """Raises ValueError: a plain tensor that is not the same on two ranks that have it."""
    first: dict[str, tuple[int, int]] = {}
    for rank, checksums in enumerate(told):
        for key, checksum in checksums.items():
            known, value = first.setdefault(key, (rank, checksum))
            if value != checksum:
                raise ValueError(
                    f"the tensor {key} differs between rank {known} and rank {rank}: plain tensors must be the same "
                    "on all ranks; give parts as ShardedTensor, as `model.sharded_state_dict()` does"
                )


def merge_objects(told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One value per key. Raises ValueError: two ranks that disagree."""
    merged: dict[str, Any] = {}
    for rank, objects in enumerate(told):
        for key, value in objects.items():
            if merged.setdefault(key, value) != value:
                raise ValueError(
                    f"rank {rank} has {key}={value!r}, another one {merged[key]!r}; an object must be the same on "
                    "all ranks, or have a key of its own on each"
                )
    return merged
