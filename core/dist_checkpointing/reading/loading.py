"""Load: every rank gets its own parts, straight into the memory that its state dict names."""

import fnmatch
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from core.dist_checkpointing.format.keys import key_of
from core.dist_checkpointing.planning.exchange import gather_json
from core.dist_checkpointing.planning.ranks import DamagedCheckpoint, agree, default_state, problem_of
from core.dist_checkpointing.publish.manifest import TAGGED
from core.dist_checkpointing.reading.optimizer_loading import OptimizerLoads
from core.dist_checkpointing.reading.read import Target, read, torch_dtype
from core.dist_checkpointing.reading.read_once import read_once
from core.dist_checkpointing.reading.stored import Stored
from core.dist_checkpointing.state.assembly import Absent, assemble, paths
from core.dist_checkpointing.state.catalog import LocalState, flatten
from core.dist_checkpointing.state.derive import source
from core.dist_checkpointing.state.leaves import decode
from core.dist_checkpointing.state.mapping import ShardedObject, ShardedTensor, map_leaves
from core.dist_checkpointing.state.names import Names, Renames, Source
from core.dist_checkpointing.state.tensors import fillable, native
from core.dist_checkpointing.storage.place import PosixPlace
from core.parallel_state import ParallelState


@dataclass(frozen=True)
class Report:
    """Where a state dict and a checkpoint do not fit: the same on every rank.

    missing: keys that the checkpoint has nothing for. unexpected: keys of the checkpoint that no rank asks for, in
    the groups (`model`, `optimizer`, ...) that some rank asks for. mismatched: key -> what differs.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        lines = [f"missing in the checkpoint: {key}" for key in self.missing]
        lines += [f"not asked for: {key}" for key in self.unexpected]
        lines += [f"{key}: {why}" for key, why in self.mismatched.items()]
        return "\n".join([*lines[:20], *[f"and {len(lines) - 20} more"] * (len(lines) > 20)])


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
    `share_reads`: what several ranks want is read by one of them, which sends it to the others; False: every rank
    reads for itself; None: so, too, if all ranks are on one host, whose page cache reads a file once as it is.
    Raises, on all ranks alike: ValueError, before any tensor is written, where state and checkpoint do not fit;
    DamagedCheckpoint naming the file; FileNotFoundError where there is no checkpoint.
    """
    if strict not in (True, False, "report"):
        raise ValueError(
            f"strict={strict!r} is unknown: True refuses what does not fit, 'report' tells it beside the state, "
            "False ignores it (Megatron's assume_ok_unexpected, return_all, ignore_all)"
        )
    ps = ps if ps is not None else default_state()
    flat, stored, loads = LocalState(), None, None
    values: dict[str, Any] = {}
    names = Names(mapping, cast=cast)

    def begin() -> None:
        nonlocal flat, stored, loads, values
        stored = opened(checkpoint_dir, sizes=verify and ps.rank == 0)
        state = map_leaves(sharded_state_dict, lambda path, leaf: _fillable(leaf))
        loads = OptimizerLoads(state, stored, names)
        flat = flatten(loads.state)
        for key in flat.arrays():  # raises where parts disagree, or where a mapping gives what is no key
            paths(names.of_array(key))
        found = {key: names.key(key) for key in flat.objects}
        values = {key: _decoded(stored, name) for key, name in found.items() if name in stored.objects}
        loads.check(values)

    agree(problem_of(begin), ps)
    assert stored is not None and loads is not None
    report = _compare(flat, stored, ps, names)
    if report and strict is True:
        raise ValueError(
            f"{checkpoint_dir} does not fit this model:\n{report}\nbuild the model that was saved, load a part of "
            "it, or give strict='report'"
        )
    flat = _known(flat, report)
    fill = partial(read_once, ps=ps) if _shares(stored, ps, share_reads) else read
    problem = problem_of(lambda: fill(stored, _targets(flat, stored, names), verify=verify))
    agree(DamagedCheckpoint(str(problem)) if isinstance(problem, (OSError, ValueError)) else problem, ps)
    state = loads.finish(lambda path, leaf: _value(path, leaf, values), values)
    return (state, report) if strict == "report" else state


def _shares(stored: Stored, ps: ParallelState, asked: bool | None) -> bool:
    """Collective: whether ranks read for each other. Raises DamagedCheckpoint: they opened different checkpoints."""
    if ps.world is None or asked is False:
        return False
    told = gather_json([stored.manifest.uuid, socket.gethostname()], ps.world, ps.device)
    for rank, (uuid, _) in enumerate(told):
        if uuid != told[0][0]:
            raise DamagedCheckpoint(
                f"{stored.place.url}: rank 0 opened the checkpoint {told[0][0]}, rank {rank} {uuid}: it was saved "
                "again meanwhile, or hosts have other files there; share the directory, or give share_reads=False"
            )
    hosts = {host for _, host in told}
    return bool(asked) or len(hosts) > 1 or not isinstance(stored.place, PosixPlace)


