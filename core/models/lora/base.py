"""The frozen weights beside adapters: a number that tells them apart, and a model of a checkpoint of adapters."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from core.dist_checkpointing.reading.loading import load, open_stored
from core.dist_checkpointing.state.mapping import sharded_state_dict
from core.models.gpt.gpt_model import GPTModel
from core.models.huggingface.reading import load_huggingface
from core.models.lora.apply import apply_lora, lora_state_dict
from core.models.lora.config import LoraConfig
from core.parallel_state import ParallelState, layout_of
from core.parallel_state.collectives import all_gather_objects
from core.parallel_state.layout import true_part
from core.parallel_state.modules import named_parameters

_MASK = (1 << 64) - 1
_BLOCK = 1 << 22  # elements at a time: 64 MiB beside them
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fingerprint(
    stages: Mapping[int, GPTModel], ps: ParallelState, dtype: torch.dtype | None = None
) -> str:
    """`float32 1f0c...`: of every frozen parameter's name and bits, the same on every layout; collective.

    dtype: in which they are compared; default: the model's. Sums of bit patterns, which do not depend on how a tensor
    is cut: it tells other weights, not a forger's.
    """
    sums: dict[str, int] = {}
    dtype = dtype or next(iter(stages.values())).config.params_dtype
    for name, parameter in named_parameters(stages):
        layout = layout_of(parameter)
        # one of the ranks that hold the same part counts it
        if not parameter.requires_grad and layout.owned_by(ps.coordinate):
            values = true_part(parameter.detach(), layout, ps.coordinate, ps.sizes)
            sums[name] = _sum_of_bits(values, dtype)
    whole: dict[str, int] = {}
    for part in all_gather_objects(sums, ps.world):
        for name, number in part.items():
            whole[name] = whole.get(name, 0) + number & _MASK
    digest = hashlib.blake2b(repr(sorted(whole.items())).encode(), digest_size=8).hexdigest()
    return f"{str(dtype).removeprefix('torch.')} {digest}"


def _sum_of_bits(values: Tensor, dtype: torch.dtype) -> int:
    """Of all elements, and of their squares, modulo 2^64: each as the integer that its bits in `dtype` are."""
    total = 0
    for block in values.contiguous().view(-1).split(_BLOCK):
        bits = block.to(dtype).view(_INTEGERS[dtype.itemsize]).to(torch.int64)
        total += int(bits.sum() + 31 * (bits * bits).sum())
    return total & _MASK


def adapters_of(checkpoint: str) -> dict[str, Any] | None:
    """What a checkpoint says of its adapters; None: it has none."""
    facts: Any = open_stored(checkpoint).run.get("lora")
    return None if facts is None else dict(facts)


def load_adapted(
    stages: Mapping[int, GPTModel],
    checkpoint: str,
    ps: ParallelState,
    *,
    source: str | None = None,
) -> None:
    """Fill models without adapters from a checkpoint of adapters, and put these in; collective.

    The frozen weights are those of the checkpoint, where it has them, or of where the run began; source: the Hugging
    Face folder instead, if that has moved. Raises ValueError: they are others than those that were adapted.
    """
    run = open_stored(checkpoint).run
    facts: Any = run["lora"]
    config = LoraConfig.of_facts(facts)
    if config.save_base:
        apply_lora(stages, config)
        load({"model": sharded_state_dict(dict(stages), ps)}, checkpoint, ps=ps, cast=True)
        return
    origin = _load_base(stages, run, ps, source)
    apply_lora(stages, config)
    written_in = getattr(torch, str(facts.get("base", "")).partition(" ")[0], None)
    refuse_other_base(fingerprint(stages, ps, written_in), facts, checkpoint, origin)
    state = lora_state_dict(sharded_state_dict(dict(stages), ps), stages)
    load({"model": state}, checkpoint, ps=ps, cast=True)


def refuse_other_base(found: str, facts: Mapping[str, Any], checkpoint: str, origin: str) -> None:
    """Raise ValueError for frozen weights that are not those beside which the adapters were trained.

    found: their `fingerprint`. origin: where they are from, for the message.
    """
    if facts.get("base") != found:
        raise ValueError(
            f"{checkpoint} holds adapters of weights {facts.get('base')}, those of {origin} are {found}: give the "
            "folder or checkpoint that the run began with, in that dtype or a wider one"
        )


def _load_base(
    stages: Mapping[int, GPTModel], run: Mapping[str, Any], ps: ParallelState, source: str | None
) -> str:
    """Fill the stages with the weights that a run began with; where they are from, in words."""
    began: Any = run.get("began_as") or {}
    folder = source or began.get("huggingface")
    if folder is not None:
        for stage in stages.values():
            load_huggingface(stage, folder)
        return str(folder)
    if url := began.get("weights"):
        load({"model": sharded_state_dict(dict(stages), ps)}, url, ps=ps, cast=True)
        return str(url)
    settings: Any = run.get("settings", {})
    for stage in stages.values():
        stage.seed = settings.get("model.seed", stage.seed)
        stage.init_weights()
    return f"seed {stage.seed}"
