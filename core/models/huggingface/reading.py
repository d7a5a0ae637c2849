"""Hugging Face weights into our parameters: of each tensor a rank reads only the rows or columns of its shard."""

import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from core.models.gpt.gpt_model import GPTModel
from core.models.huggingface.blocks import Block
from core.models.huggingface.families import FAMILIES
from core.models.huggingface.rows import STACKED_DEEPSEEK_ROWS, STACKED_ROWS, Row, rows_of
from core.models.huggingface.sources import Folder, Recorded, StateDict, WeightSource
from core.parallel_state import layout_of
from core.parallel_state.layout import Slices, true_part
from core.parallel_state.modules import named_buffers
from core.transformer.transformer_config import TransformerConfig

_TABLES = ("transformer.wte.weight", "model.embed_tokens.weight")
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_EMBEDDING = "embedding.word_embeddings.weight"
_HEAD = "output_layer.weight"


@torch.no_grad()
def load_huggingface(model: GPTModel, weights: Mapping[str, Tensor] | str | Path) -> None:
    """Fill this rank's shard of `model` from Hugging Face weights; each rank takes its own slices.

    weights: a state_dict, or a folder of safetensors files, of which only this rank's rows and columns are read.
    Raises ValueError: a parameter of the model that the weights lack, or one of another shape; a tensor of the
    weights that the model has no place for; damaged files. The model is then partly filled, or not at all.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            "the model is on meta, it has no memory to load into; call model.to_empty(device=...) first"
        )
    if isinstance(weights, nn.Module):
        raise ValueError(
            f"weights is a module, {type(weights).__name__}; give its state_dict(), or the folder of its files"
        )
    opened = open_weights(
        model, Folder(weights) if isinstance(weights, str | Path) else StateDict(weights)
    )
    sizes = model.parallel.sizes
    coordinate = model.parallel.coordinate
    for name, tensor in opened.tensors_of(model).items():
        layout = layout_of(tensor)
        # after `to_empty` anything is there, and 0 times NaN is NaN
        if layout.padding:
            tensor.zero_()
        opened.fill(
            name, true_part(tensor, layout, coordinate, sizes), layout.box(coordinate, sizes)
        )
    opened.check_tied(model)


class OpenedWeights:
    """Hugging Face weights as the parameters of one model: every name and shape has been compared."""

    def __init__(
        self, source: Recorded, rows: Mapping[str, Row], config: TransformerConfig
    ) -> None:
        self._source = source
        self._rows = rows
        self._config = config

    def tensors_of(self, model: GPTModel) -> dict[str, Tensor]:
        """Every parameter of a model, and its buffers that the weights have, by name."""
        buffers = {name: buffer for name, buffer in named_buffers(model) if name in self._rows}
        return {**dict(model.named_parameters()), **buffers}

    def parameter(self, name: str) -> Tensor:
        """A full parameter of ours, on the host, in the dtype of the Hugging Face tensor.

        One that is a single tensor of theirs shares its memory, the pages of a mapped file: nobody writes into it.
        """
        row = self._rows[name]
        shape = row.kind.our_shape(self._source.shape(row.hf_names[0]), self._config)
        # nearly all parameters are one tensor of theirs as it lies: no copy then
        first, *others = row.blocks(_full_box(shape), self._config)
        if not others and not first.transposed:
            return self._numbers(first).reshape(shape)
        first_element = tuple(slice(0, 1) for _ in first.hf_slices)
        # one element tells the dtype, without reading the tensor
        values = torch.empty(shape, dtype=self._source.read(first.name, first_element).dtype)
        self.fill(name, values, _full_box(shape))
        return values

    def fill(self, name: str, target: Tensor, box: Slices) -> None:
        """Fill our box of a parameter from the Hugging Face blocks that it is made of."""
        # all of this rank's rows are padding
        if target.numel() == 0:
            return
        for block in self._rows[name].blocks(box, self._config):
            block.to_ours(self._numbers(block).to(target.device), target)

    def _numbers(self, block: Block) -> Tensor:
        """Of the Hugging Face tensor. Raises ValueError: they are quantized."""
        values = self._source.read(block.name, block.hf_slices)
        if values.dtype not in _DTYPES:
            raise ValueError(
                f"{block.name} is of {values.dtype}: quantized weights are numbers only with their scales"
            )
        return values

    def check_tied(self, model: GPTModel) -> None:
        """A model that ties its ends has no place for a head unlike its table. ValueError: there is one."""
        table = dict(model.named_parameters()).get(_EMBEDDING)
        head = self._rows[_HEAD].hf_names[0]
        # files of a tied model may hold the table twice
        if not model.tied or table is None or head not in self._source:
            return
        box = layout_of(table).box(model.parallel.coordinate, model.parallel.sizes)
        if not torch.equal(
            self._source.read(self._rows[_EMBEDDING].hf_names[0], box), self._source.read(head, box)
        ):
            raise ValueError(
                "lm_head.weight differs from the embedding in the Hugging Face weights, but the model ties them; "
                "build it with share_embeddings_and_output_weights=False (tie_word_embeddings=False)"
            )


def open_weights(model: GPTModel, source: WeightSource) -> OpenedWeights:
    """Raises ValueError: parameters without weights, weights without a parameter, other shapes."""
    recorded = Recorded(source)
    rows = _rows(recorded, model.config)
    opened = OpenedWeights(recorded, rows, model.config)
    _leave_out_further_predictions(recorded, model.config.num_layers)
    _check_counterparts(model, recorded, rows, opened.tensors_of(model))
    return opened


def canonical(state: Mapping[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """Full tensors under Hugging Face's names -> full tensors under ours, in our shapes.

    Weights, gradients and moments alike: every step is a reshape, a transposition or a concatenation.
    Raises ValueError: names without the prefix of a whole model.
    """
    source = Recorded(StateDict(state))
    rows = _rows(source, config)
    opened = OpenedWeights(source, rows, config)
    return {
        name: opened.parameter(name).clone()
        for name, row in rows.items()
        if row.hf_names[0] in source
    }


def _rows(source: Recorded, config: TransformerConfig) -> dict[str, Row]:
    """Our name -> row, of the family whose names these are."""
    if any(table in source for table in _TABLES):
        tables = [family.rows for family in FAMILIES.values()]
        different = {id(table): table for table in (*tables, STACKED_ROWS, STACKED_DEEPSEEK_ROWS)}
        # families share names: the table that knows most of them, and lacks fewest, is theirs
        best = max(different.values(), key=lambda table: _fit(source, table, config))
        return rows_of(best, range(config.num_layers), config.num_moe_experts)
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


def _fit(source: Recorded, table: Iterable[Row], config: TransformerConfig) -> tuple[int, int]:
    """How many names of the ends and of the first and last layer the source has; then how few it has not."""
    # the first and the last layer tell kinds apart where only some layers have experts, at the cost of two
    rows = rows_of(table, {0, config.num_layers - 1}, config.num_moe_experts)
    names = [name for row in rows.values() for name in row.hf_names]
    known = sum(name in source for name in names)
    return known, known - len(names)


def _full_box(shape: Iterable[int]) -> Slices:
    return tuple(slice(0, size) for size in shape)


def _leave_out_further_predictions(source: Recorded, layers: int) -> None:
    """Parts behind the last layer that predict tokens after the next one (GLM-4.5): transformers has none.

    Warns. They stand as layers of a higher number, with an `eh_proj` each.
    """
    number = layers
    while f"model.layers.{number}.eh_proj.weight" in source:
        source.used.update(
            name for name in source.unused() if name.startswith(f"model.layers.{number}.")
        )
        number += 1
    if number > layers:
        warnings.warn(
            f"{number - layers} parts of the Hugging Face weights predict tokens after the next one, behind the "
            f"model's {layers} layers; they are left out",
            stacklevel=3,
        )


def _check_counterparts(
    model: GPTModel, source: Recorded, rows: Mapping[str, Row], parameters: Mapping[str, Tensor]
) -> None:
    """Every parameter has tensors of its shape, and every tensor a parameter: here, or on another pipeline stage.

    (A pipeline stage holds some layers only, so that not every row is a parameter here.)
    """
    for name, parameter in parameters.items():
        if name not in rows or (name == _HEAD and rows[name].hf_names[0] not in source):
            raise ValueError(
                f"the Hugging Face weights have no counterpart of {name}; is the model type right, and is it a "
                "language model (architectures of config.json: ...ForCausalLM)?"
            )
        _check_shapes(name, layout_of(parameter).shape, rows[name], source, model.config)
    # a tensor without a parameter here is another stage's only if its whole module is
    local_modules = {_module_of(name) for name in parameters}
    # GPT-2's positions: a model without them must refuse such a tensor, not take it for another stage's
    if model.pre_process:
        local_modules.add("embedding.position_embeddings")
    for name, row in rows.items():
        # another stage's
        if name not in parameters and _module_of(name) not in local_modules:
            source.used.update(hf_name for hf_name in row.hf_names if hf_name in source)
    if model.tied and _HEAD in rows and rows[_HEAD].hf_names[0] in source:
        source.use(rows[_HEAD].hf_names[0])
    if dropped := source.unused():
        more = f" and {len(dropped) - 3} more" if len(dropped) > 3 else ""
        raise ValueError(
            f"{len(dropped)} of the Hugging Face weights have no place in the model: {', '.join(dropped[:3])}{more}; "
            "are the configuration and the weights of one model?"
        )


def _check_shapes(
    name: str, shape: tuple[int, ...], row: Row, source: Recorded, config: TransformerConfig
) -> None:
    expected = row.huggingface_shapes(shape, config)
    actual = {hf_name: source.shape(hf_name) for hf_name in expected}
    if actual == expected:
        return
    rows = [hf_shape[0] for hf_shape in actual.values()]
    sizes = tuple(hf_shape[0] for hf_shape in expected.values())
    # query, key and value are three tensors
    if len(expected) == 3 and tuple(rows) != sizes:
        raise ValueError(
            f"query, key and value have {tuple(rows)} rows in the Hugging Face weights, expected {sizes}"
        )
    mismatched = next(hf_name for hf_name in expected if actual[hf_name] != expected[hf_name])
    # a transposed tensor: the shape of ours would read as if it fitted
    if len(expected) == 1 and actual[mismatched][::-1] != expected[mismatched]:
        ours = shape
    else:
        ours = expected[mismatched]
    raise ValueError(
        f"{name} is {ours} here and {actual[mismatched]} in the Hugging Face weights ({mismatched}): they are not of "
        "this configuration; fetch config.json and the shards of one revision, or build the model from their config"
    )


def _module_of(name: str) -> str:
    """The part of a model that a pipeline stage holds or not: a layer, or a module outside of the layers."""
    layer = re.match(r"decoder\.layers\.\d+", name)
    if layer:
        return layer[0]
    return name.rpartition(".")[0]
