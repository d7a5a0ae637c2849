"""`import`: a directory of torch's DCP, Megatron's or DeepSpeed's as a checkpoint here, streamed."""

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
from core.dist_checkpointing.format.zarr_metadata import (
    Chunking,
    Json,
    array_metadata,
    group_metadata,
)
from core.dist_checkpointing.publish.manifest import FORMAT, TAGGED
from core.dist_checkpointing.reading.read import memory_of
from core.dist_checkpointing.state.leaves import encode, tagged
from core.dist_checkpointing.state.nested import map_leaves
from core.dist_checkpointing.state.tensors import unstorable
from core.dist_checkpointing.storage.address import parse_address
from core.dist_checkpointing.tools.foreign.dcp import (
    COMMON,
    ByteRange,
    DcpContents,
    SavedTensor,
    read_dcp,
)
from core.dist_checkpointing.tools.foreign.dcp_shards import ShardCache, load_saved
from core.dist_checkpointing.tools.foreign.deepspeed import read_deepspeed
from core.dist_checkpointing.tools.foreign.deepspeed_files import is_deepspeed
from core.dist_checkpointing.tools.foreign.foreign_checkpoint import ForeignCheckpoint
from core.dist_checkpointing.tools.foreign.megatron import read_megatron
from core.dist_checkpointing.tools.foreign.megatron_dist import arguments_of, as_gpt
from core.dist_checkpointing.tools.foreign.megatron_files import is_megatron
from core.dist_checkpointing.tools.foreign.megatron_settings import settings_of
from core.dist_checkpointing.writing.job import Cells
from core.parallel_state.flat import extent, whole

Path = tuple[str | int, ...]


