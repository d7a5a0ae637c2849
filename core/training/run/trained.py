"""A model that was trained already: a run's newest checkpoint, one checkpoint, or a Hugging Face folder."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from core.dist_checkpointing import load_common_state_dict
from core.dist_checkpointing.publish.manifest import MANIFEST
from core.dist_checkpointing.reading.loading import load
from core.dist_checkpointing.reading.newest import newest_checkpoint
from core.dist_checkpointing.reading.stored import StoredCheckpoint
from core.dist_checkpointing.state.mapping import sharded_state_dict
from core.models.gpt import GPTModel
from core.models.huggingface import from_huggingface
from core.models.huggingface.facts import adapters_alone
from core.models.lora.base import adapters_of, load_adapted
from core.parallel_state import ParallelState
from core.pipeline import Pipeline, SingleStage
from core.their_folders import is_huggingface
from core.training.config import LoraConfig, RunConfig
from core.training.config.run import known_fields
from core.training.config.toml_files import read_toml
from core.training.model.begin import first_stages

# of a Hugging Face model, unless data.sequence_length says otherwise
_LONGEST_SEQUENCE = 1024
# of a run's settings, what another layout, machine or purpose does not share with it
_KEPT = ("model.", "data.", "training.micro_batch_size")


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Where a model lies, and the flat settings of its run that describe it and its text.

    is_checkpoint: `url` is one; else the Hugging Face folder that `settings` name. tokenizer: identity of the
    tokenizer of its text, where the checkpoint knows it. source: the folder that it began as, if that was given.
    """

    url: str
    settings: Mapping[str, Any]
    is_checkpoint: bool
    tokenizer: str | None = None
    source: str | None = None

    def load(self, run: RunConfig, tokens: int, ps: ParallelState) -> Mapping[int, nn.Module]:
        """stage -> module of this rank, with its weights; tokens: of the tokenizer. Collective.

        Raises ValueError: a checkpoint of another model, a tokenizer with more tokens than the model.
        """
        # the checkpoint says which adapters it has
        run = replace(run, lora=LoraConfig())
        stages = first_stages(run, tokens, ps, resumes=self.is_checkpoint)
        if self.is_checkpoint and adapters_of(self.url) is not None:
            models = {n: stage for n, stage in stages.items() if isinstance(stage, GPTModel)}
            load_adapted(models, self.url, ps, source=self.source)
        elif self.is_checkpoint:
            load({"model": sharded_state_dict(dict(stages), ps)}, self.url, ps=ps, cast=True)
        return stages


def executor_of(
    stages: Mapping[int, nn.Module], run: RunConfig, ps: ParallelState
) -> SingleStage | Pipeline:
    """Runs forward over the stages, `training.micro_batch_size` rows at once. Collective."""
    count = run.training.global_batch_size // ps.size("dp") // run.training.micro_batch_size
    if ps.size("pp") == 1:
        return SingleStage(stages[0], ps=ps, num_microbatches=count)
    return Pipeline(stages, ps=ps, schedule=run.pipeline.schedule, num_microbatches=count)


def find_trained(target: str, source: str | None = None, *, described: bool = False) -> Trained:
    """What a path or URL names; every rank by itself.

    source: of a checkpoint that began as a Hugging Face folder, that folder. described: the caller knows the settings
    (--config), so that none need to be found.
    Raises ValueError: nothing of these is there, or a checkpoint does not tell what model it holds.
    """
    path = Path(target).expanduser()
    # a checkpoint may lie in a folder that has a config.json, too
    if is_huggingface(path) and not (path / MANIFEST).exists():
        return Trained(url=str(path), settings=_of_folder(path), is_checkpoint=False)
    settings: Mapping[str, Any] = {}
    if path.suffix == ".toml" or (path / "run.toml").is_file():
        settings = _from_file(path if path.suffix == ".toml" else path / "run.toml")
    url = newest_checkpoint(target)
    if url is None:
        raise ValueError(no_model(target))
    # what a run.toml says goes before what the checkpoint remembers
    settings = settings or _of_checkpoint(url)
    objects = load_common_state_dict(url)
    if source is not None:
        settings = _of_folder(Path(source).expanduser())
    elif not settings and not described:
        raise ValueError(
            f"{url} does not tell what model it holds; give --config run.toml of its run, or --source, the Hugging "
            "Face folder that it began as"
        )
    return Trained(
        url=url,
        settings={name: value for name, value in settings.items() if name.startswith(_KEPT)},
        is_checkpoint=True,
        tokenizer=objects.get("training/order/tokenizer"),
        source=source,
    )


def no_model(target: str | Path) -> str:
    """What is said of a path where no model lies."""
    return adapters_alone(Path(target).expanduser()) or (
        f"{target} is no run (it has no run.toml), no checkpoint (no {MANIFEST}), no directory of steps "
        "and no Hugging Face folder (no config.json)"
    )


def _of_folder(folder: Path) -> dict[str, Any]:
    length = min(_LONGEST_SEQUENCE, from_huggingface(folder).max_sequence_length)
    return {"model.huggingface": str(folder), "data.sequence_length": length}


def _from_file(path: Path) -> dict[str, Any]:
    fields_by_name = known_fields()
    values = read_toml(path, fields_by_name).values
    # without other versions' fields
    return {name: value for name, value in values.items() if name in fields_by_name}


def _of_checkpoint(url: str) -> dict[str, Any]:
    """The settings in its manifest, else those of a run.toml beside the directory of steps; empty: neither."""
    fields_by_name = known_fields()
    stored = StoredCheckpoint.open(url).run.get("settings")
    if isinstance(stored, Mapping):
        return {name: value for name, value in stored.items() if name in fields_by_name}
    if "://" in url:
        return {}
    above = Path(url).resolve().parents
    for directory in above[:2]:
        if (directory / "run.toml").is_file():
            return _from_file(directory / "run.toml")
    return {}
