"""A checkpoint of DeepSpeed (ZeRO 0 to 3) as arrays by parameter: main weights, moments, counts.

Read by the files' own words; nothing of DeepSpeed's is imported, and no class of a pickle is made.
"""

from collections.abc import Mapping
from typing import Any

from core.dist_checkpointing.tools.foreign.dcp_shards import ShardCache
from core.dist_checkpointing.tools.foreign.deepspeed_files import DeepSpeedFiles, read_files
from core.dist_checkpointing.tools.foreign.deepspeed_pieces import (
    MAIN,
    FlatPiece,
    Shape,
    States,
    kinds_of,
    saved_tensor,
    stage_3,
    stage_of,
    stages_1_and_2,
    whole_piece,
)
from core.dist_checkpointing.tools.foreign.deepspeed_universal import read_universal
from core.dist_checkpointing.tools.foreign.deepspeed_unsharded import unsharded
from core.dist_checkpointing.tools.foreign.foreign_checkpoint import ForeignCheckpoint
from core.dist_checkpointing.tools.foreign.torch_archive import ArchivedTensor

_READ = {  # of a file of model states: what becomes arrays, or says where they are
    "module",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "shared_params",
}


def read_deepspeed(folder: str) -> ForeignCheckpoint:
    """`model/NAME`, `optimizer/main/NAME` (where weights have 16 bits), `optimizer/exp_avg/NAME`, ..., and values.

    Raises ValueError: a layout that is not read, files that do not fit together, damage.
    """
    files = read_files(folder)
    model = files.models[0]
    contents = ForeignCheckpoint(str(model.get("ds_version", "unknown")))
    held: Any = model.get("module") or {}
    module = {n: t for n, t in held.items() if isinstance(t, ArchivedTensor)}
    if files.universal:
        tied: Any = model.get("shared_params") or {}
        states, all_shapes = read_universal(files.folder, module, tied)
    elif files.optimizers:
        shapes = [dict(group) for group in model["param_shapes"] or ()]
        if not shapes:
            raise ValueError(
                f"{files.folder} does not say which parameters there are (param_shapes)"
            )
        read = stage_3 if stage_of(files.optimizers[0]) == 3 else stages_1_and_2
        states = read(files.optimizers, shapes)
        all_shapes = {name: tuple(shape) for group in shapes for name, shape in group.items()}
    else:
        states, reason = unsharded(model, module, ShardCache())
        all_shapes = {name: tensor.shape for name, tensor in module.items()}
        if reason is not None:
            contents.skipped["optimizer"] = reason
    _add_states(contents, states, all_shapes, module)
    _add_rest_of_model(contents, files, module, set(states.kinds.get(MAIN, ())))
    _add_ties(contents, files, module)
    _add_values(contents, files, states)
    return contents


def _add_states(
    contents: ForeignCheckpoint,
    states: States,
    shapes: Mapping[str, Shape],
    module: Mapping[str, ArchivedTensor],
) -> None:
    """Main weights under the name of the model's, unless these are of another dtype: then those are derived."""
    for name, pieces in states.kinds.get(MAIN, {}).items():
        key = f"model/{name}"
        dtype = module[name].dtype if name in module else pieces[0].tensor.dtype
        if dtype != pieces[0].tensor.dtype:
            contents.derived[key] = {"from": f"optimizer/main/{name}", "torch_dtype": dtype}
            key = f"optimizer/main/{name}"
        contents.tensors[key] = saved_tensor(name, shapes[name], pieces)
    for kind in kinds_of(states):
        for name, pieces in states.kinds[kind].items():
            key = f"optimizer/{kind}/{name}"
            contents.tensors[key] = saved_tensor(key, shapes[name], pieces)


def _add_rest_of_model(
    contents: ForeignCheckpoint,
    files: DeepSpeedFiles,
    module: Mapping[str, ArchivedTensor],
    trained: set[str],
) -> None:
    """Buffers and frozen parameters; without ZeRO every tensor of the module."""
    model = files.models[0]
    frozen = model.get("frozen_param_shapes") or {}
    ties = model.get("shared_params") or {}
    for name, tensor in module.items():
        key = f"model/{name}"
        if key in contents.tensors or key in contents.derived or name in trained:
            continue
        # stage 3 cuts frozen ones, too, and of one rank's only part leaves the module's tensor empty as well
        is_cut = name in (model.get("frozen_param_fragments") or {}) and not tensor.numel
        if name in frozen and (len(files.models) > 1 or is_cut):
            contents.tensors[key] = saved_tensor(name, tuple(frozen[name]), _parts(files, name))
        elif tensor.numel:
            contents.tensors[key] = saved_tensor(name, tensor.shape, whole_piece(tensor))
        elif name not in ties:
            # stage 3 leaves empty what it cuts; this one is not among the trained ones, which were found elsewhere
            contents.skipped[key] = f"a tensor of shape {list(tensor.shape)} has no elements"


def _parts(files: DeepSpeedFiles, name: str) -> list[FlatPiece]:
    """A frozen parameter of stage 3: equal parts on all ranks, the last ones filled up."""
    pieces = []
    start = 0
    total = 1
    for size in files.models[0]["frozen_param_shapes"][name]:
        total *= size
    for model in files.models:
        part = model["frozen_param_fragments"][name]
        stop = min(start + part.numel, total)
        if start < stop:
            pieces.append(FlatPiece(start, stop, part, 0))
        start = stop
    return pieces


def _add_ties(
    contents: ForeignCheckpoint, files: DeepSpeedFiles, module: Mapping[str, ArchivedTensor]
) -> None:
    """A parameter under two names is stored under the first, and read under both."""
    tied: dict[str, str] = dict(files.models[0].get("shared_params") or {})
    if not files.optimizers and not files.universal:
        first: dict[tuple, str] = {}
        for name, tensor in module.items():
            owner = first.setdefault((*tensor.storage, tensor.shape), name)
            if owner != name and tensor.numel:
                tied[name] = owner
    for name, owner in tied.items():
        key = f"model/{name}"
        recipe = contents.derived.get(f"model/{owner}")
        source = contents.tensors.get(f"model/{owner}")
        if recipe is None and source is None:
            continue
        contents.tensors.pop(key, None)
        contents.derived[key] = recipe or {
            "from": f"model/{owner}",
            "torch_dtype": source.dtype if source is not None else "",
        }


def _add_values(contents: ForeignCheckpoint, files: DeepSpeedFiles, states: States) -> None:
    """Counts as an optimizer of ours has them, and what else DeepSpeed says, under `deepspeed/`."""
    model = files.models[0]
    skipped = model.get("skipped_steps", 0)
    steps = {}
    cache = ShardCache()
    for name, value in states.steps.items():
        if isinstance(value, ArchivedTensor):
            tensor = saved_tensor(name, value.shape, whole_piece(value))
            value = cache.fill(name, tensor, tuple((0, n) for n in value.shape)).item()
        steps[name] = int(value)
    if steps:
        most = max(steps.values())
        behind = {name: most - count for name, count in steps.items() if count < most}
        count = most + int(skipped)
        contents.values["optimizer/step_count"] = (
            {"steps": count, "behind": behind} if behind else count
        )
        contents.values["optimizer/skipped_steps"] = int(skipped)
    for name, value in model.items():
        if name not in _READ and value is not None:
            contents.values[f"deepspeed/{name}"] = value
