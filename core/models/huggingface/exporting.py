"""A checkpoint, or a model that all ranks hold together, as a folder that `transformers` loads.

One tensor is in memory at a time.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from core.data_parallel import DataParallel
from core.dist_checkpointing.planning.exchange import owned_cells
from core.dist_checkpointing.planning.plan import plan_gathering
from core.dist_checkpointing.planning.prepare import SavePlanner
from core.dist_checkpointing.planning.ranks import agree, default_state, from_first, problem_of
from core.dist_checkpointing.reading.lazy import lazy_tensors, read_in_order
from core.dist_checkpointing.reading.loading import load, open_stored
from core.dist_checkpointing.reading.read import torch_dtype
from core.dist_checkpointing.state.mapping import sharded_state_dict as module_state_dict
from core.dist_checkpointing.storage.checkpoint_dir import open_dir, space_for
from core.dist_checkpointing.tools.safetensors_files import new_folder, tensors_by_file, write_files
from core.models.gpt.description import described, description
from core.models.gpt.gpt_model import GPTModel
from core.models.huggingface.family.family import HuggingFaceModel
from core.models.huggingface.origin import origin
from core.models.huggingface.written import (
    FolderForm,
    Parameters,
    Part,
    TheirTensor,
    form_of_run,
    form_of_source,
)
from core.optimizer import sharded_state_dict
from core.parallel_state import ParallelState
from core.parallel_state.flat import intersect
from core.parallel_state.modules import Modules, modules_of

FILE_BYTES = 5 << 30  # as transformers' own files
PROMPTS = 4
PROMPT_LENGTH = 16
TOLERANCE = 1e-4  # of float32 logits, relative to the largest


def export_huggingface(
    checkpoint: str | Path,
    folder: str | Path,
    source: str | Path | None = None,
    *,
    dtype: str | None = None,
    check: bool = False,
    file_bytes: int = FILE_BYTES,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> float | None:
    """Write the model of a checkpoint as Hugging Face's `folder`, there as a whole or not at all.

    source: the folder that the model began as; its configuration, tokenizer and generation files are carried over.
    Default: the folder that its run began as, where it is still there; else what the run said of its model, which is
    written as the first family that says all of its facts (a warning tells what such a folder then lacks).
    dtype: of the folder's floating parameters, torch's name; default the checkpoint's. Buffers stay as they are.
    check: transformers loads what was written, and its logits must be ours; the largest difference is returned.
    Raises ValueError: a checkpoint of another model than `source` describes (by name, with both shapes), one that
    says nothing of its model, a fact that no family has, logits that differ. ImportError: `check` without
    transformers.
    """
    if check and find_spec("transformers") is None:
        raise ImportError("--check compares with transformers: pip install transformers")
    form = _form_of_checkpoint(checkpoint, source)
    stored = lazy_tensors(checkpoint)
    if "lora" in open_stored(checkpoint).run:
        return _export_adapted(checkpoint, folder, source, form, dtype, check, file_bytes, progress)
    in_order: Iterator[Tensor] = iter(())
    arrays = {
        key: (tensor.shape, str(tensor.dtype).removeprefix("torch."))
        for key, tensor in stored.items()
    }
    ours = Parameters(form, arrays, str(checkpoint), lambda part: next(in_order), dtype=dtype)
    files = tensors_by_file(ours.their_tensors(), file_bytes)
    # the files are written in this order, so each parameter is read once, and while the one before is written
    parts = ours.reads(chain.from_iterable(files))
    with ExitStack() as opened:
        temporary = _new_folder(opened, folder, files)
        in_order = read_in_order([(stored[part.key], part.layer) for part in parts])
        write_files(temporary, files, ours.values_of, progress)
        # the end is where it raises if a file is not the one that was saved
        assert next(in_order, None) is None
        form.companions(temporary, _dtype_of_most(files))
        if check:
            return _largest_difference(temporary, _in_float32(checkpoint, form.model), dtype)
        return None


def _export_adapted(
    checkpoint: str | Path,
    folder: str | Path,
    source: str | Path | None,
    form: FolderForm,
    dtype: str | None,
    check: bool,
    file_bytes: int,
    progress: Callable[[int], None],
) -> float | None:
    """Of a run with LoRA: the whole model in memory, its adapters folded into the weights that the run began with."""
    from core.models.lora.apply import merge_lora
    from core.models.lora.base import (
        load_adapted,
    )  # here: it reads folders of Hugging Face's itself

    facts_of_model: Any = open_stored(checkpoint).run.get("model")
    arguments = form.model.arguments() if facts_of_model is None else described(facts_of_model)
    model = GPTModel(**arguments, parallel=(alone := ParallelState.single("cpu")), seed=0)
    load_adapted({0: model}, str(checkpoint), alone, source=None if source is None else str(source))
    merge_lora(model)
    tensors, arrays = dict[Part, Tensor](), dict[str, tuple[tuple[int, ...], str]]()
    for shard in model.sharded_state_dict().values():
        layer = shard.global_offset[0] if shard.prepend_axis_num else None
        tensors[Part(shard.key, layer)] = shard.data.detach()
        arrays[shard.key] = shard.global_shape, str(shard.data.dtype).removeprefix("torch.")
    ours = Parameters(form, arrays, str(checkpoint), tensors.__getitem__, dtype=dtype)
    files = tensors_by_file(ours.their_tensors(), file_bytes)
    with ExitStack() as opened:
        temporary = _new_folder(opened, folder, files)
        write_files(temporary, files, ours.values_of, progress)
        form.companions(temporary, _dtype_of_most(files))
        if check:
            return _largest_difference(temporary, model.float().eval(), dtype)
        return None


def _form_of_checkpoint(checkpoint: str | Path, source: str | Path | None) -> FolderForm:
    run = open_stored(checkpoint).run
    description_of_run: Any = run.get("model")
    tokenizer: Any = run.get("tokenizer")
    problem = ""
    if source is None:
        source, problem = origin(run)
    if source is not None:
        return form_of_source(source, description_of_run, str(checkpoint), tokenizer)
    if description_of_run is None:
        raise ValueError(
            f"{checkpoint} says nothing of its model: give --source, a folder with its config.json (checkpoints of "
            "the trainer say it)"
        )
    if problem:
        end = (
            "none"
            if tokenizer is None
            else f"{tokenizer.get('end_of_text')}, which ends the run's documents"
        )
        warnings.warn(
            f"{problem}: its chat template and its own eos_token_id are not known; eos_token_id is {end}. --source "
            "HF_DIR says where it is",
            stacklevel=3,
        )
    return form_of_run(description_of_run, tokenizer)


def _new_folder(
    opened: ExitStack, folder: str | Path, files: Sequence[Sequence[TheirTensor]]
) -> Path:
    """The directory to fill, which becomes `folder` when `opened` is closed."""
    temporary = opened.enter_context(new_folder(folder))
    nbytes = sum(tensor.nbytes for tensors in files for tensor in tensors)
    opened.enter_context(space_for(open_dir(temporary), nbytes))
    return temporary


def _dtype_of_most(files: Sequence[Sequence[TheirTensor]]) -> str:
    """Of the folder, for its configuration: routers may keep a few wider numbers."""
    nbytes = Counter[str]()
    for tensor in chain.from_iterable(files):
        nbytes[tensor.dtype] += tensor.nbytes
    return nbytes.most_common(1)[0][0]


def save_huggingface(
    model: DataParallel | Modules,
    folder: str | Path,
    source: str | Path | None = None,
    *,
    ps: ParallelState | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    file_bytes: int = FILE_BYTES,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Write a model that all ranks hold together as Hugging Face's `folder`; collective over all of them.

    The first rank writes, the same files as `export_huggingface` of a checkpoint of the model. No rank but that one
    gathers anything, and that one holds one tensor at a time; what ZeRO cut is sent as it lies.

    model: a GPTModel, a rank's pipeline stages, the `DataParallel` that holds them (under ZeRO-3 that), or what
    `initialize` returned. ps: default: the one that the model was built for.
    source: as `export_huggingface`; only the first rank reads it. tokenizer: what a run
    says of its own: {"path": of tokenizer.json, "identity": ..., "end_of_text": its id}, which are for where there is
    no source, and "answer_ends". progress: called on the
    first rank with bytes written.
    Raises on all ranks, before anything is gathered where it can be known: ValueError (no GPTModel, another model
    than `source` describes, a fact that no family has, a folder that is there), OSError (no space). Nothing
    half-written is left.
    """
    model = _unwrapped(model)
    parallel = _state_of(model, ps)
    weights = _Gathered(model, parallel)

    with ExitStack() as opened:
        write: Callable[[], None] = weights.take_part

        def begin() -> list[tuple[str, int | None]]:
            """The order in which parameters are gathered."""
            nonlocal write
            description_of_model = description(_gpt_of(model))
            if source is None:
                form = form_of_run(description_of_model, tokenizer)
            else:
                form = form_of_source(source, description_of_model, "the model", tokenizer)
            lora = _gpt_of(model).lora
            ours = Parameters(form, weights.arrays, "the model", weights.read, lora)
            files = tensors_by_file(ours.their_tensors(), file_bytes)
            temporary = _new_folder(opened, folder, files)

            def write_all() -> None:
                write_files(temporary, files, ours.values_of, progress)
                form.companions(temporary, _dtype_of_most(files))

            write = write_all
            return [(part.key, part.layer) for part in ours.reads(chain.from_iterable(files))]

        # rank 0 decides what it writes first; all ranks must gather in that order
        weights.order = [Part(key, layer) for key, layer in from_first(begin, parallel)]
        agree(problem_of(lambda: weights.in_order(write)), parallel)
        # the folder is published here
        problem = problem_of(opened.close) if parallel.rank == 0 else None
    agree(problem, parallel)


