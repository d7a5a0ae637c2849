"""The adapters of a checkpoint as a folder that `peft` loads beside the model they were trained on."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.dist_checkpointing.reading.lazy import LazyTensor, lazy_tensors
from core.dist_checkpointing.reading.loading import open_stored
from core.dist_checkpointing.reading.read import memory_of
from core.dist_checkpointing.tools.safetensors_files import (
    FileTensor,
    new_folder,
    tensors_by_file,
    write_file,
)
from core.models.gpt.gpt_model import GPTModel
from core.models.gpt.layer_numbers import stack_of
from core.models.huggingface.rows import Row, rows_of
from core.models.huggingface.written import form_of_run, form_of_source
from core.models.lora.config import LoraConfig
from core.parallel_state import ParallelState

_A = "adapter.lora_A"
_B = "adapter.lora_B"


@dataclass(frozen=True)
class _Factor(FileTensor):
    """A factor of one of their linears. row: what its B is made of; key, layer: our array, and where in its stack."""

    key: str
    layer: int
    row: Row


def export_adapters(
    checkpoint: str | Path, folder: str | Path, source: str | Path | None = None
) -> int:
    """Write `adapter_config.json` and `adapter_model.safetensors`; the number of tensors.

    One of their linears that is a part of ours (a query projection of the fused one) has our A and its own rows of
    B. source: the folder that the model began as; default: what the run says of its model. Raises ValueError: a
    checkpoint without adapters, of a model whose linears peft keeps otherwise (GPT-2), a folder that is there.
    """
    run = open_stored(checkpoint).run
    facts_of_adapters: Any = run.get("lora")
    if facts_of_adapters is None:
        raise ValueError(
            f"{checkpoint} holds 0 adapters; export it as a model: python -m core.models.huggingface export"
        )
    described_as: Any = run.get("model")
    lora = LoraConfig.of_facts(facts_of_adapters)
    if source is None:
        form = form_of_run(described_as, None)
    else:
        form = form_of_source(source, described_as, str(checkpoint))
    config = form.model.config
    stored = lazy_tensors(checkpoint)
    with torch.device("meta"):  # which layers have which parts
        model = GPTModel(**form.model.arguments(), parallel=ParallelState.single("cpu"), seed=0)
    names = dict(model.named_parameters()).keys()
    rows = rows_of(form.family.rows, range(config.num_layers), config.num_moe_experts)
    factors = list(_factors(stored, {n: row for n, row in rows.items() if n in names}, config))
    files = tensors_by_file(factors, sum(factor.nbytes for factor in factors))
    with new_folder(folder) as temporary:
        write_file(
            temporary / "adapter_model.safetensors",
            files[0],
            lambda factor: _values(factor, stored, config),
        )
        began_as: Any = run.get("began_as") or {}
        base = source or began_as.get("huggingface")
        described = _config(lora, run, factors, None if base is None else str(base))
        text = json.dumps(described, indent=2) + "\n"
        (temporary / "adapter_config.json").write_text(text, encoding="utf-8")
    return len(factors)


def _factors(
    stored: Mapping[str, LazyTensor], rows: Mapping[str, Row], config: Any
) -> Iterator[_Factor]:
    stack = stack_of(config)
    for name, row in rows.items():
        place, _, kind = name.rpartition(".")
        _, _, path = place.partition("decoder.layers.")
        number, _, part = path.partition(".")
        key = f"model/decoder.layers.{part}."
        if kind != "weight" or key + _B not in stored:
            continue
        b = stored[key + _B]
        dtype, shape = str(b.dtype).removeprefix("torch."), tuple(b.shape[1:])
        rank, inputs = stored[key + _A].shape[1:]
        if any(block.transposed for block in row.blocks(_full((*shape[:-1], inputs)), config)):
            raise ValueError(
                f"{name} is kept as [in, out] in that family (Conv1D), whose adapters peft has otherwise; export "
                "the merged model: python -m core.models.huggingface export"
            )
        layer = stack.having(part, int(number)).index(int(number))
        for their_name, their_shape in row.huggingface_shapes(shape, config).items():
            linear = f"base_model.model.{their_name.removesuffix('.weight')}"
            yield _Factor(f"{linear}.lora_A.weight", (rank, inputs), dtype, key + _A, layer, row)
            yield _Factor(f"{linear}.lora_B.weight", their_shape, dtype, key + _B, layer, row)


def _full(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in shape)


def _values(factor: _Factor, stored: Mapping[str, LazyTensor], config: Any) -> Iterator[np.ndarray]:
    # our arrays are stacks of layers, theirs are one by one
    ours: Tensor = stored[factor.key][factor.layer]
    if factor.key.endswith(_A):
        yield memory_of(ours.contiguous())
        return
    theirs = torch.empty(factor.shape, dtype=ours.dtype)
    name = factor.name.removeprefix("base_model.model.").removesuffix(".lora_B.weight")
    for block in factor.row.blocks(_full(tuple(ours.shape)), config):
        if block.name == f"{name}.weight":
            block.to_huggingface(ours, theirs[block.hf_slices])
    yield memory_of(theirs)


def _config(
    lora: LoraConfig, run: Mapping[str, Any], factors: list[_Factor], base: str | None
) -> dict[str, Any]:
    """peft's fields; modules by their whole names, so that none is meant that has no adapter."""
    settings: Any = run.get("settings") or {}
    prefix = "base_model.model."
    suffix = ".lora_A.weight"
    names = sorted(
        factor.name.removeprefix(prefix).removesuffix(suffix)
        for factor in factors
        if factor.name.endswith(suffix)
    )
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": settings.get("lora.dropout", 0.0),
        "use_rslora": lora.rslora,
        "target_modules": names,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
