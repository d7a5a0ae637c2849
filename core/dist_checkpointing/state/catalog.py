"""What one rank brings to a checkpoint, and the catalogue of what all ranks bring together."""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from torch import Tensor, nn

from core.dist_checkpointing.format.arrays import ArrayInfo, Arrays, Holdings, boxes_from_json
from core.dist_checkpointing.format.keys import check_key, key_of, path_of
from core.dist_checkpointing.state.dtensor import local_shards, shards_of_sharded_tensor
from core.dist_checkpointing.state.leaves import encode
from core.dist_checkpointing.state.mapping import ShardedObject, ShardedTensor, refuse_freed
from core.dist_checkpointing.state.nested import map_leaves
from core.dist_checkpointing.state.tensors import is_dtensor, is_sharded, tensor_of, unstorable
from core.parallel_state.flat import Box, volume

T = TypeVar("T")


@dataclass(frozen=True)
class LocalState:
    """A state dict of this rank, flat.

    shards: key -> the shards that this rank holds of the array. objects: key -> JSON value. from_first: keys of which
    the first of several holders counts.
    """

    shards: dict[str, list[ShardedTensor]] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    from_first: set[str] = field(default_factory=set)

    def arrays(self) -> dict[str, ArrayInfo]:
        """What the arrays are that this rank holds shards of. Raises ValueError: shards that disagree."""
        info_by_key: dict[str, ArrayInfo] = {}
        for key, shards in self.shards.items():
            infos = {shard.info for shard in shards}
            if len(infos) > 1:
                raise ValueError(
                    f"{key}: its parts on one rank disagree: {sorted(map(str, infos))}; give them one key"
                )
            info_by_key[key] = infos.pop()
        return info_by_key

    def holdings(self) -> dict[str, tuple[Box, ...]]:
        """Key -> the boxes that this rank holds of the array."""
        return {key: tuple([shard.box for shard in shards]) for key, shards in self.shards.items()}


def flatten(state: Any) -> LocalState:
    """A nested state dict as one `LocalState`.

    Plain tensors and numpy's arrays are taken as complete arrays; values that are no tensors are objects under the
    path of their names.
    Raises ValueError: a key that cannot be a path, a tensor that cannot be stored, a value of an unknown type.
    """
    local = LocalState()
    if not isinstance(state, Mapping):
        raise ValueError(
            f"a state is a dict of tensors and values, not a {type(state).__name__}: {{'model': ...}}"
        )
    try:
        map_leaves(state, lambda path, leaf: _add_leaf(local, "/".join(path), leaf))
    except RecursionError:
        raise ValueError(
            "the state is nested too deeply, or holds itself; give a flat dict of its leaves"
        ) from None
    if ambiguous := sorted(set(map(key_of, local.shards)) & local.objects.keys()):
        raise ValueError(f"{ambiguous[0]} is both a tensor and a value; give them one key each")
    return local


def _add_leaf(local: LocalState, key: str, leaf: Any) -> None:
    if is_sharded(leaf):
        for shard in shards_of_sharded_tensor(key, leaf):
            _add_shard(local, shard)
        return
    if isinstance(leaf, (Tensor, np.ndarray)):
        leaf = _complete_tensor(key, leaf)
        if path_of(key) in local.shards:
            raise ValueError(f"{key} is two tensors; give them one key each")
    if isinstance(leaf, ShardedTensor):
        _add_shard(local, leaf)
        return
    # everything else is a value: a number, a text, a list without tensors
    if isinstance(leaf, ShardedObject):
        item = leaf
    else:
        item = ShardedObject(key, leaf)
    check_key(item.key)
    value = _encoded(item)
    if local.objects.setdefault(item.key, value) != value:
        raise ValueError(
            f"{item.key} is both {local.objects[item.key]!r} and {value!r}; give them one key each"
        )


