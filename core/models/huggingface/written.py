"""What a folder of Hugging Face's is written of: the family, and their tensors made of our parameters."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.dist_checkpointing.reading.read import memory_of, torch_dtype
from core.dist_checkpointing.tools.safetensors_files import FileTensor
from core.models.gpt.description import described, description_of, differences
from core.models.gpt.gpt_model import GPTModel
from core.models.huggingface.companions import copy_companions, write_companions
from core.models.huggingface.facts import Facts
from core.models.huggingface.families import family_of, from_huggingface
from core.models.huggingface.family.family import Family, HuggingFaceModel
from core.models.huggingface.matching import matching_family
from core.models.huggingface.rows import Row, rows_of
from core.models.lora.config import LoraConfig
from core.parallel_state import ParallelState, layout_of
from core.parallel_state.layout import Slices
from core.parallel_state.modules import named_buffers
from core.tensor_parallel.low_rank import fold


@dataclass(frozen=True)
class TheirTensor(FileTensor):
    """A tensor of theirs, and the parameter of ours that holds its numbers."""

    parameter: str


@dataclass(frozen=True)
class FolderForm:
    """What a model is written as; `companions(folder, dtype)` writes what lies beside the weights."""

    model: HuggingFaceModel
    family: Family
    companions: Callable[[Path, str], None]
    said_by: str  # for messages: who says what the model is


def form_of_source(
    source: str | Path,
    described_as: Mapping[str, Any] | None,
    origin: str,
    tokenizer: Mapping[str, Any] | None = None,
) -> FolderForm:
    """As the folder that the model began as.

    described_as: what `origin` (for messages) says of its model, if it does. tokenizer: as of `form_of_run`.
    Raises ValueError: that is another model than the folder's.
    """
    source = Path(source).expanduser()
    family = family_of(Facts.of_folder(source))
    model = from_huggingface(source)
    different = described_as is not None and differences(
        described_as, description_of(**model.arguments())
    )
    if different:
        raise ValueError(
            f"{origin} is not the model that {source} describes: {', '.join(different)}; give the folder that it "
            "began as, or leave the source out: the model itself says what it is"
        )
    length = None if described_as is None else described_as["max_sequence_length"]
    return FolderForm(
        model,
        family,
        lambda folder, dtype: copy_companions(source, folder, dtype, length, tokenizer),
        "the source's configuration",
    )


def form_of_run(described_as: Mapping[str, Any], tokenizer: Mapping[str, Any] | None) -> FolderForm:
    """As the family that says all that a run said of its model. Raises ValueError: there is none."""
    model = HuggingFaceModel(**described(described_as))
    family, fields = matching_family(model)
    return FolderForm(
        model,
        family,
        lambda folder, dtype: write_companions(fields, tokenizer, folder, dtype),
        "the run's configuration",
    )


@dataclass(frozen=True)
class Part:
    """What a parameter of ours is of an array: one layer of a stack, or all of it (None)."""

    key: str
    layer: int | None


class Parameters:
    """Our parameters by name, read one by one, and their tensors that are made of them.

    arrays: key -> (shape, dtype) of what is there; compared with the model's. read(part) -> a full parameter; the
    last one is kept, since several of theirs are made of it. origin: whose they are, for messages.
    lora: of the adapters among the arrays, which are folded into the matrices beside them. dtype: torch's name, that
    floating parameters are rounded to; buffers stay as they are.
    Raises ValueError: an array that is missing, or of another shape; adapters that nobody described.
    """

    def __init__(
        self,
        form: FolderForm,
        arrays: Mapping[str, tuple[tuple[int, ...], str]],
        origin: str,
        read: Callable[[Part], Tensor],
        lora: LoraConfig | None = None,
        dtype: str | None = None,
    ) -> None:
        self._config = form.model.config
        self._read = read
        self._arrays = arrays
        self._lora = lora
        # name of a matrix -> the two factors of its adapter
        self._factors: dict[str, tuple[Part, Part]] = {}
        self._rows: dict[str, Row] = rows_of(
            form.family.rows, range(form.model.config.num_layers), form.model.config.num_moe_experts
        )
        self._parts: dict[str, Part] = {}
        self._last: tuple[str, Tensor] | None = None
        # names, shapes and layers, no memory
        with torch.device("meta"):
            model = GPTModel(**form.model.arguments(), parallel=ParallelState.single("cpu"), seed=0)
        tensors: dict[str, Tensor] = dict(model.named_parameters())
        self._rounded = {} if dtype is None else dict.fromkeys(tensors, dtype)
        # buffers that the family knows; what a run counts beside them is not of the model
        tensors |= {name: buffer for name, buffer in named_buffers(model) if name in self._rows}
        self._shapes = {name: tuple(layout_of(tensor).shape) for name, tensor in tensors.items()}
        for name, sharded in model.sharded_state_dict().items():
            if name not in tensors:
                continue
            # layers are rows of one stacked array: several parameters share a key
            key = sharded.key
            if key not in arrays:
                raise ValueError(f"{origin} holds no {key}, which {form.said_by} asks for")
            stacked = bool(sharded.prepend_axis_num)
            stored_shape, _ = arrays[key]
            shape = tuple(stored_shape[1:] if stacked else stored_shape)
            if shape != self._shapes[name]:
                raise ValueError(
                    f"{key} is {shape} in {origin}, {self._shapes[name]} by {form.said_by}; export with the "
                    "configuration of the model that wrote it"
                )
            self._parts[name] = part = Part(key, sharded.global_offset[0] if stacked else None)
            self._find_factors(name, part, origin)

    def _find_factors(self, name: str, part: Part, origin: str) -> None:
        """Note the adapter of a matrix, if there is one."""
        a, b = (f"{part.key.removesuffix('weight')}adapter.lora_{factor}" for factor in "AB")
        if not part.key.endswith(".weight") or a not in self._arrays:
            return
        if self._lora is None:
            raise ValueError(f"{origin} holds {a}, and nothing says what it is multiplied by")
        self._factors[name] = Part(a, part.layer), Part(b, part.layer)

    def read(self, name: str) -> Tensor:
        """A full parameter of ours, with its adapter folded in."""
        # several of their tensors (q, k, v) are made of one of ours, one after the other
        if self._last is None or self._last[0] != name:
            self._last = None  # memory holds one
            tensor = self._read(self._parts[name])
            if name in self._factors:
                assert self._lora is not None
                a, b = map(self._read, self._factors[name])
                tensor = fold(tensor, a, b, self._lora.scale)
            self._last = name, tensor.to(torch_dtype(self._dtype_of(name)))
        return self._last[1]

    def their_tensors(self) -> list[TheirTensor]:
        """In the order of our parameters."""
        tensors = []
        for name in self._parts:
            dtype = self._dtype_of(name)
            for their_name, shape in (
                self._rows[name].huggingface_shapes(self._shapes[name], self._config).items()
            ):
                tensors.append(TheirTensor(their_name, shape, dtype, name))
        return tensors

    def _dtype_of(self, name: str) -> str:
        _, saved = self._arrays[self._parts[name].key]
        return self._rounded.get(name, saved) if "float" in saved else saved

    def reads(self, tensors: Iterable[TheirTensor]) -> list[Part]:
        """What `values_of` reads where it is asked for tensors in this order."""
        names = [name for name, _ in groupby(tensor.parameter for tensor in tensors)]
        return [
            part for name in names for part in (self._parts[name], *self._factors.get(name, ()))
        ]

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