def _unwrapped(model: Any) -> DataParallel | Modules:
    """What an engine holds in its `shard`, and wrappers (DDP, a ModuleDict of stages by number) in them."""
    shard = getattr(model, "shard", None)
    if isinstance(shard, DataParallel):
        return shard
    while isinstance(model, nn.Module) and not isinstance(model, GPTModel):
        inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            break
        model = inner
    if isinstance(model, nn.ModuleDict):
        return {int(number): stage for number, stage in model.items()}
    unwrapped: Modules = model
    return unwrapped


def _state_of(model: DataParallel | Modules, ps: ParallelState | None) -> ParallelState:
    if isinstance(model, DataParallel):
        return model.ps
    if ps is not None:
        return ps
    # the layout that the model was built for
    state = getattr(next(iter(modules_of(model).values())), "parallel", None)
    if isinstance(state, ParallelState):
        return state
    return default_state()


def _gpt_of(model: DataParallel | Modules) -> GPTModel:
    modules = model.module if isinstance(model, DataParallel) else model
    stage = next(iter(modules_of(modules).values()))
    if not isinstance(stage, GPTModel):
        raise ValueError(
            f"the model is a {type(stage).__name__}, a GPTModel is needed: no family of Hugging Face's is known for "
            "others; save a checkpoint, and `python -m core.dist_checkpointing export` writes its weights"
        )
    return stage