def _complete_tensor(key: str, leaf: Tensor | np.ndarray) -> ShardedTensor:
    """A plain tensor as the only shard of its array."""
    if isinstance(leaf, np.ndarray):
        try:
            leaf = tensor_of(leaf)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None
    # what `model.state_dict()` gives under ZeRO-3: NaNs without memory of their own. A DTensor is not asked for its
    # values, since that is a collective
    without_memory = (
        not is_dtensor(leaf) and leaf.dim() and leaf.is_floating_point() and not any(leaf.stride())
    )
    if without_memory and bool(leaf.isnan().any()):
        refuse_freed(key, leaf)
    return ShardedTensor(key, leaf.detach(), tuple(leaf.shape), (0,) * leaf.dim())


def _add_shard(local: LocalState, shard: ShardedTensor) -> None:
    path = path_of(shard.key)
    if is_dtensor(shard.data):
        for local_shard in local_shards(shard):
            _add_shard(local, local_shard)
        return
    if problem := unstorable(shard.data):
        raise ValueError(f"{shard.key} is {problem}")
    if shard.from_first:
        local.from_first.add(path)
    if path != shard.key:
        stack = path_of(shard.stack) if shard.stack else ""
        shard = replace(shard, key=path, stack=stack)
    shards = local.shards.setdefault(path, [])
    if volume(shard.box):
        shards.append(shard)
    elif not shards:
        # a rank may hold padding only: then it holds nothing of this array
        local.shards.pop(path)
        local.from_first.discard(path)


def _encoded(item: ShardedObject) -> Any:
    # as it will read back: ranks compare what is stored, not what they hold
    try:
        return json.loads(json.dumps(encode(item.data), allow_nan=False))
    except Exception as error:
        if isinstance(item.data, nn.Module):
            raise ValueError(
                f"{item.key}: a {type(item.data).__name__} is no state; give dist_checkpointing.sharded_state_dict("
                "module, ps), or where every rank holds all of it module.state_dict()"
            ) from error
        # a registered function may raise anything
        raise ValueError(
            f"{item.key}: {error}; give numbers, texts, bytes, lists, tuples, dicts, numpy's values or tensors, or "
            f"call dist_checkpointing.register({type(item.data).__name__}, to_json, from_json)"
        ) from error


@dataclass(frozen=True)
class Catalog:
    """All ranks' arrays, and which boxes each rank holds, in rank order."""

    arrays: dict[str, ArrayInfo]
    holdings: Sequence[Holdings]

    def without(self, keys: Sequence[str] | set[str]) -> "Catalog":
        """The same catalogue without some arrays."""
        holdings = [_without_keys(rank_holdings, keys) for rank_holdings in self.holdings]
        return Catalog(_without_keys(self.arrays, keys), holdings)


def _without_keys(by_key: Mapping[str, T], keys: Sequence[str] | set[str]) -> dict[str, T]:
    return {key: value for key, value in by_key.items() if key not in keys}


# one rank's arrays and boxes as a message, see `to_json`
LocalCatalog = dict[str, Any]


def to_json(arrays: Arrays, holdings: Holdings, from_first: Collection[str] = ()) -> LocalCatalog:
    """One rank's share of the catalogue, as a message.

    arrays: key -> what it is. boxes: the different lists of boxes. lies: for each key, sorted, the number of its
    list: a parameter's weight, main copy and moments are cut alike, so most lists are sent once. from_first: of
    these keys the first of several holders counts.
    """
    numbers: dict[Any, int] = {}  # list of boxes -> its number
    number_by_key = [numbers.setdefault(holdings[key], len(numbers)) for key in sorted(arrays)]
    return {
        "arrays": {key: info.to_json() for key, info in arrays.items()},
        "boxes": list(numbers),
        "lies": number_by_key,
        "from_first": sorted(from_first),
    }


