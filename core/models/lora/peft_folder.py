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
from core.models.huggingface.matching import matching_architectures
from core.models.huggingface.origin import began_as, folder_of_form
from core.models.huggingface.rows import Row, rows_of
from core.models.huggingface.written import FolderForm, form_of_run, form_of_source
from core.models.lora.config import LoraConfig
from core.parallel_state import ParallelState

_A = "adapter.lora_A"
_B = "adapter.lora_B"
_PREFIX = "base_model.model."
_SUFFIX = ".lora_A.weight"
_FOLDED = "export the merged model: python -m core.models.huggingface export"


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
    B; one that is fused as ours (Phi-3's qkv_proj) has all of them. source: the folder that the model began as, whose
    names they get; default: the one that the run names, else what the run says of its model. Raises ValueError: a
    checkpoint without adapters, of a model whose linears peft keeps otherwise (GPT-2) or takes for experts, of a
    folder that cannot be asked and whose names may be other ones, a folder that is there.
    """
    run = open_stored(checkpoint).run
    facts_of_adapters: Any = run.get("lora")
    if facts_of_adapters is None:
        raise ValueError(
            f"{checkpoint} holds 0 adapters; export it as a model: python -m core.models.huggingface export"
        )
    lora = LoraConfig.of_facts(facts_of_adapters)
    form = _form(checkpoint, run, source)
    config = form.model.config
    stored = lazy_tensors(checkpoint)
    with torch.device("meta"):  # which layers have which parts
        model = GPTModel(**form.model.arguments(), parallel=ParallelState.single("cpu"), seed=0)
    names = dict(model.named_parameters()).keys()
    rows = rows_of(form.family.rows, range(config.num_layers), config.num_moe_experts)
    factors = list(_factors(stored, {n: row for n, row in rows.items() if n in names}, config))
    _refuse_taken_for_experts(factors, form)
    files = tensors_by_file(factors, sum(factor.nbytes for factor in factors))
    with new_folder(folder) as temporary:
        write_file(
            temporary / "adapter_model.safetensors",
            files[0],
            lambda factor: _values(factor, stored, config),
        )
        base = source or began_as(run)
        described = _config(lora, run, factors, None if base is None else str(base))
        text = json.dumps(described, indent=2) + "\n"
        (temporary / "adapter_config.json").write_text(text, encoding="utf-8")
    return len(factors)


def _form(checkpoint: str | Path, run: Mapping[str, Any], source: str | Path | None) -> FolderForm:
    """Whose names the adapters get: one model may be several families', which fuse their linears differently."""
    described_as: Any = run.get("model")
    if source is not None:
        return form_of_source(source, described_as, str(checkpoint))
    began = folder_of_form(run)
    problem = "is not there"
    if began is not None and (Path(began).expanduser() / "config.json").is_file():
        try:
            return form_of_source(began, described_as, str(checkpoint))
        except (ValueError, OSError) as error:
            problem = f"cannot be asked ({error})"
    form = form_of_run(described_as, None)
    others = matching_architectures(form.model)
    if began is not None and len({id(family.rows) for family in others.values()}) > 1:
        raise ValueError(
            f"{began}, which the model began as, {problem}, and {', '.join(others)} name the linears of such a model "
            "differently, of which peft passes over what it does not know; --source HF_DIR says where it is"
        )
    return form


def _refuse_taken_for_experts(factors: list[_Factor], form: FolderForm) -> None:
    """Raise ValueError where peft (from 0.18, transformers 5) loads none of the adapters of dense and shared MLPs.

    In families with experts it takes every target that ends as the experts' former linears for their stacks.
    """
    ends = {
        name.rsplit(".", 2)[1] for row in form.family.rows for name in row.hf_names if "{e}" in name
    }
    taken = [name for name in _linears(factors) if name.rpartition(".")[2] in ends]
    if taken:
        raise ValueError(
            f"{taken[0]} has adapters, and {len(taken) - 1} more of dense and shared MLPs: in "
            f"{form.family.architecture} peft takes {', '.join(sorted(ends))} for the experts' and loads none of "
            f"these; {_FOLDED}, or train with lora.modules of the attention alone"
        )


def _linears(factors: list[_Factor]) -> list[str]:
    """Their names of the linears that have adapters."""
    named = [factor.name for factor in factors if factor.name.endswith(_SUFFIX)]
    return [name.removeprefix(_PREFIX).removesuffix(_SUFFIX) for name in named]


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
                f"{name} is kept as [in, out] in that family (Conv1D), whose adapters peft has otherwise; "
                f"{_FOLDED}"
            )
        layer = stack.having(part, int(number)).index(int(number))
        for their_name, their_shape in row.huggingface_shapes(shape, config).items():
            linear = f"{_PREFIX}{their_name.removesuffix('.weight')}"
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
    name = factor.name.removeprefix(_PREFIX).removesuffix(".lora_B.weight")
    for block in factor.row.blocks(_full(tuple(ours.shape)), config):
        if block.name == f"{name}.weight":
            block.to_huggingface(ours, theirs[block.hf_slices])
    yield memory_of(theirs)


def _config(
    lora: LoraConfig, run: Mapping[str, Any], factors: list[_Factor], base: str | None
) -> dict[str, Any]:
    """peft's fields; modules by their whole names, so that none is meant that has no adapter."""
    settings: Any = run.get("settings") or {}
    names = sorted(_linears(factors))
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
