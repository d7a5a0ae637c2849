"""Load: every rank reads its own shards, straight into the memory that its state dict names."""

import fnmatch
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from core.dist_checkpointing.format.keys import key_of
from core.dist_checkpointing.planning.exchange import gather_json
from core.dist_checkpointing.planning.ranks import (
    DamagedCheckpoint,
    agree,
    default_state,
    problem_of,
)
from core.dist_checkpointing.reading.counts import (
    TorchCounts,
    counts_of_torch,
    optimizers_in_words,
)
from core.dist_checkpointing.reading.optimizer_loading import OptimizerLoads
from core.dist_checkpointing.reading.read import Target, read, torch_dtype
from core.dist_checkpointing.reading.read_once import read_once
from core.dist_checkpointing.reading.stored import StoredCheckpoint
from core.dist_checkpointing.reading.values import decoded
from core.dist_checkpointing.state.assembly import MissingArray, assemble, paths
from core.dist_checkpointing.state.catalog import LocalState, flatten
from core.dist_checkpointing.state.derive import stored_source
from core.dist_checkpointing.state.mapping import ShardedObject, ShardedTensor
from core.dist_checkpointing.state.names import KeyMapping, Renames, Source
from core.dist_checkpointing.state.nested import map_leaves
from core.dist_checkpointing.state.tensors import fillable, native
from core.dist_checkpointing.storage.checkpoint_dir import PosixCheckpointDir
from core.parallel_state import ParallelState
from core.parallel_state.flat import whole


