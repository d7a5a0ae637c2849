"""A checkpoint of ours as a folder that `transformers` loads: one tensor in memory at a time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.dist_checkpointing.reading.lazy import LazyTensor, lazy_tensors
from core.dist_checkpointing.reading.loading import open_stored
from core.dist_checkpointing.reading.read import memory_of
from core.dist_checkpointing.storage.checkpoint_dir import open_dir, space_for
from core.dist_checkpointing.tools.safetensors_files import FileTensor, new_folder, tensors_by_file, write_files
from core.models.gpt.description import described, description_of, differences
from core.models.gpt.gpt_model import GPTModel
from core.models.huggingface.blocks import Slices
from core.models.huggingface.companions import copy_companions, write_companions
from core.models.huggingface.facts import Facts
from core.models.huggingface.families import family_of, from_huggingface
from core.models.huggingface.family.family import Family, HuggingFaceModel
from core.models.huggingface.matching import matching_family
from core.models.huggingface.rows import Row, rows_of
from core.parallel_state import ParallelState, layout_of

FILE_BYTES = 5 << 30  # as transformers' own files
PROMPTS, PROMPT_LENGTH = 4, 16
TOLERANCE = 1e-4  # of float32 logits, relative to the largest


@dataclass(frozen=True)
class TheirTensor(FileTensor):
    """A tensor of theirs, and the parameter of ours that holds its numbers."""

    parameter: str


@dataclass(frozen=True)
class _Form:
    """What a checkpoint is written as; `companions(folder, dtype)` writes what lies beside the weights."""

    model: HuggingFaceModel
    family: Family
    companions: Callable[[Path, str], None]
    said_by: str  # for messages: who says what the model is


def export_huggingface(
    checkpoint: str | Path,
    folder: str | Path,
    source: str | Path | None = None,
    *,
    check: bool = False,
    file_bytes: int = FILE_BYTES,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> float | None:
    """Write the model of a checkpoint as Hugging Face's `folder`, there as a whole or not at all.

    source: the folder that the model began as; its configuration, tokenizer and generation files are carried over.
    Default: what the run said of its model; it is written as the first family that says all of its facts.
    check: transformers loads what was written, and its logits must be ours; the largest difference is returned.
    Raises ValueError: a checkpoint of another model than `source` describes (by name, with both shapes), one that
    says nothing of its model, a fact that no family has, logits that differ. ImportError: `check` without
    transformers.
    """
    form = _of_run(checkpoint) if source is None else _of_source(checkpoint, Path(source).expanduser())
    ours = _Parameters(form, checkpoint)
    tensors = ours.their_tensors()
    with new_folder(folder) as temporary, space_for(open_dir(temporary), sum(tensor.nbytes for tensor in tensors)):
        write_files(temporary, tensors_by_file(tensors, file_bytes), ours.values_of, progress)
        form.companions(temporary, tensors[0].dtype)
        return _largest_difference(temporary, ours, form.model) if check else None


def _of_source(checkpoint: str | Path, source: Path) -> _Form:
    """As the folder that it began as. Raises ValueError: the checkpoint says that it is another model."""
    family, model = family_of(Facts.of_folder(source)), from_huggingface(source)
    said: Any = open_stored(checkpoint).run.get("model")
    if said is not None and (different := differences(said, description_of(**model.arguments()))):
        raise ValueError(
            f"{checkpoint} is not the model that {source} describes: {', '.join(different)}; give the folder that it "
            "began as, or leave --source out: the checkpoint says what it is"
        )
    return _Form(
        model,
        family,
        lambda folder, dtype: copy_companions(source, folder, dtype),
        "the source's configuration",
    )


def _of_run(checkpoint: str | Path) -> _Form:
    """As the family that says all that the run said."""
    run = open_stored(checkpoint).run
    if "model" not in run:
        raise ValueError(
            f"{checkpoint} says nothing of its model: give --source, a folder with its config.json (checkpoints of "
            "the trainer say it)"
        )
    model = HuggingFaceModel(**described(run["model"]))
    family, fields = matching_family(model)
    tokenizer: Any = run.get("tokenizer")
    return _Form(
        model,
        family,
        lambda folder, dtype: write_companions(fields, tokenizer, folder, dtype),
        "the run's configuration",
    )


class _Parameters:
    """Our parameters by name, read from a checkpoint, and their tensors that are made of them.

    Shapes have been compared with the model's. The last parameter is kept: several of theirs are made of it.
    """

    def __init__(self, form: _Form, checkpoint: str | Path) -> None:
        self._config, stored = form.model.config, lazy_tensors(checkpoint)
        self._rows: dict[str, Row] = rows_of(
            form.family.rows, form.model.config.num_layers, form.model.config.num_moe_experts
        )
        self._stored: dict[str, tuple[LazyTensor, int | None]] = {}
        self._last: tuple[str, Tensor] | None = None
        with torch.device("meta"):  # names, shapes and layers, no memory
            model = GPTModel(**form.model.arguments(), parallel=ParallelState.single("cpu"), seed=0)
        self._shapes = {name: tuple(layout_of(parameter).shape) for name, parameter in model.named_parameters()}
        for name, sharded in model.sharded_state_dict().items():
            key = sharded.key
            if key not in stored:
                raise ValueError(f"{checkpoint} holds no {key}, which {form.said_by} asks for")
            stacked = bool(sharded.prepend_axis_num)
            shape = tuple(stored[key].shape[1:] if stacked else stored[key].shape)
            if shape != self._shapes[name]:
                raise ValueError(f"{key} is {shape} in {checkpoint}, {self._shapes[name]} by {form.said_by}")
            self._stored[name] = stored[key], sharded.global_offset[0] if stacked else None

    def read(self, name: str) -> Tensor:
        """A full parameter of ours."""
        if self._last is None or self._last[0] != name:
            tensor, layer = self._stored[name]
            self._last = name, tensor[...] if layer is None else tensor[layer]
        return self._last[1]

    def their_tensors(self) -> list[TheirTensor]:
        """In the order of our parameters."""
        tensors = []
        for name, (stored, _) in self._stored.items():
            dtype = str(stored.dtype).removeprefix("torch.")
            for their_name, shape in self._rows[name].huggingface_shapes(self._shapes[name], self._config).items():
                tensors.append(TheirTensor(their_name, shape, dtype, name))
        return tensors

    def values_of(self, tensor: TheirTensor) -> Iterator[np.ndarray]:
        """The values of one of theirs, as `write_files` wants them."""
        ours = self.read(tensor.parameter)
        full: Slices = tuple(slice(0, size) for size in ours.shape)
        all_blocks = self._rows[tensor.parameter].blocks(full, self._config)
        blocks = [block for block in all_blocks if block.name == tensor.name]
        if len(blocks) == 1 and not blocks[0].transposed:
            # no copy where their tensor is a run of ours: nearly all of them
            yield memory_of(ours[blocks[0].ours].reshape(tensor.shape))
            return
        hf_tensor = torch.empty(tensor.shape, dtype=ours.dtype)
        for block in blocks:
            block.to_huggingface(ours, hf_tensor[block.hf_slices])
        yield memory_of(hf_tensor)


@torch.no_grad()
def _largest_difference(folder: Path, parameters: _Parameters, model_form: HuggingFaceModel) -> float:
    """Between transformers' logits of what was written and ours of what the checkpoint holds, both in float32."""
    from transformers import AutoModelForCausalLM

    in_float32 = replace(model_form.config, params_dtype=torch.float32, pipeline_dtype=None)
    arguments = model_form.arguments() | {"config": in_float32}
    ours = GPTModel(**arguments, parallel=ParallelState.single("cpu"), seed=0).eval()
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
