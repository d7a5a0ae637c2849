"""Whether a checkpoint is of this run: its data, its batch, its model; told before anything is built."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from core.dist_checkpointing.planning.ranks import from_first
from core.dist_checkpointing.publish.checkpoint_root import CheckpointRoot
from core.dist_checkpointing.reading.loading import load
from core.dist_checkpointing.reading.stored import StoredCheckpoint
from core.models.gpt.description import description_of, differences, differences_of_sizes
from core.parallel_state import ParallelState
from core.training.config import CheckpointConfig, DataConfig, RunConfig, TrainingConfig
from core.training.resume.adapters import begun_with, refuse_other_adapters
from core.training.resume.other_optimizer import refuse_other_optimizer

_OF_DECAY = ("optimizer.lr_decay_steps", "optimizer.min_lr")


def order_of(
    data: DataConfig, training: TrainingConfig, order: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Everything that decides which sample comes next; order: what the text adds (`Corpus.order`)."""
    return {
        "global_batch_size": training.global_batch_size,
        "sequence_length": data.sequence_length,
        "data_seed": data.seed,
        "seed": training.seed,
    } | dict(order or {})


def changes_of_order(
    url: str, saved: Mapping[str, Any], here: Mapping[str, Any], allowed: tuple[str, ...]
) -> dict[str, list[str]]:
    """ "data" or "batch" -> what of it differs, in words. Raises ValueError: something that is not `allowed`."""
    # another order of the data would repeat some samples and skip others, silently
    changed: dict[str, list[str]] = {}
    # only what was saved: a fact that newer versions know is not in old checkpoints
    for name, value in saved.items():
        if here.get(name) != value:
            change = "batch" if name == "global_batch_size" else "data"
            changed.setdefault(change, []).append(f"{name}={value} (here {here.get(name)})")
    unsaid = [text for change, texts in changed.items() if change not in allowed for text in texts]
    if unsaid:
        needed = sorted({*allowed, *changed})
        raise ValueError(
            f"{url} was trained with {', '.join(unsaid)}: its next batch would not be the one that comes next; "
            f"use the same, or say that it changes: checkpoint.change = {json.dumps(needed)}; a run from step 0 "
            f"with these weights is {begun_with(url)}"
        )
    return changed


def changes_of_rate(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Settings by which the learning rate of a step is another than before, each as "name=value (now value)"."""
    names = [name for name in here if name.startswith(("optimizer.lr", "optimizer.min_lr"))]
    if here.get("optimizer.lr_schedule") == "constant":
        names = [name for name in names if name not in _OF_DECAY]
    return [
        f"{name}={saved[name]} (now {here[name]})"
        for name in names
        if name in saved and saved[name] != here[name]
    ]


def changes_of_update(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Other settings of the optimizer than before, as above."""
    of_rate = ("optimizer.lr", "optimizer.min_lr")
    return [
        f"{name}={saved[name]} (now {value})"
        for name, value in here.items()
        # JSON has no tuples
        if name.startswith("optimizer.")
        and not name.startswith(of_rate)
        and name in saved
        and saved[name] != (list(value) if isinstance(value, tuple) else value)
    ]


def compare_models(
    url: str, here: Mapping[str, Any] | None, allowed: tuple[str, ...], say: Callable[[str], None]
) -> None:
    """Raise ValueError for a model with other facts, also where no shape shows them, and nobody allowed it."""
    stored: Any = StoredCheckpoint.open(url).run.get("model")
    changed: list[str] = []
    sizes: list[str] = []
    if stored is not None and here is not None:
        changed = differences(stored, here)
        sizes = differences_of_sizes(stored, here)
    if sizes:
        raise ValueError(
            f"{url} is of a model with {', '.join(sizes)}: its weights have other shapes. Use the same, or begin "
            "another run: checkpoint.directory=ANOTHER"
        )
    if changed and "model" not in allowed:
        raise ValueError(
            f"{url} is of a model with {', '.join(changed)}; use the same, or say that it changes: "
            f"checkpoint.change = {json.dumps(sorted({*allowed, 'model'}))}"
        )
    if changed:
        say(f"changed, as checkpoint.change says: model, which was {', '.join(changed)}")


def refuse_another_run(
    run: RunConfig, tokens: int, order: Mapping[str, Any], ps: ParallelState
) -> None:
    """Before the model is built: the checkpoint that `run` goes on from has its data, batch, model and optimizer.

    Collective. tokens: of the tokenizer. Only the newest step is looked at; what cannot be read is told when it is
    loaded.
    Raises ValueError, on every rank.
    """
    url = from_first(lambda: _newest(run.checkpoint), ps)
    if url is None:
        return
    if run.model.build is None:
        model = description_of(**run.model.arguments(tokens, run.data.sequence_length))
        # silent: an allowed change is told when the checkpoint is loaded
        compare_models(url, model, run.checkpoint.change, lambda line: None)
    current = order_of(run.data, run.training, order)
    template = {"training": {"order": dict(current)}}
    try:
        saved = load(template, url, ps=ps, strict=False)["training"]["order"]
    except (OSError, ValueError):
        return
    changes_of_order(url, saved, current, run.checkpoint.change)
    if run.model.build is None:
        refuse_other_adapters(url, run.lora.facts() if run.lora.rank is not None else None)
    refuse_other_optimizer(run, url, ps)


def _newest(config: CheckpointConfig) -> str | None:
    """What `Checkpoints.resume` tries first; None: nothing, or nothing that can be found."""
    if config.load is not None:
        return config.load
    if config.directory is None or config.resume == "never":
        return None
    try:
        root = CheckpointRoot(config.directory)
        steps = root.steps()
        if steps:
            return root.open(steps[-1]).address
        return None
    except (OSError, ValueError):
        return None
