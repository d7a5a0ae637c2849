"""Hugging Face weights into our parameters: of each tensor a rank reads the rows or columns that it holds."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from core.models.gpt.gpt_model import GPTModel
from core.models.huggingface.blocks import Slices
from core.models.huggingface.rows import GPT2_ROWS, LLAMA_ROWS, PHI3_ROWS, Row, rows_of
from core.models.huggingface.sources import Folder, Recorded, Source, StateDict
from core.parallel_state import layout_of
from core.parallel_state.layout import true_part
from core.transformer.transformer_config import TransformerConfig

_TABLES = ("transformer.wte.weight", "model.embed_tokens.weight")
_FUSED = "model.layers.0.self_attn.qkv_proj.weight"
_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


@torch.no_grad()
def load_huggingface(model: GPTModel, weights: Mapping[str, Tensor] | str | Path) -> None:
    """Fill this rank's part of `model` from Hugging Face weights; each rank takes its own slices.

    weights: a state_dict, or a folder of safetensors files, of which only this rank's rows and columns are read.
    Raises ValueError: a parameter of the model that the weights lack, or one of another shape; a tensor of the
    weights that the model has no place for; damaged files. The model is then partly filled, or not at all.
    """
    source = Recorded(Folder(weights) if isinstance(weights, str | Path) else StateDict(weights))
    rows = _rows(source, model.config)
    parameters = dict(model.named_parameters())
    _check_places(model, source, rows, parameters)
    sizes, at = model.parallel.sizes, model.parallel.coordinate
    for name, parameter in parameters.items():
        layout = layout_of(parameter)
        _fill(true_part(parameter, layout, at, sizes), layout.box(at, sizes), rows[name], source, model.config)
    if model.tied and _HEAD in rows and rows[_HEAD].theirs[0] in source:
        _check_tied(model, source, rows)


def canonical(state: Mapping[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """Whole tensors under Hugging Face's names -> whole tensors under ours, in our shapes.

    Weights, gradients and moments alike: every step is a reshape, a transposition or a concatenation.
    Raises ValueError: names without the prefix of a whole model.
    """
    source = Recorded(StateDict(state))
    full: dict[str, Tensor] = {}
    for name, row in _rows(source, config).items():
        if row.theirs[0] not in source:
            continue
        shape = row.kind.our_shape(source.shape(row.theirs[0]), config)
        like = state[row.theirs[0]]
        full[name] = torch.empty(shape, dtype=like.dtype, device=like.device)
        _fill(full[name], _whole(shape), row, source, config)
    return full


def _rows(source: Recorded, config: TransformerConfig) -> dict[str, Row]:
    """Our name -> row, of the family whose names these are."""
    if _TABLES[0] in source:
        return rows_of(GPT2_ROWS, config.num_layers)
    if _TABLES[1] in source:
        return rows_of(PHI3_ROWS if _FUSED in source else LLAMA_ROWS, config.num_layers)
    for table in _TABLES:
        prefix, _, bare = table.partition(".")
        if bare in source:
            raise ValueError(
                f"the Hugging Face weights hold {bare} and no {table}: they are of the model without its head; pass "
                f"the state_dict of AutoModelForCausalLM, or put '{prefix}.' before the names"
            )
    raise ValueError(
        f"the Hugging Face weights hold none of {', '.join(_TABLES)}; their names begin with: "
        f"{', '.join(source.first_names(3)) or 'nothing, they are empty'}"
    )


def _fill(target: Tensor, box: Slices, row: Row, source: Source | Recorded, config: TransformerConfig) -> None:
    """Our box of a tensor from the blocks of theirs that it is made of."""
    if target.numel() == 0:  # all of this rank's rows are padding
        return
    for block in row.blocks(box, config):
        block.to_ours(source.read(block.name, block.theirs).to(target.device), target)


def _whole(shape: Iterable[int]) -> Slices:
    return tuple(slice(0, size) for size in shape)


def _check_places(
    model: GPTModel, source: Recorded, rows: Mapping[str, Row], parameters: Mapping[str, Tensor]
) -> None:
    """Every parameter has tensors of its shape, and every tensor a parameter: here, or on another pipeline stage.

    (A pipeline stage holds some parts only, so that not every row is a parameter here.)
    """
    for name, parameter in parameters.items():
        if name not in rows or (name == _HEAD and rows[name].theirs[0] not in source):
            raise ValueError(f"the Hugging Face weights have no counterpart of {name}; is the model type right?")
        _check_shapes(name, layout_of(parameter).shape, rows[name], source, model.config)
    held = {_part(name) for name in parameters}
    if model.pre_process:
        held.add("embedding.position_embeddings")
    for name, row in rows.items():
        if name not in parameters and _part(name) not in held:  # another stage's
            source.used.update(theirs for theirs in row.theirs if theirs in source)
    if model.tied and _HEAD in rows and rows[_HEAD].theirs[0] in source:
        source.use(rows[_HEAD].theirs[0])
    if dropped := source.unused():
        more = f" and {len(dropped) - 3} more" if len(dropped) > 3 else ""
        raise ValueError(
            f"{len(dropped)} of the Hugging Face weights have no place in the model: {', '.join(dropped[:3])}{more}; "
            "are the configuration and the weights of one model?"
        )


def _check_shapes(name: str, shape: tuple[int, ...], row: Row, source: Recorded, config: TransformerConfig) -> None:
    expected = row.their_shapes(shape, config)
    actual = {theirs: source.shape(theirs) for theirs in expected}
    if actual == expected:
        return
    if len(expected) == 3 and (rows := [part[0] for part in actual.values()]) != [p[0] for p in expected.values()]:
        sizes = tuple(part[0] for part in expected.values())
        raise ValueError(
            f"query, key and value have {tuple(rows)} rows in the Hugging Face weights, expected {sizes}"
        )
    wrong = next(theirs for theirs in expected if actual[theirs] != expected[theirs])
    ours = shape if len(expected) == 1 and actual[wrong][::-1] != expected[wrong] else expected[wrong]
    raise ValueError(f"{name} is {ours} here and {actual[wrong]} in the Hugging Face weights ({wrong})")


def _check_tied(model: GPTModel, source: Recorded, rows: Mapping[str, Row]) -> None:
    """A model that ties its ends has no place for a head unlike its table."""
    table = next((p for name, p in model.named_parameters() if name == _EMBEDDING), None)
    if table is None:
        return
    layout = layout_of(table)
    box = layout.box(model.parallel.coordinate, model.parallel.sizes)
    mine, head = (source.read(rows[name].theirs[0], box) for name in (_EMBEDDING, _HEAD))
    if not torch.equal(mine, head):
        raise ValueError(
            "lm_head.weight differs from the embedding in the Hugging Face weights, but the model ties them; build "
            "it with share_embeddings_and_output_weights=False (tie_word_embeddings=False)"
        )


def _part(name: str) -> str:
    """The part of a model that a pipeline stage holds or not: a layer, or a module outside of the layers."""
    layer = re.match(r"decoder\.layers\.\d+", name)
    return layer[0] if layer else name.rpartition(".")[0]
