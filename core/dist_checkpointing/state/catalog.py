"""What one rank brings to a checkpoint, and what all ranks bring together."""

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.dist_checkpointing.format.arrays import ArrayInfo, Arrays, Holdings
from core.dist_checkpointing.format.keys import check_key, key_of, path_of
from core.dist_checkpointing.state.dtensor import local_parts, mesh_size, shards
from core.dist_checkpointing.state.leaves import encode
from core.dist_checkpointing.state.mapping import ShardedObject, ShardedTensor, map_leaves, refuse_freed
from core.dist_checkpointing.state.tensors import is_dtensor, is_sharded, tensor_of, unstorable
from core.parallel_state.flat import Box, volume, whole


@dataclass(frozen=True)
class LocalState:
    """A state dict of this rank, flat: the parts of each array by key, and JSON values by key."""

    parts: dict[str, list[ShardedTensor]] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    plain: dict[str, int] = field(default_factory=dict)  # key -> how many ranks a tensor speaks for: itself, a mesh

    def plain_digests(self, world: int) -> dict[str, int]:
        """A checksum of every tensor that must be the same on ranks which do not know of each other."""
        keys = sorted(key for key in self.plain.keys() & self.parts.keys() if self.plain[key] < world)
        return {_name(part): _checksum(part.data) for key in keys for part in self.parts[key]}

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
    """Sharded tensors and objects of a nested state dict; plain tensors and numpy's arrays count as whole, other
    values as objects under the path of their names.

    Raises ValueError: a key that cannot be a path, a tensor that cannot be stored, a value of an unknown type.
    """
    flat = LocalState()

    def add(path: tuple[str, ...], leaf: Any) -> None:
        key = "/".join(path)
        if is_sharded(leaf):
            flat.plain[path_of(key)] = 1
            for part in shards(key, leaf):
                _add_part(flat, part)
            return
        if isinstance(leaf, (Tensor, np.ndarray)):
            leaf = _whole(key, leaf)
            flat.plain[path_of(key)] = 1
            if path_of(key) in flat.parts:
                raise ValueError(f"{key} is two tensors; give them one key each")
        if isinstance(leaf, ShardedTensor):
            _add_part(flat, leaf)
            return
        item = leaf if isinstance(leaf, ShardedObject) else ShardedObject(key, leaf)
        check_key(item.key)
        value = _encoded(item)
        if flat.objects.setdefault(item.key, value) != value:
            raise ValueError(f"{item.key} is both {flat.objects[item.key]!r} and {value!r}; give them one key each")

    if not isinstance(state, Mapping):
        raise ValueError(f"a state is a dict of tensors and values, not a {type(state).__name__}: {{'model': ...}}")
    try:
        map_leaves(state, add)
    except RecursionError:
        raise ValueError("the state is nested too deeply, or holds itself; give a flat dict of its leaves") from None
    if both := sorted(set(map(key_of, flat.parts)) & flat.objects.keys()):
        raise ValueError(f"{both[0]} is both a tensor and a value; give them one key each")
    return flat


def _whole(key: str, leaf: Tensor | np.ndarray) -> ShardedTensor:
    if isinstance(leaf, np.ndarray):
        try:
            leaf = tensor_of(leaf)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None
    if is_dtensor(leaf):
        pass  # asking for its values is a collective
    elif leaf.dim() and leaf.is_floating_point() and not any(leaf.stride()) and bool(leaf.isnan().any()):
        refuse_freed(key, leaf)  # what `model.state_dict()` gives under ZeRO-3
    return ShardedTensor(key, leaf.detach(), tuple(leaf.shape), (0,) * leaf.dim())


def _add_part(flat: LocalState, part: ShardedTensor) -> None:
    path = path_of(part.key)
    if is_dtensor(part.data):
        flat.plain[path] = mesh_size(part.data)
        for local in local_parts(part):
            _add_part(flat, local)
        return
    if problem := unstorable(part.data):
        raise ValueError(f"{part.key} is {problem}")
    if path != part.key:
        part = replace(part, key=path, stack=path_of(part.stack) if part.stack else "")
    parts = flat.parts.setdefault(path, [])
    if volume(part.box):  # a rank may hold padding only
        parts.append(part)
    elif not parts:
        flat.parts.pop(path)


def _name(part: ShardedTensor) -> str:
    return part.key if part.box == whole(part.global_shape) else f"{part.key} at {part.box}"


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)


def _encoded(item: ShardedObject) -> Any:
    try:
        return json.loads(json.dumps(encode(item.data), allow_nan=False))
    except Exception as error:  # a registered function may raise anything
        raise ValueError(
            f"{item.key}: {error}; give numbers, texts, bytes, lists, tuples, dicts, numpy's values or tensors, or "
            f"call dist_checkpointing.register({type(item.data).__name__}, to_json, from_json)"
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


Told = dict[str, Any]  # what one rank tells of its arrays


def to_json(arrays: Arrays, holdings: Holdings) -> Told:
    """arrays: key -> what it is. boxes: what is held of an array; lies: the number of that, of each key, sorted.

    A parameter's weight, main copy and moments lie alike, so most of it is told once.
    """
    boxes: dict[Any, int] = {}
    lies = [boxes.setdefault(holdings[key], len(boxes)) for key in sorted(arrays)]
    return {"arrays": {key: info.to_json() for key, info in arrays.items()}, "boxes": list(boxes), "lies": lies}


def shortened(local: Told, rank: int, kinds: Sequence[str]) -> Told:
    """What has to be told to ranks whose `arrays` have the digests `kinds`: they are told by the first of a kind."""
    first = kinds.index(kinds[rank]) == rank
    return local if first else {name: value for name, value in local.items() if name != "arrays"}


def completed(told: Sequence[Told], kinds: Sequence[str]) -> list[Told]:
    """The inverse of `shortened`, for all ranks."""
    arrays = {kind: told[kinds.index(kind)]["arrays"] for kind in set(kinds)}
    return [{**local, "arrays": arrays[kind]} for local, kind in zip(told, kinds, strict=True)]


def digest(local: Mapping[str, Any]) -> str:
    """Changes when anything in a rank's `to_json` does."""
    return hashlib.blake2b(json.dumps(local, sort_keys=True).encode(), digest_size=16).hexdigest()


def merge(told: Sequence[Told]) -> Catalog:
    """The catalogue from every rank's `to_json`.

    Raises ValueError: ranks that disagree about an array (a model built differently, names that are not global).
    """
    arrays: dict[str, ArrayInfo] = {}
    first: dict[str, int] = {}
    holdings: list[Holdings] = []
    checked = None  # ranks of a stage share one table
    for rank, local in enumerate(told):
        for key, value in local["arrays"].items() if local["arrays"] is not checked else ():
            info = ArrayInfo.from_json(value)
            known = arrays.setdefault(key, info)
            first.setdefault(key, rank)
            if known != info:
                raise ValueError(
                    f"{key} is {known} on rank {first[key]} and {info} on rank {rank}; build the same model on all "
                    "ranks, and give foreign pipeline stages as {stage: module}"
                )
        checked = local["arrays"]
        boxes = [tuple([tuple(map(tuple, box)) for box in held]) for held in local["boxes"]]
        holdings.append(dict(zip(sorted(checked), [boxes[n] for n in local["lies"]], strict=True)))
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
                    "on all ranks (a DTensor: outside of its mesh); give parts as ShardedTensor, as "
                    "`model.sharded_state_dict()` does, or DTensors of a mesh of all ranks"
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