@dataclass(frozen=True)
class Report:
    """Where a state dict and a checkpoint do not fit: the same on every rank.

    missing: keys that the checkpoint has nothing for. unexpected: keys of the checkpoint that no rank asks for, in
    the groups (`model`, `optimizer`, ...) that some rank asks for. mismatched: key -> what differs. lies_as: of
    missing keys, what there is under that name: an array, or several.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: Mapping[str, str] = field(default_factory=dict)
    lies_as: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        lines = [
            f"missing in the checkpoint: {key}{self.lies_as.get(key, '')}" for key in self.missing
        ]
        lines += [f"not asked for: {key}" for key in self.unexpected]
        lines += [f"{key}: {reason}" for key, reason in self.mismatched.items()]
        if len(lines) > 20:
            lines[20:] = [f"and {len(lines) - 20} more"]
        return "\n".join(lines)

    def remedy(self) -> str:
        """What else may be done; where names end alike, the line that reads one under its other name."""
        for group in sorted({_group(key) for key in self.missing if "/" in key}):
            words = optimizers_in_words(group, self.missing, self.unexpected)
            if words is not None:
                return words
        remedy = "build the model that was saved, load a part of it, or give strict='report'"
        if not (self.missing and self.unexpected):
            if len(self.missing) + len(self.unexpected) == 1 and not self.mismatched:
                # as it looks where a tied weight's second name is on one side only
                remedy += (
                    "; a tied weight has two names in state_dict() and one in sharded_state_dict(): "
                    "load into what the one gives that saved it"
                )
            return remedy
        # of the first names: one of them may be new here
        for missing in self.missing[:20]:
            others = [key for key in self.unexpected if _group(key) == _group(missing)]
            found = max(others, key=lambda other: _common_parts(missing, other), default="")
            if _common_parts(missing, found):
                break
        else:
            return remedy
        return (
            f"{remedy}; where names alone differ, give load a mapping, as mapping={{{missing!r}: {found!r}}}, or a "
            "function of all keys (docs/concepts/checkpoint.md)"
        )


def _common_parts(a: str, b: str) -> int:
    """How many of the last words of two names are the same: 2 of a.b.weight and c.b.weight."""
    pairs = zip(reversed(a.split(".")), reversed(b.split(".")), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def load(
    sharded_state_dict: Any,
    checkpoint_dir: str | Path,
    *,
    strict: bool | Literal["report"] = True,
    ps: ParallelState | None = None,
    cast: bool = False,
    verify: bool = True,
    mapping: Renames | None = None,
    share_reads: bool | None = None,
) -> Any:
    """Read a checkpoint written under any layout into the tensors of `sharded_state_dict`; collective over all ranks.

    Tensors are filled in place; the same nested dict comes back with tensors and values in place of sharded ones
    (`model.load_state_dict(state)` works, and changes nothing any more). `strict=False`: what does not fit is left as
    it was; "report": so too, and the result is (state, Report). `cast`: other floating dtypes are converted; else
    they are a mismatch. `verify`: check that each file read is the one that was saved; rank 0 checks that all are
    there. `mapping`: key here -> key in the checkpoint, a `Source` (a part of it, another dtype), or a `Concat` of
    several; a dict of those that differ, the same on all ranks, or a function of all keys.
    `share_reads`: what several ranks need is read by one of them, which sends it to the others; False: every rank
    reads for itself; None: so, too, if all ranks are on one host, whose page cache reads a file once as it is.
    Raises, on all ranks alike: ValueError, before any tensor is written, where state and checkpoint do not fit;
    DamagedCheckpoint naming the file; FileNotFoundError where there is no checkpoint.
    """
    if strict not in (True, False, "report"):
        raise ValueError(
            f"strict={strict!r} is unknown: True refuses what does not fit, 'report' tells it beside the state, "
            "False ignores it (Megatron's assume_ok_unexpected, return_all, ignore_all)"
        )
    if ps is None:
        ps = default_state()
    key_mapping = KeyMapping(mapping, cast=cast)

    this_load = _open_on_all(sharded_state_dict, checkpoint_dir, key_mapping, ps, verify=verify)
    stored = this_load.stored
    local = this_load.local

    # compare: all ranks see the same report
    report = _compare(this_load, ps, key_mapping)
    if report and strict is True:
        raise ValueError(f"{checkpoint_dir} does not fit this model:\n{report}\n{report.remedy()}")

    # read: the first step that writes into tensors
    fill = partial(read_once, ps=ps) if _shares_reads(stored, ps, share_reads) else read
    targets = partial(_targets, _without_misfits(local, report), stored, key_mapping)
    agree(_as_damage(problem_of(lambda: fill(stored, targets(), verify=verify))), ps)

    values = this_load.values
    state = this_load.optimizers.finish(lambda path, leaf: _loaded_leaf(path, leaf, values), values)
    if strict == "report":
        return (state, report)
    return state


def _open_on_all(
    sharded_state_dict: Any,
    checkpoint_dir: str | Path,
    key_mapping: KeyMapping,
    ps: ParallelState,
    *,
    verify: bool,
) -> "_OpenedLoad":
    """The checkpoint opened on all ranks, or an error on all: a rank that fails tells the others. Collective."""
    opened: list[_OpenedLoad] = []

    def begin() -> None:
        # one rank asks for the sizes of all files: a store would otherwise be asked by every rank
        stored = open_stored(checkpoint_dir, sizes=verify and ps.rank == 0)
        opened.append(_OpenedLoad.begin(sharded_state_dict, stored, key_mapping))

    agree(problem_of(begin), ps)
    (this_load,) = opened
    return this_load


@dataclass(frozen=True)
class _OpenedLoad:
    """A load before tensors are read. values: key -> decoded value, of the objects that the checkpoint has.

    counts: of an optimizer of ours whose states are torch's AdamW's there; they are in `values` too.
    """

    stored: StoredCheckpoint
    optimizers: OptimizerLoads
    local: LocalState
    values: Mapping[str, Any]
    counts: TorchCounts

    @classmethod
    def begin(
        cls, state_dict: Any, stored: StoredCheckpoint, key_mapping: KeyMapping
    ) -> "_OpenedLoad":
        """Raises ValueError: a state that cannot be loaded, a mapping that gives what is no key."""
        arrays = map(key_of, [*stored.metadata, *stored.derived])
        key_mapping.look_among([*arrays, *stored.objects])
        state = map_leaves(state_dict, lambda path, leaf: _writable(leaf))
        optimizers = OptimizerLoads(state, stored, key_mapping)
        local = flatten(optimizers.state)
        for key in local.arrays():  # raises where shards disagree
            paths(key_mapping.source_of_array(key))
        values = {}
        for key in local.objects:
            stored_key = key_mapping.value_key(key)
            if stored_key in stored.objects:
                values[key] = decoded(stored, stored_key)
        optimizers.check(values)
        counts = counts_of_torch(local.objects, stored, key_mapping)
        return cls(stored, optimizers, local, values | counts.values, counts)


def _shares_reads(stored: StoredCheckpoint, ps: ParallelState, requested: bool | None) -> bool:
    """Collective: whether ranks read for each other. Raises DamagedCheckpoint: they opened different checkpoints."""
    if ps.world is None or requested is False:
        return False
    # a checkpoint may be replaced between two opens: ranks must not mix its old and new files
    reports = gather_json([stored.manifest.uuid, socket.gethostname()], ps.world, ps.device)
    first_uuid, _ = reports[0]
    for rank, (uuid, _) in enumerate(reports):
        if uuid != first_uuid:
            raise DamagedCheckpoint(
                f"{stored.directory.url}: rank 0 opened the checkpoint {first_uuid}, rank {rank} {uuid}: it was "
                "saved again meanwhile, or hosts have other files there; share the directory, or give "
                "share_reads=False"
            )
    # on one host the page cache reads each byte once: exchanging it would only cost more copies
    hosts = {host for _, host in reports}
    return bool(requested) or len(hosts) > 1 or not isinstance(stored.directory, PosixCheckpointDir)


def open_stored(checkpoint_dir: str | Path, *, sizes: bool = True) -> StoredCheckpoint:
    """A committed checkpoint. Raises DamagedCheckpoint; FileNotFoundError: none is there."""
    try:
        return StoredCheckpoint.open(checkpoint_dir, sizes=sizes)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(str(error)) from error


def _as_damage(problem: Exception | None) -> Exception | None:
    """An error of reading files as `DamagedCheckpoint`, which has a manager fall back to an older step."""
    if isinstance(problem, (OSError, ValueError)):
        return DamagedCheckpoint(str(problem))
    return problem


def _writable(leaf: Any) -> Any:
    """A leaf that can be filled in place: an array of numpy's that cannot is replaced by a copy."""
    if isinstance(leaf, np.ndarray) and not fillable(leaf):
        return native(leaf)
    return leaf


