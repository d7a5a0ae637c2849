"""Weights of a checkpoint, of any layout, as the first weights of another run; nothing else of it is read."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from core.datasets import TokenFile, open_blend
from core.datasets.card import recorded_tokenizer
from core.datasets.corpus.cached import is_text, tokenizer_beside
from core.datasets.shards.manifest import is_list
from core.dist_checkpointing.planning.ranks import agree, problem_of
from core.dist_checkpointing.reading.lazy import LazyTensor, lazy_tensors
from core.dist_checkpointing.reading.loading import Report, load, open_stored
from core.dist_checkpointing.state.mapping import ShardedTensor, sharded_state_dict
from core.models.gpt.description import description, differences
from core.models.gpt.gpt_model import GPTModel
from core.models.huggingface.origin import folder_of_form
from core.parallel_state import ParallelState
from core.training.model.config import ModelConfig

_GROUP = "model/"
_POSITIONS = "embedding.position_embeddings.weight"
_TABLE = "embedding.word_embeddings.weight"
_HEAD = "output_layer.weight"
_SHOWN = 8


def model_settings(url: str) -> dict[str, Any]:
    """`model.*` of the run that saved a checkpoint, by flat name; none where it cannot be read, or says nothing."""
    try:
        settings: Any = open_stored(url).run.get("settings", {})
    except (OSError, ValueError):
        # the rules of `checkpoint.weights` tell
        return {}
    return {
        name: value
        for name, value in settings.items()
        if name.startswith("model.") and value is not None
    }


def form_of_weights(url: str) -> str | None:
    """The Hugging Face folder that a checkpoint began as, or was imported from; None: there was none, or it does not
    say."""
    try:
        run = open_stored(url).run
    except (OSError, ValueError):
        # the rules of `checkpoint.weights` tell
        return None
    imported: Any = run.get("imported") or {}
    folder: str | None = folder_of_form(run) or imported.get("folder")
    return folder


def tokenizer_for(url: str, train: tuple[str, ...]) -> str | None:
    """The file of the tokenizer that a checkpoint's run had, for text whose first part says none; None: it says one,
    the tokens were bytes, or the file is not there any more."""
    try:
        saved = tokenizer_of_run(url)
        path = saved.get("path")
        if path is not None:
            path = recorded_tokenizer(path, saved["identity"])
        first = open_blend(train)[0][1]
        if path is None or not path.is_file() or is_list(first):
            return None
        says = not is_text(first) and (TokenFile(first).card or tokenizer_beside(first))
    except (OSError, ValueError):
        # the rules of the files and of `checkpoint.weights` tell
        return None
    return None if says else str(path)


def tokenizer_of_run(url: str) -> dict[str, Any]:
    """path and identity of the tokenizer that a checkpoint's run had; empty: it does not say. Raises OSError,
    ValueError: nothing to read."""
    said: Any = open_stored(url).run.get("tokenizer") or {}
    return dict(said)


def load_weights(
    stages: Mapping[int, nn.Module],
    url: str,
    ps: ParallelState,
    say: Callable[[str], None] = print,
    *,
    grows: bool = True,
) -> None:
    """Fill the stages of this rank from the model of a checkpoint; other dtypes are converted. Collective.

    A table of learned positions that is longer here than there keeps its initial values behind those that are
    stored; not where it would stay as it is (`grows`). Raises ValueError, on every rank: another vocabulary, other
    shapes or names, all of them named.
    """
    stored: list[Mapping[str, LazyTensor]] = []
    agree(problem_of(lambda: stored.append(lazy_tensors(url))), ps)
    state: dict[str, ShardedTensor] = dict(sharded_state_dict(_named_as(stored[0], stages, ps), ps))
    arrays = sum(key.startswith(_GROUP) for key in stored[0])
    positions = stored[0].get(_GROUP + _POSITIONS)
    table = dict(stages[min(stages)].named_parameters()).get(_POSITIONS)
    grown = None
    if positions is not None and table is not None and _has_more_rows(positions.shape, table.shape):
        grown = table if grows else None
    if grown is not None:
        # filled by hand, in its first rows: `load` takes equal shapes only
        state.pop(_POSITIONS)
    # on all ranks, those without the table too: otherwise they would wait in the load for one that failed here
    agree(problem_of(lambda: _fill_rows(grown, positions)), ps)
    if grown is not None and positions is not None:
        say(
            f"positions {positions.shape[0]} to {grown.shape[0] - 1} are new: {url} has {positions.shape[0]}"
        )
    _, report = load({"model": state}, url, ps=ps, cast=True, strict="report")
    problems = _of_report(report)
    if problems:
        refusal = _refusal(url, problems, arrays)
        if ps.size("pp") > 1 and len(problems) >= arrays:
            refusal += (
                f". Or it was saved as one module, {{'model': module.state_dict()}}, whose names the stages of "
                f"parallel.pipeline={ps.size('pp')} do not have: begin with parallel.pipeline=1, or save it from "
                "the stages (sharded_state_dict, or a run's checkpoint)"
            )
        raise ValueError(refusal)
    say(f"weights of {url}: {arrays} arrays")
    saved_model: Any = open_stored(url).run.get("model")
    gpt = next((stage for stage in stages.values() if isinstance(stage, GPTModel)), None)
    if (
        saved_model is not None
        and gpt is not None
        and (changed := differences(saved_model, description(gpt)))
    ):
        say(
            f"warning: {url} is of a model with {', '.join(changed)}: what it learned may not serve this one"
        )


def _named_as(
    stored: Mapping[str, LazyTensor], stages: Mapping[int, nn.Module], ps: ParallelState
) -> Mapping[int, nn.Module] | nn.Module:
    """A model in one stage under the names of a program that saved the module itself, where those are stored."""
    is_numbered = any(key.startswith(f"{_GROUP}stages.") for key in stored)
    if len(stages) > 1 or ps.size("pp") > 1 or is_numbered:
        return stages
    module = next(iter(stages.values()))
    # layer by layer, as `state_dict()` names them: not one array per list of layers
    lists = vars(module).get("stacks", {})
    if any(key.startswith(f"{_GROUP}{name}.0.") for name in lists for key in stored):
        module = copy(module)
        module.stacks = {}  # type: ignore[assignment]
    return module


def _has_more_rows(stored: Sequence[int], here: Sequence[int]) -> bool:
    return stored[0] < here[0] and tuple(stored[1:]) == tuple(here[1:])


@torch.no_grad()
def _fill_rows(table: Tensor | None, positions: LazyTensor | None) -> None:
    if table is not None and positions is not None:
        table[: positions.shape[0]].copy_(positions[...])


def _of_report(report: Report) -> list[str]:
    grown = _GROUP + _POSITIONS
    problems = [f"{_name_in_model(key)} is not there" for key in report.missing]
    problems += [
        f"{_name_in_model(key)} is there, and nothing here takes it"
        for key in report.unexpected
        if key != grown
    ]
    return problems + [
        f"{_name_in_model(key)}: {reason}" for key, reason in report.mismatched.items()
    ]


def _name_in_model(key: str) -> str:
    return key.removeprefix(_GROUP)


def _refusal(url: str, problems: list[str], arrays: int) -> str:
    more = ""
    if len(problems) > _SHOWN:
        more = f"; and {len(problems) - _SHOWN} more"
    fitting = max(0, arrays - len(problems))
    form = form_of_weights(url)
    remedy = "the settings of that model (model.* and data.tokenizer in its run.toml)"
    if form is not None:
        remedy = f"model.huggingface={form}, the folder of that model, beside it"
    return (
        f"checkpoint.weights={url} is of another model, {fitting} of its {arrays} arrays fit: "
        f"{'; '.join(problems[:_SHOWN])}{more}; give {remedy}"
    )


def weights_rules(
    model: ModelConfig, url: str, tokens: int | None, sequence_length: int
) -> Iterator[tuple[bool, str]]:
    """A local checkpoint holds exactly this model, as far as it can be known before any process group exists.

    tokens: of the tokenizer; None: not known yet, the vocabulary is compared when the weights are loaded.
    """
    # here, so that a configuration without weights is read without the code that trains
    from core.models.gpt import GPTModel

    try:
        stored = {
            key: tensor for key, tensor in lazy_tensors(url).items() if key.startswith(_GROUP)
        }
        arguments = model.arguments(tokens or 1, sequence_length)
    except (ValueError, OSError) as error:
        yield False, f"checkpoint.weights={url}: {error}"
        return
    if not stored:
        yield (
            False,
            f"checkpoint.weights={url} holds 0 arrays under {_GROUP}; give a checkpoint of a run",
        )
        return
    with torch.device("meta"):  # names and shapes
        whole = GPTModel(**arguments, parallel=ParallelState.single("cpu"), seed=0)
    # as a checkpoint would name them: padding and splits play no part
    expected = {shard.key: shard.info.shape for shard in whole.sharded_state_dict().values()}
    if "lora" in open_stored(url).run:
        yield (
            False,
            f"checkpoint.weights={url} holds adapters (lora.rank), not a whole model: export it (python -m "
            f"core.models.huggingface export {url} FOLDER), and give model.huggingface=FOLDER",
        )
        return
    problems = list(_differences(expected, stored, compares_vocabulary=tokens is not None))
    yield not problems, _refusal(url, problems, len(stored)) if problems else ""


def _differences(
    expected: Mapping[str, tuple[int, ...]], stored: Mapping[str, Any], *, compares_vocabulary: bool
) -> Iterator[str]:
    """A line per array that is on one side only, or of two shapes."""
    for key, shape in expected.items():
        name = _name_in_model(key)
        if key not in stored:
            yield f"{name} is not there"
            continue
        stored_shape = tuple(stored[key].shape)
        if stored_shape == shape or (name == _POSITIONS and _has_more_rows(stored_shape, shape)):
            continue
        if name == _POSITIONS and stored_shape[0] > shape[0]:
            positions = stored_shape[0]
            yield f"{name} is {stored_shape} there and {shape} here; give model.max_position_embeddings={positions}"
        elif compares_vocabulary or stored_shape[1:] != shape[1:] or name not in (_TABLE, _HEAD):
            yield f"{name} is {stored_shape} there and {shape} here"
    for key in sorted(stored.keys() - expected.keys()):
        yield f"{_name_in_model(key)} is there, and nothing here takes it"
