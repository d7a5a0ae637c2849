"""A model that was trained already: a run's newest checkpoint, one checkpoint, or a Hugging Face folder."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.dist_checkpointing import load_common_state_dict
from core.dist_checkpointing.publish.checkpoint_root import CheckpointRoot, step_name
from core.dist_checkpointing.publish.manifest import MANIFEST
from core.dist_checkpointing.reading.loading import load
from core.dist_checkpointing.reading.stored import StoredCheckpoint
from core.dist_checkpointing.state.mapping import sharded_state_dict
from core.dist_checkpointing.storage.address import below
from core.models.gpt import GPTModel
from core.models.huggingface import HuggingFaceModel, from_huggingface, load_huggingface
from core.parallel_state import ParallelState
from core.pipeline import Pipeline, SingleStage
from core.training.config import RunConfig
from core.training.config.run import known_fields
from core.training.config.toml_files import read_toml
from core.training.run.build import build_stages

_LONGEST_SEQUENCE = 1024  # of a Hugging Face model, unless data.sequence_length says otherwise
# of a run's settings, what another layout, machine or purpose does not share with it
_KEPT = ("model.", "data.", "training.micro_batch_size")


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Where a model lies. settings: flat names of its run, as far as they describe the model and its text.

    url: of the checkpoint, or the Hugging Face folder. form: the model as Hugging Face describes it; None: `settings`
    do. tokenizer: identity of the tokenizer that its text was made with, where the checkpoint knows it.
    """

    url: str
    settings: Mapping[str, Any]
    is_checkpoint: bool
    form: HuggingFaceModel | None = None
    tokenizer: str | None = None

    def vocab_size(self, of_the_text: int) -> int:
        """Rows of its embedding, for a text whose tokenizer has so many tokens."""
        return of_the_text if self.form is None else self.form.vocab_size

    def load(self, run: RunConfig, vocab_size: int, ps: ParallelState) -> dict[int, GPTModel]:
        """stage -> model of this rank, with its weights. Collective.

        Raises ValueError: a checkpoint of another model; a Hugging Face folder over pipeline ranks.
        """
        if self.form is None:
            stages = build_stages(run.model, run.pipeline, vocab_size, run.data.sequence_length, ps)
        else:
            if ps.size("pp") > 1:
                raise ValueError(
                    f"a Hugging Face model is read whole, parallel.pipeline={ps.size('pp')} divides it; use "
                    "parallel.tensor"
                )
            stages = {0: GPTModel(**self.form.arguments(), parallel=ps, parallel_output=True)}
        if self.is_checkpoint:
            load({"model": sharded_state_dict(stages, ps)}, self.url, ps=ps, cast=True)
        else:
            load_huggingface(stages[0], self.url)
        return stages


def executor_of(stages: Mapping[int, GPTModel], run: RunConfig, ps: ParallelState) -> SingleStage | Pipeline:
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
    if (path / "config.json").is_file() and not (path / MANIFEST).exists():
        folder_form = from_huggingface(path)
        return Trained(url=str(path), settings=_length_of(folder_form), is_checkpoint=False, form=folder_form)
    settings: Mapping[str, Any] = {}
    if path.suffix == ".toml" or (path / "run.toml").is_file():
        settings = _from_file(path if path.suffix == ".toml" else path / "run.toml")
        directory = settings.get("checkpoint.directory")
        if directory in (None, "None"):
            raise ValueError(f"the run of {target} kept no checkpoint; train it with checkpoint.directory=DIRECTORY")
        target = str(directory)
    url = _newest(target)
    settings = settings or _of_checkpoint(url)
    objects = load_common_state_dict(url)
    form = from_huggingface(Path(source).expanduser()) if source is not None else None
    if form is not None:
        settings = _length_of(form)
    elif not settings and not described:
        raise ValueError(
            f"{url} does not tell what model it holds; give --config run.toml of its run, or --source, the Hugging "
            "Face folder that it began as"
        )
    return Trained(
        url=url,
        settings={name: value for name, value in settings.items() if name.startswith(_KEPT)},
        is_checkpoint=True,
        form=form,
        tokenizer=objects.get("training/order/tokenizer"),
    )


def _length_of(form: HuggingFaceModel) -> dict[str, Any]:
    return {"data.sequence_length": min(_LONGEST_SEQUENCE, form.max_sequence_length)}


def _from_file(path: Path) -> dict[str, Any]:
    fields_by_name = known_fields()
    values = read_toml(path, fields_by_name).values
    return {name: value for name, value in values.items() if name in fields_by_name}  # without other versions' fields


def _newest(target: str) -> str:
    """The checkpoint itself, or the newest of a directory of steps."""
    if "://" not in target and (Path(target) / MANIFEST).is_file():
        return target
    steps = CheckpointRoot(target).steps() if "://" in target or os.path.isdir(target) else []
    if steps:
        return below(target, step_name(steps[-1]))
    if "://" in target:
        return target
    raise ValueError(
        f"{target} is no run (it has no run.toml), no checkpoint (no {MANIFEST}), no directory of steps and no "
        "Hugging Face folder (no config.json)"
    )


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