class _Gathered:
    """Parameters of a model that are gathered to the first rank, one at a time; each read is collective.

    `order` says which is read when, on all ranks alike. arrays: key -> (shape, dtype). Collective when it is made.
    """

    def __init__(self, model: DataParallel | Modules, ps: ParallelState) -> None:
        state: dict[str, Any] = {}
        if isinstance(model, DataParallel):
            state["model"] = sharded_state_dict(model)
        else:
            state["model"] = module_state_dict(model, ps)
        self._save = SavePlanner(ps, "bf16").prepare(state)
        self._ps = ps
        self.arrays = {key: (info.shape, info.dtype) for key, info in self._save.arrays.items()}
        self._plans = plan_gathering(self._save.arrays, self._save.holdings, 0)
        self.order: list[Part] = []
        self._done = 0

    def read(self, part: Part) -> Tensor:
        """On the first rank, the next of `order` in full."""
        assert part == self.order[self._done], "other ranks send what is next"
        tensor = self._next()
        assert tensor is not None
        return tensor

    def take_part(self) -> None:
        """What the first rank has not read yet is sent, and dropped there."""
        while self._done < len(self.order):
            self._next()

    def in_order(self, call: Callable[[], None]) -> None:
        """Call it; if it fails, the others, who are still to send, are not left waiting."""
        try:
            call()
        finally:
            self.take_part()

    def _next(self) -> Tensor | None:
        part = self.order[self._done]
        ps = self._ps
        self._done += 1
        info = self._save.arrays[part.key]
        # the plan has one cell per layer of a stack, or one for the whole array
        index = (part.layer or 0, *(0 for _ in info.shape[1:]))
        plan = self._plans[part.key, index]
        # of a stack the layers that this rank holds of it
        box = plan.cells[part.key][0][1]
        shards = [
            shard
            for shard in self._save.shards.get(part.key, ())
            if intersect(shard.box, box) is not None
        ]
        gathered = None
        for _, _, _, array in owned_cells(
            plan, {part.key: info}, {part.key: shards}, ps.rank, ps.world, ps.device
        ):
            tensor = torch.from_numpy(array).view(torch_dtype(info.dtype))
            gathered = (tensor if part.layer is None else tensor[0]).contiguous()
        return gathered


