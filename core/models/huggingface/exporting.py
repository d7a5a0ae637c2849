"""A checkpoint of ours as a folder that `transformers` loads: one tensor in memory at a time."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.dist_checkpointing.reading.lazy import LazyTensor, lazy_tensors
from core.dist_checkpointing.reading.read import memory_of
from core.dist_checkpointing.storage.checkpoint_dir import open_dir, space_for
from core.dist_checkpointing.tools.safetensors_files import FileTensor, new_folder, tensors_by_file, write_files
from core.models.gpt.gpt_model import GPTModel
from core.models.huggingface.blocks import Slices
from core.models.huggingface.facts import Facts
from core.models.huggingface.families import HuggingFaceModel, family_of, from_huggingface
from core.models.huggingface.rows import Row, rows_of
from core.parallel_state import ParallelState, layout_of
from core.transformer.transformer_config import TransformerConfig

FILE_BYTES = 5 << 30  # as transformers' own files
# beside the weights: what a tokenizer, a chat or generate() needs
COMPANIONS = ("*token*.json", "*.model", "vocab.*", "merges.txt", "generation_config.json", "*.jinja")
PROMPTS, PROMPT_LENGTH = 4, 16
TOLERANCE = 1e-4  # of float32 logits, relative to the largest


@dataclass(frozen=True)
class TheirTensor(FileTensor):
    """A tensor of theirs, and the parameter of ours that holds its numbers."""

    parameter: str


def export_huggingface(
    checkpoint: str | Path,
    folder: str | Path,
    source: str | Path,
    *,
    check: bool = False,
    file_bytes: int = FILE_BYTES,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> float | None:
    """Write the model of a checkpoint as Hugging Face's `folder`, there as a whole or not at all.

    source: the folder that the model began as; its configuration, tokenizer and generation files are carried over.
    check: transformers loads what was written, and its logits must be ours; the largest difference is returned.
    Raises ValueError: a checkpoint of another model than `source` describes (by name, with both shapes), logits that
    differ. ImportError: `check` without transformers.
    """
    source = Path(source).expanduser()
    stored = lazy_tensors(checkpoint)
    model_form = from_huggingface(source)
    facts = Facts.of_folder(source)
    with torch.device("meta"):
        model = GPTModel(**model_form.arguments(), parallel=ParallelState.single("cpu"), seed=0)
    parameters = _Parameters(model, stored, Path(checkpoint))
    rows = rows_of(family_of(facts).rows, model_form.config.num_layers)
    tensors: list[TheirTensor] = []
    for name in parameters.names():
        tensors += _their_tensors(name, rows[name], parameters, model_form.config)
    exported = _Exported(parameters, rows, model)
    with new_folder(folder) as temporary, space_for(open_dir(temporary), sum(tensor.nbytes for tensor in tensors)):
        write_files(temporary, tensors_by_file(tensors, file_bytes), exported.values_of, progress)
        _write_companions(source, temporary, tensors[0].dtype)
        return _largest_difference(temporary, parameters, model_form) if check else None


class _Parameters:
    """Our parameters by name, read from a checkpoint; shapes have been compared with the model's."""

    def __init__(self, model: GPTModel, stored: Mapping[str, LazyTensor], checkpoint: Path) -> None:
        self._stored: dict[str, tuple[LazyTensor, int | None]] = {}
        self.shapes = {name: tuple(layout_of(parameter).shape) for name, parameter in model.named_parameters()}
        for name, sharded in model.sharded_state_dict().items():
            key = sharded.key
            if key not in stored:
                raise ValueError(f"{checkpoint} holds no {key}, which the source's configuration asks for")
            stacked = bool(sharded.prepend_axis_num)
            layer = sharded.global_offset[0] if stacked else None
            shape = tuple(stored[key].shape[1:] if stacked else stored[key].shape)
            if shape != self.shapes[name]:
                raise ValueError(
                    f"{key} is {shape} in {checkpoint}, {self.shapes[name]} by the source's configuration"
                )
            self._stored[name] = stored[key], layer

    def names(self) -> list[str]:
        return list(self._stored)

    def dtype(self, name: str) -> torch.dtype:
        return self._stored[name][0].dtype

    def read(self, name: str) -> Tensor:
        tensor, layer = self._stored[name]
        return tensor[...] if layer is None else tensor[layer]


def _their_tensors(name: str, row: Row, parameters: _Parameters, config: TransformerConfig) -> Iterator[TheirTensor]:
    dtype = str(parameters.dtype(name)).removeprefix("torch.")
    for their_name, their_shape in row.huggingface_shapes(parameters.shapes[name], config).items():
        yield TheirTensor(their_name, their_shape, dtype, name)


class _Exported:
    """The values of their tensors; the last parameter of ours is kept, for several of theirs are made of it."""

    def __init__(self, parameters: _Parameters, rows: Mapping[str, Row], model: GPTModel) -> None:
        self._parameters, self._rows, self._config = parameters, rows, model.config
        self._last: tuple[str, Tensor] | None = None

    def values_of(self, tensor: TheirTensor) -> Iterator[np.ndarray]:
        if self._last is None or self._last[0] != tensor.parameter:
            self._last = tensor.parameter, self._parameters.read(tensor.parameter)
        ours = self._last[1]
        full: Slices = tuple(slice(0, size) for size in ours.shape)
        hf_tensor = torch.empty(tensor.shape, dtype=ours.dtype)
        for block in self._rows[tensor.parameter].blocks(full, self._config):
            if block.name == tensor.name:
                block.to_huggingface(ours, hf_tensor[block.hf_slices])
        yield memory_of(hf_tensor)


def _write_companions(source: Path, folder: Path, dtype: str) -> None:
    """The configuration with the dtype that was written, and what lies beside it."""
    config: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["dtype" if "dtype" in config else "torch_dtype"] = dtype
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for pattern in COMPANIONS:
        for path in sorted(source.glob(pattern)):
            if path.is_file() and not (folder / path.name).exists():
                shutil.copyfile(path, folder / path.name)


@torch.no_grad()
def _largest_difference(folder: Path, parameters: _Parameters, model_form: HuggingFaceModel) -> float:
    """Between transformers' logits of what was written and ours of what the checkpoint holds, both in float32."""
    from transformers import AutoModelForCausalLM

    ours = GPTModel(**model_form.arguments(), parallel=ParallelState.single("cpu"), seed=0).eval()
    for name, parameter in ours.named_parameters():
        # padded rows of the vocabulary, which no checkpoint has, stay
        stored = parameters.read(name)
        parameter[tuple(slice(0, size) for size in stored.shape)].copy_(stored)
    hf_model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    length = min(PROMPT_LENGTH, model_form.max_sequence_length)
    prompts = torch.randint(model_form.vocab_size, (PROMPTS, length), generator=torch.Generator().manual_seed(0))
    expected, actual = hf_model(prompts).logits, ours(prompts)
    difference = float((expected - actual).abs().max())
    largest = float(expected.abs().max())
    if not difference <= TOLERANCE * largest:
        raise ValueError(
            f"the exported model's logits differ from ours by {difference:.2e} of {largest:.2e} in transformers "
            f"({TOLERANCE} is allowed): nothing was written"
        )
    return difference
