"""`export` and `reshard --per-rank`: the model's weights for other programs, one tensor per parameter and layer."""

import re
from collections.abc import Callable
from itertools import product
from os import PathLike

from core.dist_checkpointing.format.arrays import ArrayInfo
from core.dist_checkpointing.format.keys import key_of
from core.dist_checkpointing.planning.cuts import cuts
from core.dist_checkpointing.reading.stored import StoredCheckpoint
from core.dist_checkpointing.storage.checkpoint_dir import open_dir, space_for
from core.dist_checkpointing.tools.shards import SHARD, Tensor, new_folder, write
from core.parallel_state.flat import Box

MODEL = "model/"
DTYPES = {"as-saved": None, "bf16": "bfloat16", "fp32": "float32"}

Done = Callable[[int], None]  # told of bytes


def weights(stored: StoredCheckpoint) -> dict[str, tuple[str, str]]:
    """name -> (stored array, dtype) of every parameter and buffer of the model; those derived included."""
    found = {key: (key, stored.dtype(key)) for key in stored.keys}
    found |= {key: (how["from"], how["torch_dtype"]) for key, how in stored.derived.items()}
    if lost := sorted(key for key, _ in found.values() if key not in stored.metadata):
        raise ValueError(f"{stored.directory.url} derives from {lost[0]}, which it does not hold; use another step")
    named = {key.removeprefix(MODEL): source for key, source in sorted(found.items()) if key.startswith(MODEL)}
    if not named:
        raise ValueError(
            f"{stored.directory.url} holds no array below {MODEL}, so no model; `inspect` lists what it holds"
        )
    return named


def tensors(
    stored: StoredCheckpoint, dtype: str | None = None, *, tp: tuple[int, int] = (0, 1), pp: tuple[int, int] = (0, 1)
) -> list[Tensor]:
    """The tensors that a rank holds, (rank, size) along tensor and pipeline axes; by default all, whole.

    Layers of a stack are apart, with their numbers in the whole model.
    """
    (tp_rank, tp_size), (stage, stages) = tp, pp
    made = []
    for name, (key, saved) in weights(stored).items():
        info = stored.info(key)
        if not info.stacked and stage not in _stages(name, stages):
            continue
        dims = cuts(info, tp_size, stages)
        box = [dim[0] for dim in dims]
        if info.tp_dim is not None:
            box[info.tp_dim] = dims[info.tp_dim][tp_rank]
        if info.stacked:
            box[0] = dims[0][stage]
        wanted = dtype if dtype is not None and "float" in saved else saved
        made += [_tensor(n, key, b, wanted, drop=n != name) for n, b in _layers(name, tuple(box), info)]
    return made


def _tensor(name: str, key: str, box: Box, dtype: str, *, drop: bool) -> Tensor:
    return Tensor(key_of(name), tuple(stop - start for start, stop in box[drop:]), dtype, key, box)


def _layers(name: str, box: Box, info: ArrayInfo) -> list[tuple[str, Box]]:
    """(name, box) of each layer: the number goes behind the name of the stack. One that is not known is what stands
    up to `layers`, as in Megatron's names; without that the stack stays one tensor."""
    stack = info.stack or ((found := re.match(r"(.*\.)?layers(?=\.)", name)) and found[0])
    if not info.stacked or not stack:
        return [(name, box)]
    return [(f"{stack}.{row}{name[len(stack) :]}", ((row, row + 1), *box[1:])) for row in range(*box[0])]


def _stages(name: str, stages: int) -> set[int]:
    """Which stages hold a parameter outside of the layers: embeddings the first, what follows the layers the last."""
    return {0} if "embedding" in name else {stages - 1}


def export(
    stored: StoredCheckpoint, folder: str | PathLike[str], dtype: str | None, done: Done, shard_bytes: int = SHARD
) -> list[Tensor]:
    """The whole model in safetensors files, streamed; returns what was written."""
    found = tensors(stored, dtype)
    total = sum(t.nbytes for t in found)
    with new_folder(folder) as temporary, space_for(open_dir(temporary), total):
        write(stored, found, temporary, done, shard_bytes)
    return found


def per_rank(
    stored: StoredCheckpoint, folder: str | PathLike[str], tp: int, pp: int, done: Done, shard_bytes: int = SHARD
) -> dict[str, list[Tensor]]:
    """A directory for each rank, named as Megatron's, with its part of the model; returns what was written."""
    ranks = {}
    for stage, rank in product(range(pp), range(tp)):
        name = f"mp_rank_{rank:02d}" + f"_{stage:03d}" * (pp > 1)
        ranks[name] = tensors(stored, tp=(rank, tp), pp=(stage, pp))
    total = sum(t.nbytes for found in ranks.values() for t in found)
    with new_folder(folder) as temporary, space_for(open_dir(temporary), total):
        for name, found in ranks.items():
            (temporary / name).mkdir()
            write(stored, found, temporary / name, done, shard_bytes)
    return ranks