def without_repeated_arrays(local: LocalCatalog, rank: int, kinds: Sequence[str]) -> LocalCatalog:
    """The message of one rank, without `arrays` if a rank before it sends the same: `kinds` are their fingerprints.

    All data-parallel replicas have the same arrays, so that one table per pipeline stage is sent.
    """
    first_of_kind = kinds.index(kinds[rank])
    if first_of_kind == rank:
        return local
    return {name: value for name, value in local.items() if name != "arrays"}


def with_repeated_arrays(
    catalogs: Sequence[LocalCatalog], kinds: Sequence[str]
) -> list[LocalCatalog]:
    """The inverse of `without_repeated_arrays`, for all ranks."""
    arrays_by_kind = {kind: catalogs[kinds.index(kind)]["arrays"] for kind in set(kinds)}
    return [
        {**local, "arrays": arrays_by_kind[kind]}
        for local, kind in zip(catalogs, kinds, strict=True)
    ]


def fingerprint(local: Mapping[str, Any]) -> str:
    """Changes when anything in a JSON value does."""
    return hashlib.blake2b(json.dumps(local, sort_keys=True).encode(), digest_size=16).hexdigest()


def merge_catalogs(catalogs: Sequence[LocalCatalog]) -> Catalog:
    """The catalogue from every rank's `to_json`.

    Raises ValueError: ranks that disagree about an array (a model built differently, names that are not global).
    """
    # a rank that lists no array of a stage has no shard of it; together all arrays are known
    arrays: dict[str, ArrayInfo] = {}
    # key -> the first rank that has it, for the message
    first_rank: dict[str, int] = {}
    holdings: list[Holdings] = []
    # of arrays whose first holder counts
    held: set[tuple[str, Box]] = set()
    checked = None
    for rank, local in enumerate(catalogs):
        # ranks of a pipeline stage share one table, by `with_repeated_arrays`: it is checked once
        if local["arrays"] is not checked:
            checked = local["arrays"]
            for key, value in checked.items():
                info = ArrayInfo.from_json(value)
                first_rank.setdefault(key, rank)
                _check_same_info(key, arrays.setdefault(key, info), info, (first_rank[key], rank))
        boxes = [boxes_from_json(boxes_of_array) for boxes_of_array in local["boxes"]]
        boxes_by_key = [boxes[number] for number in local["lies"]]
        rank_holdings = dict(zip(sorted(checked), boxes_by_key, strict=True))
        for key in local["from_first"]:
            rank_holdings[key] = tuple(
                [box for box in rank_holdings[key] if (key, box) not in held]
            )
            held.update([(key, box) for box in rank_holdings[key]])
        holdings.append(rank_holdings)
    _check_nesting(arrays)
    return Catalog(arrays, holdings)


def _check_same_info(
    key: str, first: ArrayInfo, array_info: ArrayInfo, ranks: tuple[int, int]
) -> None:
    if first != array_info:
        raise ValueError(
            f"{key} is {first} on rank {ranks[0]} and {array_info} on rank {ranks[1]}; build the same model on all "
            "ranks, and give foreign pipeline stages as {stage: module}"
        )


def _check_nesting(arrays: Mapping[str, ArrayInfo]) -> None:
    """Raises ValueError: an array inside another: `a/b` beside `a`, which is a folder of cells."""
    for key in arrays:
        names = key.split("/")
        for length in range(1, len(names)):
            outer = "/".join(names[:length])
            if outer in arrays:
                raise ValueError(f"{key} would lie inside the array {outer}; rename one of them")


def merge_objects(objects_by_rank: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One value per key. Raises ValueError: two ranks that disagree."""
    merged: dict[str, Any] = {}
    for rank, objects in enumerate(objects_by_rank):
        for key, value in objects.items():
            if merged.setdefault(key, value) != value:
                texts = [
                    text if len(text) < 90 else f"{text[:80]} ..."
                    for text in (repr(value), repr(merged[key]))
                ]
                raise ValueError(
                    f"rank {rank} has {key}={texts[0]}, another one {texts[1]}; an object must be the same on all "
                    "ranks, or have a key of its own on each, {f'rank{rank}': value}"
                )
    return merged