def _compare(this_load: _OpenedLoad, ps: ParallelState, key_mapping: KeyMapping) -> Report:
    """Collective: where the states of all ranks and the checkpoint do not fit."""
    local = this_load.local
    stored = this_load.stored
    # key here -> the keys of the checkpoint that it is read from
    stored_keys = {key: [key_mapping.value_key(key)] for key in local.objects}
    missing = [key for key in local.objects if key not in this_load.values]
    stored_keys |= this_load.counts.sources
    mismatched: dict[str, str] = {}
    for key, info in local.arrays().items():
        source = key_mapping.source_of_array(key)
        stored_keys[key] = paths(source)
        try:
            reason = assemble(source, stored).differs(stored, info)
        except MissingArray as error:
            if isinstance(source, Source):
                missing.append(key)
                continue
            reason = str(error)
        except ValueError as error:
            reason = str(error)
        if reason is not None:
            mismatched[key] = reason
    reports = gather_json([missing, mismatched, stored_keys], ps.world, ps.device)

    all_keys: list[str] = []
    all_missing: set[str] = set()
    all_mismatched: list[tuple[str, str]] = []
    requested: set[str] = set()
    for rank_missing, rank_mismatched, rank_stored_keys in reports:
        all_keys += map(key_of, rank_stored_keys)
        all_missing.update(rank_missing)
        all_mismatched += rank_mismatched.items()
        requested.update(*rank_stored_keys.values())
    key_mapping.check(all_keys)
    return Report(
        missing=tuple(sorted(all_missing)),
        unexpected=_unexpected(requested, stored),
        mismatched=dict(sorted(all_mismatched)),
        lies_as={key: words for key in all_missing if (words := _lies_as(key, stored))},
    )