def _in_float32(checkpoint: str | Path, model_form: HuggingFaceModel) -> GPTModel:
    """The model that the folder holds: the checkpoint's, of 16-bit weights what they are rounded to."""
    # 16-bit logits would differ by rounding alone
    in_float32 = replace(model_form.config, params_dtype=torch.float32, pipeline_dtype=None)
    arguments = model_form.arguments() | {"config": in_float32}
    ours = GPTModel(**arguments, parallel=ParallelState.single("cpu"), seed=0).eval()
    shards = ours.sharded_state_dict()
    load({"model": shards}, checkpoint, strict=False, ps=ours.parallel, cast=True)
    stored = lazy_tensors(checkpoint)
    # in float32 the optimizer's main weights are read, of which the folder has the rounded ones
    with torch.no_grad():
        for shard in shards.values():
            if shard.key in stored:
                shard.data.copy_(shard.data.to(stored[shard.key].dtype))
    return ours


@torch.no_grad()
def _largest_difference(folder: Path, ours: GPTModel, dtype: str | None) -> float:
    """Between transformers' logits of what was written and ours, both in float32. dtype: of the folder's weights."""
    from transformers import AutoModelForCausalLM

    if dtype is not None:
        for parameter in ours.parameters():
            parameter.copy_(parameter.to(torch_dtype(dtype)))
    hf_model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    length = min(PROMPT_LENGTH, ours.max_sequence_length)
    prompts = torch.randint(
        ours.vocab_size, (PROMPTS, length), generator=torch.Generator().manual_seed(0)
    )
    expected = hf_model(prompts).logits
    actual = ours(prompts)
    difference = float((expected - actual).abs().max())
    largest = float(expected.abs().max())
    if not difference <= TOLERANCE * largest:
        raise ValueError(
            f"the exported model's logits differ from ours by {difference:.2e} of {largest:.2e} in transformers "
            f"({TOLERANCE} is allowed): nothing was written"
        )
    return difference