def opened(checkpoint_dir: str | Path, *, sizes: bool = True) -> Stored:
    """A committed checkpoint. Raises DamagedCheckpoint; FileNotFoundError: none is there."""
    try:
        return Stored.open(checkpoint_dir, sizes=sizes)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(str(error)) from error


def _fillable(leaf: Any) -> Any:
    return native(leaf) if isinstance(leaf, np.ndarray) and not fillable(leaf) else leaf


def _decoded(stored: Stored, key: str) -> Any:
    """A value of the checkpoint. Raises ValueError: of a type that is not registered in this program."""
    value = stored.objects[key]
    try:
        return decode(value) if stored.format >= TAGGED else value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{stored.place.url}: {key}: {error}") from error


def _compare(flat: LocalState, stored: Stored, ps: ParallelState, names: Names) -> Report:
    wanted = {key: [names.key(key)] for key in flat.objects}
    missing = [key for key, (name,) in wanted.items() if name not in stored.objects]
    mismatched = {}
    for key, info in flat.arrays().items():
        form = names.of_array(key)
        wanted[key] = paths(form)
        try:
            why = assemble(form, stored).differs(stored, info)
        except Absent as error:
            if isinstance(form, Source):
                missing.append(key)
                continue
            why = str(error)
        except ValueError as error:
            why = str(error)
        if why is not None:
            mismatched[key] = why
    told = gather_json([missing, mismatched, wanted], ps.world, ps.device)
    names.check([key_of(key) for _, _, theirs in told for key in theirs])
    asked = {name for _, _, theirs in told for names_there in theirs.values() for name in names_there}
    groups = {key_of(key.split("/")[0]) for key in asked if "/" in key}
    used = asked | {found for key in asked if (found := source(key, stored.metadata, stored.derived)) is not None}
    used |= {key for key, how in stored.derived.items() if how["from"] in used}
    known = {*stored.metadata, *stored.objects, *stored.derived}
    return Report(
        missing=tuple(sorted({key for keys, _, _ in told for key in keys})),
        unexpected=tuple(key for key in sorted(known - used) if key_of(key.split("/")[0]) in groups),
        mismatched=dict(sorted(item for _, found, _ in told for item in found.items())),
    )


def _known(flat: LocalState, report: Report) -> LocalState:
    parts = {k: v for k, v in flat.parts.items() if k not in report.missing and k not in report.mismatched}
    return LocalState(parts, flat.objects)


def _targets(flat: LocalState, stored: Stored, names: Names) -> dict[str, list[Target]]:
    """Stored key -> what is read from it."""
    wanted: dict[str, list[Target]] = {}
    for key, parts in flat.parts.items():
        made = assemble(names.of_array(key), stored)
        for part in parts:
            for found, box, memory in made.targets(part.box, part.part):
                wanted.setdefault(found, []).append((box, memory))
    return wanted


def _value(path: tuple[str, ...], leaf: Any, objects: Mapping[str, Any]) -> Any:
    if isinstance(leaf, ShardedTensor):
        return leaf.data if leaf.local is None else leaf.local
    if isinstance(leaf, (Tensor, np.ndarray)):
        return leaf
    key = leaf.key if isinstance(leaf, ShardedObject) else "/".join(path)
    return objects.get(key, leaf.data if isinstance(leaf, ShardedObject) else leaf)


def load_common_state_dict(checkpoint_dir: str | Path) -> dict[str, Any]:
    """key -> value of everything that is no array; every rank by itself."""
    stored = opened(checkpoint_dir, sizes=False)
    return {key: _decoded(stored, key) for key in stored.objects}


def load_tensors_metadata(checkpoint_dir: str | Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """key -> (global shape, dtype) of every array; every rank by itself."""
    stored = opened(checkpoint_dir, sizes=False)
    return {key_of(key): (stored.shape(key), torch_dtype(stored.dtype(key))) for key in stored.metadata}


def load_plain_tensors(checkpoint_dir: str | Path, *, keys: str = "*") -> dict[str, Tensor]:
    """key -> whole tensor of every array whose key matches a pattern (`model/*`); every rank by itself."""
    stored = opened(checkpoint_dir)
    found = {
        key: torch.empty(stored.shape(key), dtype=torch_dtype(stored.dtype(key)))
        for key in stored.metadata
        if fnmatch.fnmatchcase(key_of(key), keys)
    }
    read(stored, {key: [(tuple((0, n) for n in t.shape), t)] for key, t in found.items()})
    return {key_of(key): t for key, t in found.items()}