def _lies_as(key: str, stored: StoredCheckpoint) -> str:
    """What is said of a key that is asked for as another kind than it was saved as; "" if nothing is there."""
    if key in stored.metadata:
        return " (a tensor there: ask with one, as torch.zeros(()) for a number)"
    if key in stored.objects:
        return " (a value there, no tensor: ask with any value)"
    below = sorted(k for k in (*stored.metadata, *stored.objects) if k.startswith(f"{key}/"))
    if below:
        return f" (a dict there, with {', '.join(below[:3])}: ask with a dict)"
    return ""


def _unexpected(requested: set[str], stored: StoredCheckpoint) -> tuple[str, ...]:
    """What the checkpoint has, in the groups that are requested, and no rank asks for."""
    # who loads a model alone is not told of the optimizer that lies beside it
    groups = {_group(key) for key in requested if "/" in key}
    used = set(requested)
    for key in requested:
        origin = stored_source(key, stored.metadata, stored.derived)
        if origin is not None:
            used.add(origin)
    # weights that would be derived from what is read are read with it
    used.update(key for key, recipe in stored.derived.items() if recipe["from"] in used)
    available = {*stored.metadata, *stored.objects, *stored.derived}
    return tuple(key for key in sorted(available - used) if _group(key) in groups)


def _group(key: str) -> str:
    return key_of(key.split("/")[0])


def _without_misfits(local: LocalState, report: Report) -> LocalState:
    misfits = {*report.missing, *report.mismatched}
    shards = {key: tensors for key, tensors in local.shards.items() if key not in misfits}
    return LocalState(shards, local.objects)


def _targets(
    local: LocalState, stored: StoredCheckpoint, key_mapping: KeyMapping
) -> dict[str, list[Target]]:
    """Stored key -> the boxes that are read from it, each with the memory that it goes to."""
    targets: dict[str, list[Target]] = {}
    for key, shards in local.shards.items():
        assembly = assemble(key_mapping.source_of_array(key), stored)
        for shard in shards:
            for stored_key, box, memory in assembly.targets(shard.box, shard.stacked_data):
                targets.setdefault(stored_key, []).append((box, memory))
    return targets


def _loaded_leaf(path: tuple[str, ...], leaf: Any, values: Mapping[str, Any]) -> Any:
    """What stands in the place of a leaf after the load; a value that the checkpoint does not have stays."""
    if isinstance(leaf, ShardedTensor):
        if leaf.local is None:
            return leaf.data
        return leaf.local
    if isinstance(leaf, (Tensor, np.ndarray)):
        return leaf
    if isinstance(leaf, ShardedObject):
        return values.get(leaf.key, leaf.data)
    return values.get("/".join(path), leaf)


def load_common_state_dict(checkpoint_dir: str | Path) -> dict[str, Any]:
    """key -> value of everything that is no array; every rank by itself."""
    stored = open_stored(checkpoint_dir, sizes=False)
    return {key: decoded(stored, key) for key in stored.objects}


def load_tensors_metadata(
    checkpoint_dir: str | Path,
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """key -> (global shape, dtype) of every array; every rank by itself."""
    stored = open_stored(checkpoint_dir, sizes=False)
    return {
        key_of(key): (stored.shape(key), torch_dtype(stored.dtype(key))) for key in stored.metadata
    }


def load_plain_tensors(checkpoint_dir: str | Path, *, keys: str = "*") -> dict[str, Tensor]:
    """key -> full tensor of every array whose key matches a pattern (`model/*`); every rank by itself."""
    stored = open_stored(checkpoint_dir)
    tensors: dict[str, Tensor] = {}
    targets: dict[str, list[Target]] = {}
    for path in stored.metadata:
        if fnmatch.fnmatchcase(key_of(path), keys):
            shape = stored.shape(path)
            tensor = torch.empty(shape, dtype=torch_dtype(stored.dtype(path)))
            tensors[key_of(path)] = tensor
            targets[path] = [(whole(shape), tensor)]
    read(stored, targets)
    return tensors