@dataclass
class Import:
    """What is imported. tensors, objects: by key. skipped: key -> why it cannot be imported.

    derived: key -> the array that it is read from, and as which dtype. origin: the program that wrote it.
    settings: what its program says of the model, as a run's settings by flat name; {} where it says nothing.
    note: what is to be known of the model, and done; empty: nothing.
    """

    version: str
    tensors: dict[str, SavedTensor] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    derived: dict[str, dict[str, str]] = field(default_factory=dict)
    origin: str = "torch.distributed.checkpoint"
    settings: dict[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def metadata(self) -> dict[str, Json]:
        """key -> `zarr.json` of every array. Raises ValueError: a name that cannot be a path, an array in another."""
        metadata = {}
        for key, tensor in self.tensors.items():
            info = ArrayInfo(tensor.shape, tensor.dtype)
            cell = cell_of(info)
            metadata[path_of(key)] = array_metadata(info, cell, inner_shape(cell))
        group_metadata(metadata, {})  # raises
        return metadata

    @property
    def attributes(self) -> Json:
        """Of the root group."""
        version = TAGGED if tagged(list(self.objects.values())) else FORMAT
        return {"paracore": {"format": version, "objects": self.objects, "derived": self.derived}}

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays together."""
        return sum(_nbytes(tensor.shape, tensor.dtype) for tensor in self.tensors.values())

    def cells(self, metadata: Mapping[str, Json], done: Callable[[int], None]) -> Cells:
        """Every cell; in memory are one cell at a time, and the shards of which the next ones are made."""
        for key, tensor in self.tensors.items():
            shards = ShardCache()
            path = path_of(key)
            for index, box in cells(tensor.shape, Chunking.from_metadata(metadata[path]).cell):
                array = memory_of(shards.fill(key, tensor, box))
                yield path, index, box, array
                done(array.nbytes)


def plan(source: str | os.PathLike[str]) -> Import:
    """Reads what SOURCE says it holds, and its values, but no tensor.

    Raises ValueError: a URL, damage, tensors without a stored form. FileNotFoundError: no directory of DCP.
    """
    folder = parse_address(source)
    if "://" in folder:
        raise ValueError(f"{folder}: only local directories are imported; copy it to one")
    if is_deepspeed(folder):
        return _of_files(folder, "DeepSpeed", read_deepspeed)
    if is_megatron(folder):
        return _of_files(folder, "Megatron", read_megatron)
    saved = read_dcp(folder)
    imported = Import(saved.version)
    _add_tensors(imported, saved)
    if os.path.exists(os.path.join(folder, COMMON)):
        _say_the_model(imported, arguments_of(folder))
    # lists first: what is in a list that could be put together is no value of its own
    in_lists: set[str] = set()
    for key, members in _flattened_lists(saved).items():
        if _add_list(imported, key, members, saved):
            in_lists.update(members)
    for key, byte_range in saved.values.items():
        if key not in in_lists:
            _add_value(imported, key, byte_range)
    common = os.path.join(folder, COMMON)
    if os.path.exists(common):
        _add_value(imported, "", ByteRange(common, 0, os.stat(common).st_size), report_as=COMMON)
    if ambiguous := sorted(imported.tensors.keys() & imported.objects.keys()):
        raise ValueError(
            f"{folder}: {ambiguous[0]} is both a tensor and a value; give them one name each"
        )
    if not imported.tensors and not imported.objects:
        raise ValueError(f"{folder} holds nothing that can be imported: {imported.skipped}")
    return imported


def _say_the_model(imported: Import, arguments: Mapping[str, Any]) -> None:
    """Of Megatron's torch_dist: arrays and settings of a GPTModel here, where its arguments say them."""
    plain = (bool, int, float, str)
    imported.objects |= {
        f"megatron/args/{name}": value
        for name, value in arguments.items()
        if isinstance(value, plain)
    }
    reason = "common.pt holds no args of Megatron's"
    settings = settings_of(arguments) if arguments else {}
    if arguments and not settings:
        reason = "Megatron's args name a part of the model that is not here"
    if settings:
        try:
            imported.tensors = as_gpt(imported.tensors, arguments)
            embedding = imported.tensors["model/embedding.word_embeddings.weight"]
            imported.settings = settings | {"model.vocab_size": embedding.shape[0]}
            return
        except (ArithmeticError, KeyError, TypeError, ValueError) as error:
            reason = str(error)
    imported.note = (
        f"names and shapes are Megatron's, and nothing is said of the model: {reason}; load it with a mapping "
        "(docs/concepts/checkpoint.md)"
    )


def _of_files(folder: str, program: str, read: Callable[[str], ForeignCheckpoint]) -> Import:
    """Of a program that writes a file per rank."""
    try:
        contents = read(folder)
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        # a file of any content may come here
        raise ValueError(f"{folder}: {error!r}: not as {program} writes it") from None
    imported = Import(contents.version, contents.tensors, origin=program)
    imported.derived = contents.derived
    imported.settings = contents.settings
    imported.skipped = contents.skipped
    for key, value in contents.values.items():
        try:
            check_key(key)
            imported.objects[key] = _encoded(value)
        except (TypeError, ValueError, RecursionError) as error:
            imported.skipped[key] = str(error)
    return imported


def _add_tensors(imported: Import, saved: DcpContents) -> None:
    unknown = sorted(
        key for key, tensor in saved.tensors.items() if tensor.dtype not in STORED_DTYPES
    )
    if unknown:
        dtype = saved.tensors[unknown[0]].dtype
        raise ValueError(
            f"{unknown[0]} ({len(unknown)} such) is of {dtype}, which has no stored form; save it as another"
        )
    for key, tensor in saved.tensors.items():
        # zarr has no chunks of size 0
        if not all(tensor.shape):
            imported.skipped[key] = f"a tensor of shape {list(tensor.shape)} has no elements"
            continue
        for box, byte_range in tensor.shards:
            size = _nbytes(extent(box), tensor.dtype)
            # before anybody allocates it
            if size > byte_range.length:
                raise ValueError(
                    f"{key}: a piece of {size} bytes is said to lie in {byte_range.length} of {byte_range.file}"
                )
        imported.tensors[key] = tensor


def _flattened_lists(saved: DcpContents) -> dict[str, dict[str, Path]]:
    """Lists that DCP took apart and that hold no tensor, which are one value each here.

    key of the list -> key of each value in it -> its position, or path of positions and names, in the list.
    """
    # a list that holds a tensor anywhere stays apart: its tensors are arrays of their own
    holds_tensors: set[Path] = set()
    for key, path in saved.paths.items():
        if key in saved.tensors:
            holds_tensors.update(path[:length] for length in range(len(path) + 1))
    lists: dict[str, dict[str, Path]] = {}
    for key in saved.values:
        path = saved.paths[key]
        # the outermost list on the way to the value that holds no tensor
        for length, name in enumerate(path):
            if isinstance(name, int) and path[:length] not in holds_tensors:
                if length > 0:
                    list_key = "/".join(map(str, path[:length]))
                    lists.setdefault(list_key, {})[key] = path[length:]
                break
    return lists


def _add_list(imported: Import, key: str, members: Mapping[str, Path], saved: DcpContents) -> bool:
    """Whether it could be added: all that is in it can be read and saved. Else its items are values of their own."""
    try:
        items = {path: load_saved(saved.values[member]) for member, path in members.items()}
        imported.objects[key] = _encoded(_unflattened(items))
    except (TypeError, ValueError):
        return False
    return True


def _unflattened(items: Mapping[Path, Any]) -> Any:
    """The inverse of what DCP did: lists by position, dicts by name."""
    if () in items:  # a leaf: the path to it is used up
        return items[()]
    children: dict[str | int, dict[Path, Any]] = {}
    for (name, *rest), value in items.items():
        children.setdefault(name, {})[tuple(rest)] = value
    if all(isinstance(name, int) for name in children):
        if set(children) != set(range(len(children))):
            raise ValueError(f"a list of {len(children)} items has the positions {list(children)}")
        return [_unflattened(children[position]) for position in range(len(children))]
    return {str(name): _unflattened(child_items) for name, child_items in children.items()}


def _encoded(value: Any) -> Any:
    return json.loads(json.dumps(encode(value), allow_nan=False))


def _add_value(imported: Import, key: str, byte_range: ByteRange, report_as: str = "") -> None:
    """Numbers, texts, lists, and tensors inside; the rest is skipped, under the name `report_as` or the key."""
    try:
        value = load_saved(byte_range)
    except ValueError as error:
        imported.skipped[report_as or key] = str(error)
        return

    def add(path: tuple[str, ...], leaf: Any) -> None:
        name = "/".join((key, *path) if key else path)
        try:
            check_key(name)
            if name in imported.tensors or name in imported.objects:
                raise ValueError("something else has this name")
            # tensors inside of a value are read again when their cells are written: here only where they lie
            if isinstance(leaf, Tensor):
                imported.tensors[name] = _tensor_inside(leaf, replace(byte_range, within=path))
            else:
                imported.objects[name] = _encoded(leaf)
        except (TypeError, ValueError) as error:
            imported.skipped[name] = str(error)

    try:
        map_leaves(value, add)
    except (ValueError, RecursionError) as error:
        imported.skipped[report_as or key] = str(error)


def _tensor_inside(tensor: Tensor, byte_range: ByteRange) -> SavedTensor:
    """A tensor inside of a value, as one shard. Raises ValueError: it cannot be stored."""
    if problem := unstorable(tensor):
        raise ValueError(f"it is {problem}")
    if not tensor.numel():
        raise ValueError("a tensor without elements")
    shape = tuple(tensor.shape)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return SavedTensor(shape, dtype, ((whole(shape), byte_range),))


def _nbytes(shape: tuple[int, ...], dtype: str) -> int:
    return prod(shape) * ArrayInfo((), dtype).itemsize


def run_of(imported: Import) -> dict[str, Any]:
    """What the manifest of an import says in the place of a run: where it came from, and when."""
    run = {
        "imported": {"from": imported.origin, "version": imported.version},
        "time": time.time(),
    }
    # as a run's own checkpoint says them: another run begins with this model
    return run | ({"settings": imported.settings} if imported.settings else {})
