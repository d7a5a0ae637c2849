"""A model of one's own that has changed since its checkpoint: no facts say so, but names and shapes of weights do."""

from collections.abc import Mapping
from typing import Any

from core.dist_checkpointing.format.keys import key_of
from core.dist_checkpointing.planning.ranks import from_first
from core.dist_checkpointing.reading.loading import open_stored
from core.dist_checkpointing.state.catalog import flatten
from core.parallel_state import ParallelState
from core.parallel_state.collectives import all_gather_objects
from core.parallel_state.modules import without_wrappers

_GROUP = "model/"
_OF_ONE_PIPELINE = (
    ". Names that begin with stages. are of one pipeline: go on under the parallel.pipeline and pipeline.schedule "
    'that saved them; or write self.stacks = {"layers": NUM_LAYERS} in each stage, whose layers have their '
    "numbers in the whole model: what is saved from then on opens under any pipeline (docs/concepts/configuration.md)"
)
Shapes = Mapping[str, tuple[int, ...] | None]


def refuse_other_model(state: Mapping[str, Any], url: str, ps: ParallelState) -> None:
    """state: what is loaded of the model. Collective. Raises ValueError, on every rank: other weights are there."""
    arrays = flatten({"model": state}).arrays()
    here: dict[str, tuple[int, ...] | None] = {}
    for shapes in all_gather_objects(
        {without_wrappers(key_of(k)): tuple(i.shape) for k, i in arrays.items()}, ps.world
    ):
        here |= shapes
    there = dict(from_first(lambda: [(k, s and list(s)) for k, s in _stored(url).items()], ps))
    if not there:
        return
    lists = {
        "only there are {}": sorted(there.keys() - here.keys()),
        "only here are {}": sorted(here.keys() - there.keys()),
        "of another shape are {}": [
            f"{key} ({there[key]} there, {list(here[key] or ())} here)"
            for key in sorted(here.keys() & there.keys())
            if there[key] is not None and there[key] != list(here[key] or ())
        ],
    }
    words = [text.format(_few(keys)) for text, keys in lists.items() if keys]
    if words:
        raise ValueError(
            f"{url} is of a model with other weights: {'; '.join(words)}. Build the model that was saved "
            "(model.build, and the settings that it reads), or begin another run: checkpoint.directory=ANOTHER"
            f"{_OF_ONE_PIPELINE if any(map(_of_a_stage, here.keys() ^ there.keys())) else ''}"
        )


def _of_a_stage(key: str) -> bool:
    return key.removeprefix(_GROUP).startswith("stages.")


def _stored(url: str) -> Shapes:
    """Key -> shape of the model's arrays, None for one that is made from another; empty: told by the load."""
    try:
        stored = open_stored(url, sizes=False)
    except (OSError, ValueError):
        return {}
    shapes: dict[str, tuple[int, ...] | None] = dict.fromkeys(map(key_of, stored.derived))
    shapes |= {key_of(key): stored.shape(key) for key in stored.metadata}
    return {without_wrappers(key): shape for key, shape in shapes.items() if key.startswith(_GROUP)}


def _few(keys: list[str]) -> str:
    names = [key.removeprefix(_GROUP) for key in keys]
    return ", ".join(names[:4]) + f" and {len(names) - 4} more" * (len(names) > 4)
