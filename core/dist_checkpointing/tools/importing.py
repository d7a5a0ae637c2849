"""`import`: a directory of torch's DCP, or Megatron's `torch_dist`, as a checkpoint of this format, streamed."""

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from torch import Tensor

from core.dist_checkpointing.format.arrays import STORED_DTYPES, ArrayInfo
from core.dist_checkpointing.format.grid import cell_of, cells, inner_shape
from core.dist_checkpointing.format.keys import check_key, path_of
from core.dist_checkpointing.format.zarr_metadata import Chunking, Json, array_metadata, group_metadata
from core.dist_checkpointing.publish.manifest import FORMAT, TAGGED
from core.dist_checkpointing.reading.read import memory_of
from core.dist_checkpointing.state.leaves import encode, tagged
from core.dist_checkpointing.state.mapping import map_leaves
from core.dist_checkpointing.state.tensors import unstorable
from core.dist_checkpointing.storage.address import parse_address
from core.dist_checkpointing.tools.dcp import COMMON, Saved, SavedTensor, Stretch, read_saved
from core.dist_checkpointing.tools.dcp_pieces import Pieces, load_stretch
from core.dist_checkpointing.writing.job import Cells
from core.parallel_state.flat import whole


@dataclass
class Import:
    """What is imported. tensors, objects: by key. left_out: key -> why."""

    version: str
    tensors: dict[str, SavedTensor] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def metadata(self) -> dict[str, Json]:
        """key -> `zarr.json` of every array. Raises ValueError: a name that cannot be a path, an array in another."""
        found = {}
        for key, tensor in self.tensors.items():
            info = ArrayInfo(tensor.shape, tensor.dtype)
            cell = cell_of(info)
            found[path_of(key)] = array_metadata(info, cell, inner_shape(cell))
        group_metadata(found, {})
        return found

    @property
    def attributes(self) -> Json:
        """Of the root group."""
        version = TAGGED if tagged(list(self.objects.values())) else FORMAT
        return {"paracore": {"format": version, "objects": self.objects, "derived": {}}}

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays together."""
        return sum(_nbytes(tensor) for tensor in self.tensors.values())

    def cells(self, metadata: Mapping[str, Json], done: Callable[[int], None]) -> Cells:
        """Every cell; one at a time is in memory, and the pieces of which the next ones are made."""
        for key, tensor in self.tensors.items():
            pieces, path = Pieces(), path_of(key)
            for index, box in cells(tensor.shape, Chunking.from_metadata(metadata[path]).cell):
                array = memory_of(pieces.fill(key, tensor, box))
                yield path, index, box, array
                done(array.nbytes)


def plan(source: str | os.PathLike[str]) -> Import:
    """Reads what SOURCE says it holds, and its values, but no tensor.

    Raises ValueError: a URL, damage, tensors without a stored form. FileNotFoundError: no directory of DCP.
    """
    folder = parse_address(source)
    if "://" in folder:
        raise ValueError(f"{folder}: only local directories are imported; copy it to one")
    saved = read_saved(folder)
    found = Import(saved.version)
    _add_tensors(found, saved)
    within = {
        one for key, members in _lists(saved).items() if _add_list(found, key, members, saved) for one in members
    }
    for key, where in saved.values.items():
        if key not in within:
            _add_value(found, key, where)
    common = os.path.join(folder, COMMON)
    if os.path.exists(common):
        _add_value(found, "", Stretch(common, 0, os.stat(common).st_size), called=COMMON)
    if both := sorted(found.tensors.keys() & found.objects.keys()):
        raise ValueError(f"{folder}: {both[0]} is both a tensor and a value; give them one name each")
    if not found.tensors and not found.objects:
        raise ValueError(f"{folder} holds nothing that can be imported: {found.left_out}")
    return found


def _add_tensors(found: Import, saved: Saved) -> None:
    if other := sorted(key for key, tensor in saved.tensors.items() if tensor.dtype not in STORED_DTYPES):
        dtype = saved.tensors[other[0]].dtype
        raise ValueError(
            f"{other[0]} ({len(other)} such) is of {dtype}, which has no stored form; save it as another"
        )
    for key, tensor in saved.tensors.items():
        if not all(tensor.shape):
            found.left_out[key] = f"a tensor of shape {list(tensor.shape)} has no elements"
            continue
        for box, where in tensor.pieces:
            size = _nbytes(replace(tensor, shape=tuple(b - a for a, b in box)))
            if size > where.length:  # before anybody allocates it
                raise ValueError(f"{key}: a piece of {size} bytes is said to lie in {where.length} of {where.file}")
        found.tensors[key] = tensor


Path = tuple[str | int, ...]


def _lists(saved: Saved) -> dict[str, dict[str, Path]]:
    """Lists that DCP took apart and that hold no tensor, one value each here: key -> the keys of what is in it, with
    the place in the list."""
    spread = {path[:n] for key, path in saved.paths.items() if key in saved.tensors for n in range(len(path) + 1)}
    found: dict[str, dict[str, Path]] = {}
    for key in saved.values:
        path = saved.paths[key]
        lists = (n for n, name in enumerate(path) if isinstance(name, int) and path[:n] not in spread)
        if (n := next(lists, 0)) > 0:
            found.setdefault("/".join(map(str, path[:n])), {})[key] = path[n:]
    return found


def _add_list(found: Import, key: str, members: Mapping[str, Path], saved: Saved) -> bool:
    """Whether it could be added: all that is in it can be read and saved. Else its items are values of their own."""
    try:
        items = {path: load_stretch(saved.values[member]) for member, path in members.items()}
        found.objects[key] = _encoded(_nested(items))
    except (TypeError, ValueError):
        return False
    return True


def _nested(items: Mapping[Path, Any]) -> Any:
    """The inverse of what DCP did: lists by position, dicts by name."""
    if () in items:
        return items[()]
    below: dict[str | int, dict[Path, Any]] = {}
    for (name, *rest), value in items.items():
        below.setdefault(name, {})[tuple(rest)] = value
    if all(isinstance(name, int) for name in below):
        if set(below) != set(range(len(below))):
            raise ValueError(f"a list of {len(below)} items has the positions {list(below)}")
        return [_nested(below[n]) for n in range(len(below))]
    return {str(name): _nested(rest) for name, rest in below.items()}


def _encoded(value: Any) -> Any:
    return json.loads(json.dumps(encode(value), allow_nan=False))


def _add_value(found: Import, key: str, where: Stretch, called: str = "") -> None:
    """Numbers, texts, lists, and tensors inside; what is not is left out."""
    try:
        value = load_stretch(where)
    except ValueError as error:
        found.left_out[called or key] = str(error)
        return

    def add(path: tuple[str, ...], leaf: Any) -> None:
        within, name = path, "/".join((key, *path) if key else path)
        try:
            check_key(name)
            if name in found.tensors or name in found.objects:
                raise ValueError("something else has this name")
            if not isinstance(leaf, Tensor):
                found.objects[name] = _encoded(leaf)
            elif problem := unstorable(leaf):
                raise ValueError(f"it is {problem}")
            elif not leaf.numel():
                raise ValueError("a tensor without elements")
            else:
                shape, dtype = tuple(leaf.shape), str(leaf.dtype).removeprefix("torch.")
                found.tensors[name] = SavedTensor(shape, dtype, ((whole(shape), replace(where, within=within)),))
        except (TypeError, ValueError) as error:
            found.left_out[name] = str(error)

    try:
        map_leaves(value, add)
    except (ValueError, RecursionError) as error:
        found.left_out[called or key] = str(error)


def _nbytes(tensor: SavedTensor) -> int:
    return prod(tensor.shape) * ArrayInfo((), tensor.dtype).itemsize


def run_of(found: Import) -> dict[str, Any]:
    """What the manifest of an import says in the place of a run: where it came from, and when."""
    return {"imported": {"from": "torch.distributed.checkpoint", "version": found.version}, "time": time.time()}
